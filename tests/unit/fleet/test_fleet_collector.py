"""Many nodes at once: limits that hold, an end that is prompt, nothing left behind. No SSH server is needed here."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from gpunode.errors import UsageError
from gpunode.fleet import Target, collect, local_target
from gpunode.fleet.asking import Turn
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
