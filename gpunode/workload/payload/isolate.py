"""Each part in a process of its own, with a time limit: a hang or a crash becomes a result, and its record."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 64 * 1024
MAX_TAIL_BYTES = 8 * 1024
MAX_TEXT = 500
CUT = " ... "
LOOK_S = 0.02
_PR_SET_PDEATHSIG = 1


class SkipPart(Exception):  # noqa: N818
    """A part does not apply here; the message is the reason."""


class Trouble(Exception):  # noqa: N818
    """A part found a fault; the message describes it; ``values`` has what is known in spite of it."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


class UndeterminedPart(Exception):  # noqa: N818
    """A part applies here and cannot be run; the message is the reason."""


@dataclass
class Outcome:
    """The result of a part. At most one of ``error``, ``skipped`` and ``undetermined`` is set."""

    seconds: float
    device: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None
    undetermined: str | None = None

    def __post_init__(self) -> None:
        self.seconds = round(self.seconds, 3)


def one_line(text: str) -> str:
    """Return text of another program for use in a message: no line ends, no control codes, limited length.

    Of a long text the beginning and the end are kept: a traceback has the call in one and the reason in the other.
    """
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    half = MAX_TEXT // 2 - len(CUT)
    return line if len(line) <= MAX_TEXT else line[:half] + CUT + line[-half:]


@dataclass(frozen=True)
class Task:
    """One part to run: its name, its function, and its own time limit."""

    name: str
    run: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...] = ()
    limit_s: float = 180.0


@dataclass(frozen=True)
class Job:
    """Tasks for one child process, in sequence. After a failed one, the rest gets a new process."""

    tasks: tuple[Task, ...]
    component: str = "node"
    identity: dict[str, Any] = field(default_factory=dict)
    """The device, for its records."""
    environment: dict[str, str] = field(default_factory=dict)


class Clock:
    """The time left for all tasks together."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._until = None if limit_s is None else time.monotonic() + limit_s

    def left(self, requested_s: float) -> float:
        """Return ``requested_s``, or the time left if that is less; 0 or below: none is left."""
        return requested_s if self._until is None else min(requested_s, self._until - time.monotonic())


def isolated(part: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], limit_s: float) -> Outcome:
    """Run ``part`` in a child for at most ``limit_s``; never raises for the part's failure.

    The part returns its values as plain JSON types, with ``device`` among them if it ran on one.
    """
    job = Job((Task("", part, arguments, limit_s),))
    ((_, _, outcome),) = run_jobs([job], 1, Clock(None))
    return outcome


def run_jobs(
    jobs: Iterable[Job],
    at_once: int,
    clock: Clock,
    left_after: Callable[[Outcome], float | None] = lambda _: None,
) -> Iterator[tuple[Job, Task, Outcome]]:
    """Run the jobs, ``at_once`` of them in parallel; yield every task's outcome as it arrives.

    A task for which no time is left is ``undetermined``; a task that reaches its own limit has failed. ``left_after``
    returns the seconds that remain, after an outcome, for the same task of the other jobs that run; None: their own
    limits.
    """
    waiting = deque(jobs)
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                if clock.left(job.tasks[0].limit_s) > 0:
                    running.append(_Child(job, clock))
                    continue
                reason = f"not run: the {clock.limit_s:g} s for all are used up"
                for task in job.tasks:
                    yield job, task, Outcome(0.0, undetermined=reason)
            _hear(running, LOOK_S)
            for child in tuple(running):
                for task, outcome in child.settled():
                    left_s = left_after(outcome)
                    if left_s is not None:
                        for other in running:
                            other.shorten(task.name, left_s)
                    yield child.job, task, outcome
                if child.over:
                    running.remove(child)
                    child.end()
                    if child.tasks:
                        waiting.appendleft(replace(child.job, tasks=tuple(child.tasks)))
    finally:
        for child in running:
            child.end()


class _Child:
    """A process that runs a job's tasks and writes a line of JSON after each."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.job = job
        self.tasks = list(job.tasks)
        """Tasks without an outcome yet."""
        self.over = False
        self._clock = clock
        answer_from, answer_to = os.pipe()
        noise_from, noise_to = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _be_the_child(job, answer_to, noise_to, (answer_from, noise_from))
        os.close(answer_to)
        os.close(noise_to)
        # Both sides do it, so that the group exists before the first signal.
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)
        for number in (answer_from, noise_from):
            os.set_blocking(number, False)
        self.heard = {answer_from: b"", noise_from: b""}
        self.open = [answer_from, noise_from]
        self._answers, self._noise = answer_from, noise_from
        self._status: int | None = None
        self._begin()

    def _begin(self) -> None:
        """Start the time limit of the next task."""
        self._started = time.monotonic()
        self.heard[self._noise] = b""
        requested_s = self.tasks[0].limit_s if self.tasks else 0.0
        self._limit_s = self._clock.left(requested_s)
        self._is_own_limit = self._limit_s >= requested_s

    def shorten(self, name: str, left_s: float) -> None:
        """Let the current task, if it has this name, end within these seconds."""
        limit_s = round(time.monotonic() - self._started + left_s, 1)
        if self.tasks and self.tasks[0].name == name and limit_s < self._limit_s:
            self._limit_s, self._is_own_limit = limit_s, True

    def settled(self) -> Iterator[tuple[Task, Outcome]]:
        """Yield the outcomes that are known by now; set ``over`` if the process has no more.

        It waits for the child's end, not for the pipes': a process that the child left behind may keep them open.
        """
        if self._status is None:
            ended, raw = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._status = raw
                # A process that it left behind may write for ever.
                until = time.monotonic() + 1.0
                while _hear([self], 0.0) and time.monotonic() < until:
                    pass
        while self.tasks and b"\n" in self.heard[self._answers]:
            line, _, self.heard[self._answers] = self.heard[self._answers].partition(b"\n")
            outcome = self._read(line)
            yield self.tasks.pop(0), outcome
            self._begin()
            if outcome.error is not None:
                self.over = True
                return
        seconds = time.monotonic() - self._started
        if not self.tasks:
            self.over = True
        elif self._status is not None:
            self.over = True
            reason = _how_it_ended(self._status) + _last_words(self.heard[self._noise])
            yield self.tasks.pop(0), Outcome(seconds, error=reason)
        elif seconds >= self._limit_s:
            self.over = True
            yield self.tasks.pop(0), self._late(seconds)

    def _read(self, line: bytes) -> Outcome:
        seconds = time.monotonic() - self._started
        try:
            answered = json.loads(line.decode())
        except ValueError:
            return Outcome(seconds, error="its answer is not valid JSON")
        values = answered.get("values") or {}
        return Outcome(
            seconds,
            values.pop("device", None),
            values,
            answered.get("error"),
            answered.get("skipped"),
            answered.get("undetermined"),
        )

    def _late(self, seconds: float) -> Outcome:
        words = _last_words(self.heard[self._noise])
        if self._is_own_limit:
            return Outcome(seconds, error=f"did not return within {self._limit_s:g} s{words}")
        reason = f"stopped after {max(seconds, 0.0):.0f} s: the {self._clock.limit_s:g} s for all are used up{words}"
        return Outcome(seconds, undetermined=reason)

    def end(self) -> None:
        """Kill the child and all processes that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        # A process that hangs in the kernel cannot be killed: it is left behind without waiting.
        until = time.monotonic() + 5.0
        with contextlib.suppress(ChildProcessError):
            while self._status is None and not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < until:
                time.sleep(0.01)
        for number in self.heard:
            os.close(number)


def _be_the_child(job: Job, answer_to: int, noise_to: int, others: tuple[int, ...]) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        end_with_parent()
        os.environ.update(job.environment)
        for number in others:
            os.close(number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(noise_to, 1)
        os.dup2(noise_to, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        faulthandler.enable(file=2)
        for task in job.tasks:
            answered = _try(task.run, task.arguments)
            _write_all(answer_to, _as_line(answered))
            if "error" in answered:
                # On a GPU where something failed, everything else of this process may fail.
                break
        status = 0
    finally:
        # Not sys.exit: the parent's own clean-up belongs to the parent, and a library's may hang.
        os._exit(status)


def end_with_parent() -> None:
    """Let the kernel kill this process with its parent: a program that kills the parent cannot reach it otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _try(part: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"values": part(*arguments)}
    except SkipPart as reason:
        return {"skipped": one_line(str(reason))}
    except UndeterminedPart as reason:
        return {"undetermined": one_line(str(reason))}
    except Trouble as trouble:
        return {"error": one_line(str(trouble)), "values": trouble.values}
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as err:
        return {"error": one_line(f"{type(err).__name__}: {err}")}


def _as_line(answered: dict[str, Any]) -> bytes:
    try:
        answer = json.dumps(answered, allow_nan=False).encode()
    except (TypeError, ValueError) as err:
        answer = json.dumps({"error": one_line(f"its result is not valid JSON: {err}")}).encode()
    if len(answer) > MAX_ANSWER_BYTES:
        answer = json.dumps({"error": f"its result has {len(answer)} bytes, at most {MAX_ANSWER_BYTES}"}).encode()
    return answer + b"\n"


def _write_all(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]


def _hear(children: Iterable[_Child], wait_s: float) -> bool:
    """Read the available output; return False if there is none."""
    some = False
    with selectors.DefaultSelector() as pipes:
        for child in children:
            for number in child.open:
                pipes.register(number, selectors.EVENT_READ, child)
        if not pipes.get_map():
            time.sleep(wait_s)
            return False
        for key, _ in pipes.select(wait_s):
            child = key.data
            data = os.read(key.fd, 65536)
            if data:
                most = MAX_TAIL_BYTES if key.fd == child._noise else 64 * MAX_ANSWER_BYTES
                child.heard[key.fd] = (child.heard[key.fd] + data)[-most:]
                some = True
            else:
                child.open.remove(key.fd)
    return some


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"crashed with {signal.Signals(number).name}"
        return f"crashed with signal {number}"
    return f"ended with exit status {os.WEXITSTATUS(status)} and without a result"


def _last_words(noise: bytes) -> str:
    """Return the line with a program's reason for failing: Python's own summary of a crash, else the last one."""
    lines = [line.strip() for line in noise.decode(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if line.startswith("Fatal Python error"):
            return ": " + one_line(line)
    return ": " + one_line(lines[-1]) if lines else ""


SCHEMA = "gpunode.record/1"


def record(task: Task, job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return the record as it is printed; the launcher adds the container."""
    fell = outcome.error is not None or outcome.undetermined is not None
    return {
        "record": task.name,
        "schema": SCHEMA,
        "device": outcome.device or (default_device(job) if fell else "cpu"),
        "component": job.component,
        "seconds": outcome.seconds,
        "values": {**{key: value for key, value in job.identity.items() if value is not None}, **outcome.values},
        "error": outcome.error,
        "skipped": outcome.skipped,
        "undetermined": outcome.undetermined,
        "container": None,
        "simulated": False,
    }


def default_device(job: Job) -> str:
    """Return the intended device of a part without a result: the GPU if there is one."""
    return "cuda" if job.identity or Path("/dev/nvidiactl").exists() else "cpu"
