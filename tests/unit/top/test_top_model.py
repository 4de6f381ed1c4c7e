"""What lines of a node make of its row: statuses, counts, bounds, and documents that obey their schema."""

import json
import random

import jsonschema
import pytest
from effort import effort

from gpunode.cli.reference import schema_of
from gpunode.onnode.top import Follower
from gpunode.top import model
from gpunode.top.model import COLUMNS, NodeModel, TopDocument, TopNode, csv_lines

GPU = (
    "G {index}, GPU-{index}, 00000000:{bus}:00.0, NVIDIA H100 80GB HBM3, {load}, 40, 60000, 81559, 640.00, 700.00, 62, "
    "1830, 1980, 0x0000000000000000, 5, 16, {corrected}, 0"
)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> NodeModel:
    return NodeModel("gpu-01", 1, 30.0, clock)


def gpu(index: int = 0, load: int = 97, corrected: int = 0) -> str:
    return GPU.format(index=index, bus=f"{index + 16:02X}", load=load, corrected=corrected)


def sampled(node: NodeModel, clock: Clock, seconds: int = 30, gpus: int = 2, **values: int) -> TopNode:
    for _ in range(seconds):
        clock.now += 1
        for index in range(gpus):
            node.feed(gpu(index, **values))
    return node.snapshot()


def test_a_node_with_its_processes(node: NodeModel, clock: Clock) -> None:
    assert node.snapshot().status == "connecting"
    node.feed('N {"simulated": true}')
    sampled(node, clock, 29)
    owner = {"pid": 7, "uid": 1000, "user": "ada", "name": "python3", "cgroup": "/slurm/uid_1000/job_41/step_0"}
    for line in ("A GPU-0, 7, 512", f"P {json.dumps(owner)}", "T     1   2048      3", "C 0.10,0.20,60.00"):
        node.feed(line)
    beat = node.beat()
    clock.now += 0.5
    node.feed(f"B {beat}")
    snapshot = sampled(node, clock, 1, corrected=3)
    assert (snapshot.status, snapshot.simulated, snapshot.reason) == ("live", True, None)
    assert (snapshot.latency_ms, snapshot.cost_percent) == (250.0, 0.5)
    first, second = snapshot.gpus
    assert (first.verdict, first.utilization_percent, first.corrected_new, first.uncorrected_new) == ("ok", 97, 3, 0)
    assert [(process.pid, process.user, process.slurm_job, process.memory_mib) for process in first.processes] == [
        (7, "ada", "41", 512)
    ]
    assert (second.processes, second.pcie_received_gb_per_s, second.pcie_sent_gb_per_s) == ((), 2.048, 0.003)
    # A process that is not listed any more is gone.
    assert sampled(node, clock, 10).gpus[0].processes == ()


def test_xids_belong_to_their_gpu(node: NodeModel, clock: Clock) -> None:
    sampled(node, clock)
    for number in (79, 31, 31):
        node.feed(f"K <3>[ 5.1] NVRM: Xid (PCI:0000:11:00): {number}, pid=7, x")
    snapshot = sampled(node, clock, 1)
    assert [[(xid.xid, xid.count) for xid in each.xids] for each in snapshot.gpus] == [[], [(31, 2), (79, 1)]]


def test_silence_and_the_end_of_nvidia_smi_have_a_reason_and_a_time(node: NodeModel, clock: Clock) -> None:
    sampled(node, clock)
    clock.now += 6
    assert node.snapshot().status == "live"
    clock.now += 20
    snapshot = node.snapshot()
    assert (snapshot.status, snapshot.gpus) == ("silent", ())
    assert "the node or the connection hangs" in str(snapshot.reason)
    node.feed("B 1")
    assert "the node answers, nvidia-smi hangs" in str(node.snapshot().reason)
    since = snapshot.since
    node.feed("E G,Failed to initialize NVML: Driver/library version mismatch")
    clock.now += 60
    assert "mismatch" in str(node.snapshot().reason)
    node.set_status("failed", "no answer for 30 s")
    assert (node.snapshot().status, node.snapshot().since) == ("failed", since)
    assert sampled(node, clock, 1).status == "live"
    assert node.snapshot().reason is None


def test_one_gpu_that_is_listed_no_more_is_lost(node: NodeModel, clock: Clock) -> None:
    sampled(node, clock, gpus=2)
    snapshot = sampled(node, clock, 20, gpus=1)
    assert [each.verdict for each in snapshot.gpus] == ["ok", "lost"]


def test_a_lost_gpu_without_identity_keeps_its_row(node: NodeModel, clock: Clock) -> None:
    sampled(node, clock)
    clock.now += 1
    node.feed(gpu(0))
    node.feed("G 1, " + ", ".join(["[GPU is lost]"] * 17))
    snapshot = node.snapshot()
    assert [(each.uuid, each.verdict) for each in snapshot.gpus] == [("GPU-0", "ok"), ("GPU-1", "lost")]


def test_what_is_missing_is_named(node: NodeModel, clock: Clock) -> None:
    node.feed("E K,dmesg: read kernel buffer failed: Operation not permitted")
    snapshot = sampled(node, clock)
    assert snapshot.status == "live"
    assert snapshot.reason == "no Xids: dmesg: read kernel buffer failed: Operation not permitted"


def lines(draw: random.Random) -> str:
    pieces = (
        gpu(draw.randrange(300), draw.randrange(200)),
        f"A GPU-{draw.randrange(90)}, {draw.randrange(9000)}, 512",
        f"T {draw.randrange(90)} 1 2",
        f"K <3>[ 5.1] NVRM: Xid (PCI:{draw.randrange(9999):04x}:1b:00): {draw.randrange(500)}, x",
        f'P {{"pid": {draw.randrange(9000)}, "user": "\\u001b[2J", "name": "=x", "cgroup": "/a"}}',
        "C 1,2,3",
        "E G,\x1b[31mdown",
        f"B {draw.randrange(20)}",
        "N []",
        "_ x",
        "Gx",
        "",
    )
    line = draw.choice(pieces)
    return (
        line
        if draw.random() < 0.8
        else line[: draw.randrange(len(line) + 1)] + draw.choice(["\x1b]0;x\x07", ",,,", "\xe9"])
    )


def test_a_hostile_stream_is_bounded_and_its_document_obeys(clock: Clock) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema_of("top")))
    for seed in range(effort(3, 60)):
        draw = random.Random(seed)  # noqa: S311 (reproducible, not secret)
        node = NodeModel("gpu-01", 1, 30.0, clock)
        for _ in range(effort(2500, 20000)):
            clock.now += draw.choice([0, 0, 0.001, 0.1])
            node.feed(lines(draw))
        snapshot = node.snapshot()
        document = TopDocument(at="2026-11-23T20:00:00Z", interval_s=1, window_s=30.0, nodes=(snapshot,))
        text = document.as_json()
        assert "\n" not in text
        assert "\x1b" not in text
        assert len(snapshot.gpus) <= model.GPUS_MOST
        assert sum(len(each.processes) for each in snapshot.gpus) <= model.PROCESSES_MOST
        assert all(len(each.xids) <= model.XIDS_MOST for each in snapshot.gpus)
        validator.validate(json.loads(text))
        rows = csv_lines(document, header=True).splitlines()
        assert len(rows) == 1 + max(1, len(snapshot.gpus))
        assert rows[0].split(",") == list(COLUMNS)
        assert not any(cell.startswith("=") for row in rows for cell in row.split(","))


def test_an_older_driver_is_asked_for_the_older_names_at_once_and_a_failing_tool_less_and_less() -> None:
    follower = Follower("G", [["nvidia-smi", "new"], ["nvidia-smi", "old"]])
    follower.last = b'Field "clocks_event_reasons.active" is not a valid field to query.'
    assert follower.ended(5.0) == b'Field "clocks_event_reasons.active" is not a valid field to query.'
    assert (follower.variant, follower.due) == (1, 5.0)
    waits = []
    for _ in range(8):
        follower.ended(0.0)
        waits.append(follower.due)
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
