"""Many nodes at once, each within its time: limits that hold, an end that is prompt, nothing left behind."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from gpunode.errors import UsageError
from gpunode.fleet import NodeFailure, Target, asking, collect, local_target
from gpunode.fleet.asking import Reply, Turn, ask_each
from gpunode.fleet.ssh_config import SshSettings

HANGING = "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 300; true # gpunode-test-hanging-child'])\n"
BUNDLE = (
    'print(\'{"schema": "gpunode.bundle/1", "host": "x", "collected_at": "2026-11-20T00:00:00Z", '
    '"commands": {}, "files": {}}\')'
)


def local(name: str) -> Target:
    """This machine under a name."""
    return replace(local_target(), name=name, python=sys.executable)


def test_this_machine_gives_its_bundle() -> None:
    (collected,) = collect([local_target()], timeout_s=60)
    assert collected.reason is None
    assert collected.answer is not None
    assert collected.host == "localhost"
    assert collected.answer.bundle().commands


def test_no_targets_give_nothing() -> None:
    assert list(collect([])) == []


@pytest.mark.parametrize("limits", [{"parallel": 0}, {"timeout_s": 0}])
def test_limits_must_be_positive(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        list(collect([local("a")], **limits))


def test_no_more_than_allowed_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def probe(turn: Turn, *_: Any) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return b"no bundle"

    monkeypatch.setattr(Turn, "run", probe)
    results = list(collect([local(f"n{number}") for number in range(12)], parallel=3))
    assert len({collected.host for collected in results}) == 12
    assert most == 3
    for collected in results:
        assert collected.answer is not None
        with pytest.raises(UsageError, match=r"the node's answer: not a gpunode\.bundle/1 bundle"):
            collected.answer.bundle()


def test_results_come_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def probe(turn: Turn, *_: Any) -> bytes:
        if turn.target.name == "slow":
            release.wait(30)
        return b""

    monkeypatch.setattr(Turn, "run", probe)
    results = collect([local("slow"), local("quick")])
    assert next(results).host == "quick"
    release.set()
    assert next(results).host == "slow"


def test_a_thread_that_cannot_be_woken_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def probe(turn: Turn, *_: Any) -> bytes:
        if turn.target.name == "deaf":
            release.wait(60)
        return b""

    monkeypatch.setattr(Turn, "run", probe)
    monkeypatch.setattr("gpunode.fleet.asking.GRACE_S", 0.2)
    started = time.monotonic()
    results = {collected.host: collected.reason for collected in collect([local("deaf"), local("b")], timeout_s=0.5)}
    release.set()
    assert time.monotonic() - started < 5
    assert results["deaf"] == (
        "no answer within 0.5 s, login did not succeed; the node hangs or is overloaded (--timeout S)"
    )


def test_a_surprise_on_one_node_is_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(turn: Turn, *_: Any) -> bytes:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(Turn, "run", probe)
    (collected,) = collect([local("a")])
    assert collected.reason == "unexpected RuntimeError: first line"


def test_the_limit_ends_a_local_probe_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: HANGING.replace("hanging", "limited"))
    (collected,) = collect([local("a")], timeout_s=1.0)
    assert collected.reason is not None
    assert "within" in collected.reason
    assert _gone("gpunode-test-limited-child")


def test_ending_the_iteration_early_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = itertools.cycle([BUNDLE])
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: next(scripts))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = SshSettings("s", "127.0.0.1", silent.getsockname()[1], "u", identity_agent="none")
        results = collect([local("a"), Target("silent", "ssh", ssh=settings)], timeout_s=60)
        assert next(results).host == "a"
        started = time.monotonic()
        results.close()  # type: ignore[attr-defined]
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_exits_at_once_and_leaves_nothing(number: int) -> None:
    mark = f"interrupted{number}"
    program = (
        "import sys, gpunode.fleet.asking as c\n"
        f"c.program_text = lambda _: {HANGING.replace('hanging', mark)!r}\n"
        "from gpunode.fleet import collect, local_target\n"
        "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\n"
        "list(collect([local_target()], timeout_s=200))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        end = time.monotonic() + 20
        while not _seen(f"gpunode-test-{mark}-child"):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode != 0
    assert _gone(f"gpunode-test-{mark}-child")


def _processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], check=True, timeout=30, capture_output=True, text=True).stdout


def _seen(mark: str) -> bool:
    """Whether a shell of a test runs; the program that starts it has the mark in its own arguments, too."""
    lines = _processes().splitlines()
    return any(mark in line and line.startswith("/bin/sh -c sleep 300") for line in lines)


def _gone(mark: str, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not _seen(mark):
            return True
        time.sleep(0.1)
    return False


def test_the_machinery_of_these_tests_sees_a_process() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 300; true # gpunode-test-seen-child"], start_new_session=True)
    try:
        time.sleep(0.2)
        assert not _gone("gpunode-test-seen-child", within_s=0.5)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


LIMIT_S, GRACE_S = 1.0, 1.0
GIVEN = "hunter22"
LATE = "no answer within 1 s, login did not succeed; the node hangs or is overloaded (--timeout S)"


class HostileNodes:
    """Work that goes as the name of its node announces."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.aborted: list[str] = []

    def work(self, turn: Turn) -> str:
        """Answer at once, unless the node's name has another behaviour."""
        turn.abort.add(lambda: self.aborted.append(turn.target.name))
        match turn.target.name.partition("-")[0]:
            case "bits":
                self._read_bits(turn)
            case "never":
                self.over.wait(60)
            case "late":
                time.sleep(LIMIT_S + GRACE_S / 4)
            case "longer":
                turn.allow(4 * LIMIT_S)
                time.sleep(1.2 * (LIMIT_S + GRACE_S))
            case "refuses":
                raise NodeFailure(f"sudo does not accept the password {GIVEN}")
            case "surprises":
                raise RuntimeError("first \x1b line\nsecond line")
        return f"answer of {turn.target.name}"

    def _read_bits(self, turn: Turn) -> None:
        """Read from a node that always has one more byte, until the connection is closed."""
        local_end, remote_end = socket.socketpair()
        turn.abort.add(lambda: local_end.shutdown(socket.SHUT_RDWR))
        with local_end, remote_end:
            while True:
                remote_end.send(b"x")
                if not local_end.recv(1):
                    raise NodeFailure("the connection was lost")
                time.sleep(0.01)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileNodes]:
    monkeypatch.setattr(asking, "GRACE_S", GRACE_S)
    hostile = HostileNodes()
    yield hostile
    hostile.over.set()


def asked(nodes: HostileNodes, *names: str, parallel: int = 3) -> Generator[Reply[str], None, None]:
    targets = [Target(name, "ssh", password=GIVEN) for name in names]
    return ask_each(targets, nodes.work, parallel=parallel, timeout_s=LIMIT_S)


def test_hostile_nodes_cost_the_others_nothing(nodes: HostileNodes) -> None:
    good = [f"gpu-{number}" for number in range(20)]
    names = ["bits", "never", "late", "longer", "refuses", "surprises", *good]
    began = time.monotonic()
    replies = {reply.turn.target.name: reply for reply in asked(nodes, *names)}
    assert time.monotonic() - began < 10
    assert set(replies) == set(names)
    answered = {name for name, reply in replies.items() if reply.result == f"answer of {name}"}
    assert answered == {*good, "late", "longer"}, "what comes within the grace is an answer"
    assert all(replies[name].reason is None for name in answered)
    assert replies["bits"].reason == replies["never"].reason == LATE
    assert [name for name, reply in replies.items() if reply.given_up] == ["never"]
    assert replies["refuses"].reason == "sudo does not accept the password [password]"
    assert replies["surprises"].reason == "unexpected RuntimeError: first ? line"
    assert set(nodes.aborted) == set(names), "every connection is closed"


def test_what_came_meanwhile_counts_before_anybody_is_late(nodes: HostileNodes) -> None:
    replies = asked(nodes, "gpu-1", "gpu-2", "never")
    with closing(replies):
        first = next(replies)
        time.sleep(LIMIT_S + GRACE_S + 0.2)  # the caller is busy for longer than any node may take
        second, last = replies
    assert {first.result, second.result} == {"answer of gpu-1", "answer of gpu-2"}
    assert last.given_up


def test_after_an_early_end_no_node_is_asked_and_all_are_closed(nodes: HostileNodes) -> None:
    replies = asked(nodes, "gpu-1", "never-1", *(f"never-{number}" for number in range(2, 50)), parallel=2)
    with closing(replies):
        next(replies)
        began = time.monotonic()
    assert time.monotonic() - began < LIMIT_S, "none is waited for"
    end = time.monotonic() + 10
    while "never-1" not in nodes.aborted and time.monotonic() < end:
        time.sleep(0.01)
    assert "never-1" in nodes.aborted
    assert set(nodes.aborted) <= {"gpu-1", "never-1", "never-2"}
