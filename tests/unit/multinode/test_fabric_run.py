"""The run over several nodes, by the real programs of two nodes that are this machine, without PyTorch."""

import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from gpunode.checks import Status
from gpunode.fabric import preflight
from gpunode.fabric.model import Hello, InterfaceAddress
from gpunode.fabric.run import FabricRequest, FabricResult, FabricRun
from gpunode.fabric.verdict import verdict_of
from gpunode.facts import NodeFacts
from gpunode.workload import devices
from gpunode.workload.devices import Use
from gpunode.workload.transport import LaunchFailure


class Program:
    """A program of this machine, its stdin and stdout as one socket."""

    def __init__(self, words: list[str]) -> None:
        self.sock, remote_end = socket.socketpair()
        self._process = subprocess.Popen(
            words, stdin=remote_end.fileno(), stdout=remote_end.fileno(), stderr=subprocess.DEVNULL
        )
        remote_end.close()

    def complaint(self) -> str:
        return ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


class LocalTransport:
    """A node that is this machine; ``ended`` ones cannot start Python."""

    as_root = (False,)
    user = "somebody"

    def __init__(self, *, ended: bool = False) -> None:
        self._ended = ended

    def engine(self, *, root: bool) -> Any:  # noqa: ARG002
        raise LaunchFailure("no-engine", "Docker is not installed on the node")

    def python(self, program: str, arguments: tuple[str, ...]) -> Program:
        if self._ended:
            raise LaunchFailure("no-python", "python3 is not installed on the node")
        return Program([sys.executable, "-I", "-c", program, *arguments])


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes meet at 127.0.0.1: a test machine may have no other network."""

    def usable(hello: Hello, interface: str | None) -> list[InterfaceAddress]:
        return [address for address in hello.addresses if address.interface == (interface or "lo")]

    monkeypatch.setattr(preflight, "usable", usable)


def run(transports: dict[str, LocalTransport], **changes: Any) -> FabricResult:
    options = {"in_container": False, **changes}
    request = FabricRequest(image=lambda _: "none", run_limit_s=60.0, tests="fabric", **options)
    group = FabricRun(request, list(transports), login_limit_s=5.0)
    facts = NodeFacts(host="n", collected_at="", simulated=False, pci=())

    def member(name: str, transport: LocalTransport) -> None:
        group.member(name, transport, facts, lambda _: None, time.monotonic() + 90)

    threads = [threading.Thread(target=member, args=item, daemon=True) for item in transports.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    return group.end()


def test_nodes_meet_start_ranks_and_report_the_missing_pytorch() -> None:
    result = run({"b": LocalTransport(), "a": LocalTransport(), "c": LocalTransport(ended=True)}, racks={"a": "r2"})
    assert (result.nodes, result.rank_names, result.backend) == (("b", "a"), ("b", "a"), "gloo")
    assert {finding.check: finding.status for finding in result.findings["c"]} == {"nodes.node": Status.ERROR}
    assert [record["record"] for record in result.records] == ["fabric.links"]
    assert "torch" in json.dumps(result.records).lower()
    verdict = verdict_of(result.records, nodes=result.nodes, engine="ssh", backend="gloo", ranks=2, minutes=0.1)
    assert {finding.status for name in result.nodes for finding in verdict.findings[name]} == {Status.ERROR}


def test_one_node_that_is_left_runs_nothing() -> None:
    result = run({"a": LocalTransport(), "b": LocalTransport(ended=True)})
    assert (result.nodes, result.records) == ((), [])


HELLO = '{"hello": {"hostname": "h", "port": 5}}'


ANSWERS = (
    ["[" * 50_000],
    ['{"hello": ' + '{"a":' * 20_000],
    ['{"hello": 5}'],
    ['{"hello": {"hostname": "h", "port": 1e999}}'],
    ["\ufffd\x00"],
    [HELLO, '{"clock": NaN}'],
    [HELLO, '{"clock": 1e999}'],
    [HELLO, f'{{"clock": {10**400}}}'],
    [HELLO, '{"clock": "x"}'],
    [HELLO, '{"clock": [1]}'],
)


class Hostile(LocalTransport):
    """A node that answers as given."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self._answers = "\n".join(answers)

    def python(self, *_: Any) -> Program:
        return Program([sys.executable, "-I", "-c", f"print({self._answers!r}, flush=True); input()"])


def test_a_node_with_a_hostile_answer_is_named_by_itself() -> None:
    hostile = {f"h{number}": Hostile(answers) for number, answers in enumerate(ANSWERS)}
    result = run({"a": LocalTransport(), **hostile})
    for name in hostile:
        (finding,) = result.findings[name]
        assert (finding.check, finding.status) == ("nodes.node", Status.ERROR)
        assert finding.message.startswith("the node did not report its network: ")
        assert len(finding.message) < 400
    assert not any(finding.status is Status.ERROR for finding in result.findings.get("a", ()))


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_node_that_hangs_is_given_up_once_the_others_named_its_rank(
    monkeypatch: pytest.MonkeyPatch, hangs: int
) -> None:
    """Its program reports nothing: the end of its stdin ends it, long before the limit of the run."""

    def run_member(member: Any, request: Any, output: Any, seats: list[dict[str, Any]]) -> None:
        if seats[0]["rank"] != hangs:
            missing = {"record": "fabric.links", "error": "named", "values": {"missing": [hangs]}}
            output.stdout(json.dumps(missing).encode() + b"\n")
            return
        output.program, remote_end = socket.socketpair()
        remote_end.settimeout(60)
        assert remote_end.recv(1) == b""
        raise LaunchFailure("broke-off", "the payload was stopped on the node (alone)")

    monkeypatch.setattr("gpunode.fabric.run.run_member", run_member)
    began = time.monotonic()
    result = run({"a": LocalTransport(), "b": LocalTransport()}, rank_limit_s=1.0)
    assert time.monotonic() - began < 30
    assert result.failures == {"ab"[hangs]: "they did not answer the ranks of other nodes"}
    assert [record["values"]["missing"] for record in result.records] == [[hangs]]


def test_a_node_with_busy_gpus_is_named_and_the_others_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = iter([Use(busy=("gpu3: python3 (pid 4242, alice)",))])
    lock = threading.Lock()

    def choose(node: NodeFacts, *, force: bool, without: bool) -> Use:
        with lock:
            return next(chosen, Use())

    monkeypatch.setattr(devices, "choose", choose)
    began = time.monotonic()
    result = run({name: LocalTransport() for name in "abc"})
    assert time.monotonic() - began < 60
    ((name, busy),) = [
        (name, finding)
        for name, several in result.findings.items()
        for finding in several
        if finding.check == "nodes.busy"
    ]
    assert (busy.status, "alice" in busy.message) == (Status.FAIL, True)
    assert sorted(result.nodes) == sorted(set("abc") - {name})


def test_a_node_without_a_container_engine_is_named() -> None:
    result = run({"a": LocalTransport(), "b": LocalTransport()}, in_container=True)
    assert result.nodes == ()
    for name in ("a", "b"):
        assert [(finding.check, finding.status) for finding in result.findings[name]] == [("nodes.node", Status.ERROR)]
        assert "docker" in result.findings[name][0].message.lower()


def test_a_node_without_the_interface_is_named() -> None:
    result = run({"a": LocalTransport(), "b": LocalTransport()}, interface="ib9")
    assert result.nodes == ()
    for name in ("a", "b"):
        assert any("ib9" in finding.message for finding in result.findings[name] if finding.status is Status.ERROR), (
            result
        )
