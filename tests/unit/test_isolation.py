"""Work in a child of its own: what it returns, and every way in which it can exceed its limits."""

import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest
from pydantic_core import from_json

from gpunode.errors import UsageError
from gpunode.isolation import AnswerLimits, Exceeded, Workers

LIMITS = AnswerLimits(cpu_s=1, wall_s=60, memory_mib=64, answer_mib=1)


def work(kind: str, data: bytes) -> bytes:
    """What a test asks for."""
    match kind:
        case "size":
            return f"{os.getpid()} {len(data)}".encode()
        case "memory":
            return bytes(256 << 20)
        case "loop":
            while True:
                pass
        case "regex":
            re.fullmatch(r"(a+)+b", "a" * 60)
        case "sleep":
            time.sleep(60)
        case "killed":
            os.kill(os.getpid(), signal.SIGUSR1)
        case "abort":
            os.abort()
        case "refuses":
            raise UsageError("not a bundle")
        case "breaks":
            raise ValueError("\x1b[2J{{ secret }}")
        case "floods":
            return bytes(2 << 20)
    return b""


@pytest.fixture
def workers() -> "Workers":
    return Workers(work, LIMITS)


def test_answers_come_from_a_child(workers: Workers) -> None:
    with workers:
        pids = set[int]()
        for _ in range(3):
            pid, size = workers("size", b"x" * (5 << 20)).split()
            assert size == str(5 << 20).encode()
            pids.add(int(pid))
    assert len(pids) == 1, "one child serves them one after another"
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("memory", "more than 64 MiB of memory"),
        ("loop", "more than 1 s of processor time"),
        ("regex", "more than 1 s of processor time"),
        ("killed", "terminated by signal 10"),
        ("abort", "more than 64 MiB of memory"),
        ("breaks", "failed: unexpected ValueError"),
        ("floods", "larger than"),
    ],
)
def test_what_exceeds_its_limits_is_reported_and_the_next_is_served(workers: Workers, kind: str, reason: str) -> None:
    with workers:
        with pytest.raises(Exceeded, match=reason) as reported:
            workers(kind, b"")
        assert str(reported.value).isprintable()
        assert workers("size", b"xyz").split()[1] == b"3"


def test_one_that_waits_for_ever_is_ended() -> None:
    with Workers(work, AnswerLimits(wall_s=1)) as workers, pytest.raises(Exceeded, match="took more than 1 s"):
        workers("sleep", b"")


def test_what_the_work_refuses_is_refused_here(workers: Workers) -> None:
    with workers, pytest.raises(UsageError, match="not a bundle"):
        workers("refuses", b"")


def test_threads_are_served_side_by_side_and_no_more_than_agreed() -> None:
    with Workers(work, LIMITS, most=2) as workers:
        answers: list[bytes] = []
        threads = [threading.Thread(target=lambda: answers.append(workers("size", b"abc"))) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(answers) == 12


def test_nothing_is_left(workers: Workers) -> None:
    def sleep() -> None:
        with suppress(Exceeded):
            workers("sleep", b"")

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    time.sleep(0.3)
    pid = workers.pid
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    thread.join(10)
    assert not thread.is_alive(), "the child ended with the process that forked it"


@pytest.mark.parametrize("serving", [False, True])
def test_after_the_end_of_the_process_that_forks_each_answer_has_a_reason(workers: Workers, *, serving: bool) -> None:
    with workers:
        if serving:
            workers("size", b"x")
        os.kill(workers.pid, signal.SIGKILL)
        os.waitpid(workers.pid, 0)
        for _ in range(3):
            with suppress(Exceeded) if serving else pytest.raises(Exceeded, match="failed: no process"):
                workers("size", b"x")
        with pytest.raises(Exceeded, match="failed"):
            workers("killed", b"")
        with pytest.raises(Exceeded, match="failed: no process"):
            workers("size", b"x")


def test_a_controller_without_descriptors_gives_each_answer_a_reason(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with workers:
        monkeypatch.setattr(socket, "socketpair", none)
        with pytest.raises(Exceeded, match="Too many open files"):
            workers("size", b"x")
        monkeypatch.undo()
        assert workers("size", b"x")


@pytest.mark.parametrize("item", ["[1]", "[" * 100 + "]" * 100])
def test_a_document_that_is_too_large_in_memory_is_reported_as_that(monkeypatch: pytest.MonkeyPatch, item: str) -> None:
    """Pydantic's core ends by a panic there, and with RUST_BACKTRACE=1 it would not end at all."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    # Far above the limit: memory that earlier tests of this process released can be used again without counting.
    text = "[" + ",".join([item] * (32_000_000 // (len(item) + 1))) + "]"

    def read(document: str) -> bytes:
        return str(len(from_json(document))).encode()

    with (
        Workers(read, AnswerLimits(wall_s=60, memory_mib=32)) as workers,
        pytest.raises(Exceeded, match="32 MiB of memory"),
    ):
        workers(text)
