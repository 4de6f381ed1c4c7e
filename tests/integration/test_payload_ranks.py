"""Measurements with a real PyTorch on the processor: corruption by block, links and ranks by name, their arithmetic.

GPUNODE_TORCH_PYTHON names a Python with PyTorch, see test_payload_torch.py. Nothing here is a figure of a GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from payload_programs import NEEDS_TORCH, program

from gpunode.facts.models.measured import GemmValues, PairsValues, TrainingValues

pytestmark = NEEDS_TORCH
CORRUPT = """
import json, torch
from gpunode.workload.payload import copies, gemm
calls = 0
plain = gemm.Product._plain
def altered(self, result):
    global calls
    found = plain(self, result)
    calls += 1
    if calls == 4:
        found[300, 7] += 2
    return found
gemm.Product._plain = altered
product = gemm.run(None, None, NAME, 0.3)
torch.Tensor.copy_, copy = (lambda self, *words, **more: COPY(self, *words, **more)), torch.Tensor.copy_
def COPY(self, *words, **more):
    copy(self, *words, **more)
    if self.numel() > 100_000:
        self[1234] += 1
    return self
device = copies.within(None, 3)
host = copies.host(None, 3)
torch.Tensor.copy_ = copy
plain_add = torch.add
def add(one, other, **more):
    found = plain_add(one, other, **more)
    if found.numel() > 100_000:
        found[77] += 1
    return found
torch.add = add
memory = copies.memory_bandwidth(None, None, 3)
print(json.dumps([product, device, host, memory]))
"""


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "fp64", "int8"])
def test_one_altered_element_is_found_and_its_block_named(archive: Path, name: str) -> None:
    product, device, host, memory = program(archive, CORRUPT.replace("NAME", repr(name)))
    values = GemmValues.model_validate(product)
    assert (values.wrong, len(values.corrupted)) == (1, 1)
    (block,) = values.corrupted
    assert (block.row, block.column, block.rows, block.columns) == (256, 0, 128, 128)
    assert (block.first_row, block.first_column, block.round, block.wrong) == (300, 7, 3, 1)
    assert block.found != block.expected
    assert values.compared > 4
    assert device["wrong"] == 1
    assert all(copy["wrong"] == 1 for copy in host["copies"] if copy["direction"] == "device_to_host")
    assert [kernel["wrong"] for kernel in memory["kernels"]] == [0, 0, 1]


RANKS = """
import json, os, signal, sys, tempfile, time
import torch, torch.distributed
from gpunode.workload.payload import nccl, pairs, training
from gpunode.workload.payload.group import Seat
from gpunode.workload.payload.isolate import Clock, Job, Task, run_jobs
from gpunode.workload.payload.measurements import together
size, limit_s, fault = int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
links = fault.get("links") or []
plain = pairs.send
class Never:
    def wait(self): pass
def send(group, message, partner):
    if sorted((group.seat.rank, partner)) in links:
        if fault["how"] == "slow":
            time.sleep(0.5)
        elif fault["how"] == "silent" and group.seat.rank < partner:
            return Never()
        elif fault["how"] == "corrupt":
            message = message.clone()
            message[77] ^= 4
    return plain(group, message, partner)
pairs.send = send
def dying(run):
    def part(seat, *words):
        if seat.rank == fault.get("dies"):
            work, left = nccl.Operation.wrong, [1]
            def die(self):
                os.kill(os.getpid(), fault["signal"])
                return work(self)
            nccl.Operation.wrong = die
        if seat.rank == fault.get("learns_wrong"):
            step = training.compared
            def off(model, network, expected):
                expected[0][0, 0] += 1
                return step(model, network, expected)
            training.compared = off
        return run(seat, *words)
    return part
PARTS = {
    "pairs": (pairs.run, ()),
    "all-reduce": (dying(nccl.run), (None, "all-reduce", "standard")),
    "broadcast": (nccl.run, (None, "broadcast", "standard")),
    "replicated": (dying(training.run), ("replicated", {})),
    "sharded": (dying(training.run), ("sharded", {"1000000": 1.0})),
}
found, began = {}, time.monotonic()
with tempfile.TemporaryDirectory() as folder:
    jobs = []
    for rank in range(size):
        seat = Seat(rank, size, f"file:{folder}", "gloo", limit_s=limit_s)
        tasks = [Task(name, PARTS[name][0], (seat, part, *PARTS[name][1]), 4 * limit_s)
                 for part, name in enumerate(sys.argv[4].split(","))]
        jobs.append(Job(tuple(tasks), str(rank)))
    for job, task, outcome in run_jobs(jobs, size, Clock(None)):
        found.setdefault(task.name, {})[int(job.component)] = outcome
answer = {}
for name, outcomes in found.items():
    one = together(outcomes, Seat(0, size, "file:", "gloo"))
    answer[name] = {"values": one.values, "error": one.error, "seconds": one.seconds}
print(json.dumps(answer))
"""


def ranks(archive: Path, size: int, parts: str, limit_s: float = 20, **fault: Any) -> dict[str, dict[str, Any]]:
    """What came of each part on so many ranks of this machine."""
    answer: dict[str, dict[str, Any]] = program(archive, RANKS, str(size), str(limit_s), json.dumps(fault), parts)
    return answer


@pytest.mark.parametrize(
    ("links", "how", "verdict"),
    [
        pytest.param([], "slow", None, marks=pytest.mark.alone),
        pytest.param([[2, 5]], "slow", "slow", marks=pytest.mark.alone),
        pytest.param([[2, 5], [0, 7]], "slow", "slow", marks=pytest.mark.alone),
        ([[1, 4], [4, 6]], "corrupt", "corrupt"),
        ([[3, 4]], "silent", "failed"),
    ],
)
def test_bad_links_among_eight_ranks_are_named(
    archive: Path, links: list[list[int]], how: str, verdict: str | None
) -> None:
    pairs = ranks(archive, 8, "pairs", links=links, how=how)["pairs"]
    assert pairs["error"] is None
    values = PairsValues.model_validate(pairs["values"])
    named = [list(bad.ranks) for bad in values.bad if bad.verdict == verdict]
    assert sorted(named) == sorted(links)
    # Fewer rounds than the seven in which all 28 pairs could be tried; on a busy machine one more pair may be slow.
    assert values.rounds <= (4 if not links else 10)
    assert values.cleared + len(values.bad) == values.links == 28


@pytest.mark.parametrize("dies", [0, 2])
def test_a_rank_that_is_killed_is_named_and_later_parts_run(archive: Path, dies: int) -> None:
    parts = ranks(archive, 4, "all-reduce,broadcast", dies=dies, signal=9)
    lost = parts["all-reduce"]
    assert lost["values"]["missing"] == [dies]
    assert f"rank {dies} crashed with SIGKILL" in lost["error"]
    assert lost["seconds"] < 2 * 20 + 10
    assert parts["broadcast"]["error"] is None
    assert {row["wrong"] for row in parts["broadcast"]["values"]["rows"]} == {0}


def test_a_rank_that_hangs_is_named_within_the_limit(archive: Path) -> None:
    part = ranks(archive, 3, "all-reduce", limit_s=8, dies=1, signal=19)["all-reduce"]
    assert part["values"]["missing"] == [1]
    assert "did not return within" in part["error"]
    assert part["seconds"] < 4 * 8 + 10


ALONE = """
import json, socket, sys, time
from gpunode.workload.payload import fabric, group, pytorch
from gpunode.workload.payload.isolate import Trouble
group.START_S = 1.0
pytorch.torch_module()
with socket.create_server(("127.0.0.1", 0)) as sock:
    port = sock.getsockname()[1]
    if sys.argv[1] == "down":
        sock.close()
    host = "absent.invalid" if sys.argv[1] == "unknown" else "127.0.0.1"
    seat = group.Seat(1, 2, f"tcp:{host}:{port}", "gloo", limit_s=3.0, nodes=2)
    began = time.monotonic()
    try:
        fabric.run(seat, 0, {"node": "n1"})
    except Trouble as err:
        print(json.dumps({"error": str(err), **err.values, "seconds": time.monotonic() - began}))
"""


@pytest.mark.parametrize("host", ["down", "unknown"])
def test_a_rendezvous_that_does_not_answer_is_rank_0_within_the_limit(archive: Path, host: str) -> None:
    """Nothing listens at its port, or its name is unknown."""
    failure = program(archive, ALONE, host)
    assert failure["missing"] == [0], failure
    assert failure["seconds"] < 40
    assert "rank 0 of 2" in failure["error"]


def test_a_wrong_gradient_is_counted(archive: Path) -> None:
    parts = ranks(archive, 2, "replicated,sharded", learns_wrong=1)
    for part in parts.values():
        values = TrainingValues.model_validate(part["values"])
        assert values.wrong == 1
        assert values.max_gradient_error is not None
        assert values.max_gradient_error > 0.1
    right = ranks(archive, 2, "replicated,sharded")
    assert [part["values"]["wrong"] for part in right.values()] == [0, 0]
    losses = right["sharded"]["values"]["losses"]
    assert losses[-1] < losses[0]
    assert right["sharded"]["values"]["expected_seconds"] is not None
    assert right["replicated"]["values"]["expected_seconds"] is None


WITHOUT_A_GPU = {
    "the product on the processor is the plain one, and one wrong row of it is found in every round": (
        """
from gpunode.workload.payload import frameworks
one, other = frameworks.sparse(torch, 96), frameworks.signs(torch, 96, 96)
assert torch.equal(frameworks.sparse_product(torch, one, other), one @ other)
assert int((one != 0).sum(dim=1).max()) <= 256
plain = frameworks.sparse_product
frameworks.sparse_product = lambda *matrices: plain(*matrices).index_fill_(0, torch.tensor([5]), 99.0)
print(frameworks.matmul(None)["wrong"])
""",
        5 * 512,
    ),
    "a bit that is stuck shows in one of the two patterns": (
        """
from gpunode.workload.payload import frameworks
places = torch.arange(4096, dtype=torch.int32)
pieces = [torch.empty_like(places) for _ in range(5)]
assert sum(frameworks.wrong_words(torch, places, pieces, pattern) for pattern in frameworks.PATTERNS) == 0
plain = torch.Tensor.bitwise_xor_
def stuck(piece, places):
    piece[17] |= 4
    return plain(piece, places)
torch.Tensor.bitwise_xor_ = stuck
print(sum(frameworks.wrong_words(torch, places, pieces, pattern) for pattern in frameworks.PATTERNS))
""",
        5,
    ),
    "copies arrive": (
        """
from gpunode.workload.payload import copies
cpu = torch.device("cpu")
assert copies.wrong_peers(torch, [cpu] * 3, 4096) == []
plain = torch.Tensor.to
torch.Tensor.to = lambda given, *words, **more: plain(given, *words, **more) + 1
print(len(copies.wrong_peers(torch, [cpu] * 3, 4096)))
""",
        6,
    ),
    "a product in FP8 is exact": (
        """
from gpunode.workload.payload import frameworks
frameworks.FP8_ROWS, frameworks.FP8_COLUMNS = 64, 128  # the whole size takes a processor half a minute
print(frameworks.wrong_fp8_elements(torch, torch.device("cpu")))
""",
        0,
    ),
}


@pytest.mark.parametrize("part", list(WITHOUT_A_GPU))
def test_what_a_gpu_computes_is_compared_rightly(archive: Path, part: str) -> None:
    """The arithmetic of parts that need a GPU, on the processor, with the payload as it is sent."""
    text, printed = WITHOUT_A_GPU[part]
    assert program(archive, f"import torch{text}") == printed
