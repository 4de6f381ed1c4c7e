"""A part that hangs, crashes or floods is an answer within its limit, and leaves no process behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from gpunode.workload.payload.isolate import (
    MAX_ANSWER_BYTES,
    MAX_TEXT,
    Clock,
    Job,
    Outcome,
    SkipPart,
    Task,
    Trouble,
    UndeterminedPart,
    isolated,
    run_jobs,
)

LIMIT_S = 20.0


def counted() -> dict[str, Any]:
    time.sleep(0.01)
    return {"device": "cuda", "count": 8}


def test_values_and_device_come_back() -> None:
    outcome = isolated(counted, (), LIMIT_S)
    assert (outcome.device, outcome.values, outcome.error, outcome.skipped) == ("cuda", {"count": 8}, None, None)
    assert 0.001 <= outcome.seconds < LIMIT_S


def test_arguments_go_in() -> None:
    assert isolated(lambda first, second: {"sum": first + second}, (1, 2), LIMIT_S).values == {"sum": 3}


def leave_out() -> dict[str, Any]:
    raise SkipPart("there is no GPU")


def find_trouble() -> dict[str, Any]:
    raise Trouble("the tensor lies\nelsewhere")


def raise_something() -> dict[str, Any]:
    raise ZeroDivisionError("\x1b[31mred\nand long " + "x" * 10000)


def fail_far_away() -> dict[str, Any]:
    raise RuntimeError("Caught an error in a worker.\n" + "File x, line 1\n" * 100 + "No space left on device")


def segfault() -> dict[str, Any]:
    ctypes.string_at(0)
    return {}


def abort() -> dict[str, Any]:
    os.abort()


def leave() -> dict[str, Any]:
    os.write(1, b"the library prints goodbye\n")
    os._exit(7)


def kill_itself() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def not_a_number() -> dict[str, Any]:
    return {"max_error": float("nan")}


def too_much() -> dict[str, Any]:
    return {"text": "x" * (MAX_ANSWER_BYTES + 1)}


def no_json() -> dict[str, Any]:
    return {"thing": object()}


def system_exit() -> dict[str, Any]:
    sys.exit(3)


@pytest.mark.parametrize(
    ("part", "reported"),
    [
        (find_trouble, "the tensor lies elsewhere"),
        (raise_something, "ZeroDivisionError: ?[31mred and long x"),
        (fail_far_away, "RuntimeError: Caught an error in a worker."),
        (fail_far_away, "No space left on device"),
        (segfault, "crashed with SIGSEGV: Fatal Python error: Segmentation fault"),
        (abort, "crashed with SIGABRT: Fatal Python error: Aborted"),
        (leave, "ended with exit status 7 and without a result: the library prints goodbye"),
        (kill_itself, "crashed with SIGKILL"),
        (not_a_number, "its result is not valid JSON"),
        (no_json, "its result is not valid JSON"),
        (too_much, "bytes, at most"),
        (system_exit, "ended with exit status 1 and without a result"),
    ],
)
def test_what_goes_wrong_is_reported(part: Callable[..., Any], reported: str) -> None:
    outcome = isolated(part, (), LIMIT_S)
    assert outcome.error is not None
    assert reported in outcome.error
    assert len(outcome.error) <= 2 * MAX_TEXT + 100
    assert "\n" not in outcome.error
    assert (outcome.values, outcome.skipped, outcome.device) == ({}, None, None)


def test_what_is_left_out_is_no_error() -> None:
    outcome = isolated(leave_out, (), LIMIT_S)
    assert (outcome.error, outcome.skipped) == (None, "there is no GPU")


def gone(pid: int) -> bool:
    """No such process, or nothing but its entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def hang_with_a_child(note: str) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "300"])
    Path(note).write_text(f"{os.getpid()} {child.pid}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(2, b"waiting for the fabric\n")
    time.sleep(300)
    return {}


def test_a_hang_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    started = time.monotonic()
    outcome = isolated(hang_with_a_child, (str(note),), 2.0)
    assert time.monotonic() - started < 10
    assert outcome.error == "did not return within 2 s: waiting for the fabric"
    pids = [int(word) for word in note.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if not gone(pid)] == []


def one_of_two(rank: int) -> dict[str, Any]:
    if rank == 0:
        time.sleep(LIMIT_S)
    raise Trouble("rank 0 is missing", {"missing": [0]})


def test_a_part_may_end_soon_after_another_jobs_outcome() -> None:
    jobs = [Job((Task("together", one_of_two, (rank,), LIMIT_S), Task("next", counted)), str(rank)) for rank in (0, 1)]

    def left_after(outcome: Outcome) -> float | None:
        return 0.5 if outcome.values.get("missing") else None

    started = time.monotonic()
    by_task = {(job.component, task.name): outcome for job, task, outcome in run_jobs(jobs, 2, Clock(None), left_after)}
    assert time.monotonic() - started < LIMIT_S / 2
    assert by_task["1", "together"].error == "rank 0 is missing"
    late = by_task["0", "together"]
    assert late.error is not None
    assert late.error.startswith("did not return within ")
    # What comes after it has its own limit.
    assert {by_task[rank, "next"].values["count"] for rank in "01"} == {8}


def leave_a_child_behind(note: str) -> dict[str, Any]:
    """Not through exec: the child holds both pipes."""
    pid = os.fork()
    if pid == 0:
        time.sleep(300)
    Path(note).write_text(str(pid))
    return {"done": True}


def test_a_child_left_behind_holds_nobody_up(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    outcome = isolated(leave_a_child_behind, (str(note),), LIMIT_S)
    assert outcome.values == {"done": True}
    assert outcome.seconds < LIMIT_S / 2
    deadline = time.monotonic() + 5
    while not gone(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(int(note.read_text()))


def flood() -> dict[str, Any]:
    for _ in range(2000):
        os.write(1, b"noise " * 1000)
        os.write(2, b"more " * 1000)
    os.write(2, b"\nthe last line")
    os._exit(1)


def test_a_flood_is_drained_and_its_end_reported() -> None:
    outcome = isolated(flood, (), LIMIT_S)
    assert outcome.error == "ended with exit status 1 and without a result: the last line"


def test_the_parts_do_not_see_each_other() -> None:
    isolated(lambda: os.environ.update(GPUNODE_SPOILT="1") or {}, (), LIMIT_S)
    assert "GPUNODE_SPOILT" not in os.environ


def test_nothing_is_kept_open() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        isolated(leave, (), LIMIT_S)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_outcome_has_milliseconds() -> None:
    assert Outcome(1.23456).seconds == 1.235


def report_pid() -> dict[str, Any]:
    return {"pid": os.getpid(), "chosen": os.environ.get("GPUNODE_CHOSEN")}


def wait(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {}


def find_out_nothing() -> dict[str, Any]:
    raise UndeterminedPart("another process has started on it")


def outcomes(*tasks: Task, limit_s: float | None = None) -> list[Outcome]:
    return [outcome for _, _, outcome in run_jobs([Job(tasks)], 1, Clock(limit_s))]


def test_what_cannot_be_tried_is_neither_error_nor_skip() -> None:
    outcome = isolated(find_out_nothing, (), LIMIT_S)
    assert (outcome.error, outcome.skipped, outcome.undetermined) == (None, None, "another process has started on it")


def test_the_tasks_of_a_job_share_a_process_until_one_fails() -> None:
    report = Task("report", report_pid)
    first, second, broke, after, left_out, last = outcomes(
        report, report, Task("fall", segfault), report, Task("skip", leave_out), report
    )
    assert broke.error is not None
    assert left_out.skipped is not None
    assert first.values["pid"] == second.values["pid"] != after.values["pid"] == last.values["pid"]


def test_a_job_has_its_own_environment() -> None:
    job = Job((Task("report", report_pid),), environment={"GPUNODE_CHOSEN": "GPU-3"})
    ((_, _, outcome),) = run_jobs([job], 1, Clock(None))
    assert outcome.values["chosen"] == "GPU-3"
    assert "GPUNODE_CHOSEN" not in os.environ


def test_jobs_run_side_by_side_as_many_as_may() -> None:
    jobs = [Job((Task("wait", wait, (1.5,)), Task("report", report_pid)), str(number)) for number in range(4)]
    started = time.monotonic()
    tasks = [(job.component, task.name) for job, task, _ in run_jobs(jobs, 4, Clock(None))]
    assert time.monotonic() - started < 4 * 1.5
    assert sorted(tasks) == sorted((str(number), name) for number in range(4) for name in ("wait", "report"))


def test_a_task_that_uses_up_its_own_limit_has_failed() -> None:
    late, after = outcomes(Task("hang", wait, (60.0,), 1.0), Task("report", report_pid), limit_s=60.0)
    assert late.error == "did not return within 1 s"
    assert after.error is None


def test_what_the_time_for_all_cuts_off_is_not_determined() -> None:
    started = time.monotonic()
    cut, *rest = outcomes(Task("hang", wait, (60.0,), 30.0), *[Task("report", report_pid)] * 3, limit_s=1.5)
    assert time.monotonic() - started < 15
    assert (cut.error, [outcome.error for outcome in rest]) == (None, [None] * 3)
    assert cut.undetermined is not None
    assert cut.undetermined.endswith("the 1.5 s for all are used up")
    assert [outcome.undetermined for outcome in rest] == ["not run: the 1.5 s for all are used up"] * 3


def test_whoever_stops_listening_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    generator = run_jobs(
        [Job((Task("report", report_pid), Task("hang", hang_with_a_child, (str(note),))))], 1, Clock(None)
    )
    next(generator)
    deadline = time.monotonic() + 10
    while not (note.exists() and len(note.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(generator, Generator)
    generator.close()
    pids = [int(word) for word in note.read_text().split()]
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if not gone(pid)] == []
