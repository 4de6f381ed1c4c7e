"""Processes of ours: all that descends from one is found and ended, while others come and go."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpunode.errors import UndeterminedError, UsageError
from gpunode.fleet import process
from gpunode.fleet.process import descendants, kill_tree

TREE = "setsid sh -c 'sleep 305 & wait' & sleep 306 & echo up; wait"


def test_a_tree_is_found_and_killed_across_sessions() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        while len(pids := descendants(process.pid)) < 3:
            assert process.poll() is None
    finally:
        kill_tree(process)
        process.wait(10)
    assert process.pid not in pids
    end = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert [pid for pid in pids if _runs(pid)] == []


def test_processes_that_end_meanwhile_are_no_harm() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["/bin/true"], check=True, timeout=30)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            assert os.getpid() in descendants(os.getppid())
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (None, 0, "is not installed on this machine"),
        ("exit 0\n", 0o755, "Exec format error"),
        ("\x00\x01", 0o755, "Exec format error"),
        ("#!/bin/sh\n", 0o644, "Permission denied"),
        ("", 0o755, "Exec format error"),
        ("#!/nonexistent\n", 0o755, "is not installed on this machine"),
    ],
)
def test_a_program_that_cannot_be_started_is_one_line(text: str | None, mode: int, reason: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    if text is not None:
        program.write_text(text)
        program.chmod(mode)
    with pytest.raises(UsageError, match=reason) as caught:
        process.run([str(program), "gpu-1"], timeout_s=10)
    assert str(caught.value).startswith(str(program))
    with pytest.raises(UsageError):
        process.run([str(tmp_path)], timeout_s=10)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_ends_the_program(stream: str) -> None:
    flood = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    began = time.monotonic()
    with pytest.raises(UndeterminedError, match="was stopped: it printed more than 2 MiB"):
        process.run([sys.executable, "-I", "-c", flood], timeout_s=60, most_bytes=2 << 20)
    assert time.monotonic() - began < 30


def test_input_and_output_pass_whole_in_both_directions() -> None:
    text = "é\r\n" * 200_000
    both = "import sys; text = sys.stdin.buffer.read(); sys.stdout.buffer.write(text); sys.stderr.buffer.write(text)"
    done = process.run([sys.executable, "-I", "-c", both], timeout_s=60, stdin=text)
    assert (done.rc, done.stdout == text, done.stderr == text) == (0, True, True)
    # Not read at all, or by nobody.
    assert process.run(["/bin/true"], timeout_s=60, stdin=text).rc == 0
    assert process.run(["/bin/sh", "-c", "echo up; exit 3"], timeout_s=60) == process.Completed(3, "up\n", "")
    assert process.run(["/bin/cat"], timeout_s=60, stdin="") == process.Completed(0, "", "")


@pytest.mark.parametrize(
    "script", ["sleep 60", "exec >&- 2>&-; sleep 60", "sleep 60 & exit 0", "yes | head -c 9999; cat"]
)
def test_a_program_that_does_not_end_is_ended_with_all_that_it_started(script: str) -> None:
    before = set(descendants(os.getpid()))
    with pytest.raises(UndeterminedError, match="did not end within 1 s"):
        process.run(["/bin/sh", "-c", f"{script}; sleep 50"], timeout_s=1, stdin="x" * 2**20)
    assert not [pid for pid in set(descendants(os.getpid())) - before if _runs(pid)]


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:  # noqa: PTH123
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
