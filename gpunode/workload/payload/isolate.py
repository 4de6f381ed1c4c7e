"""Each part in a process of its own, with a time limit: a hang or a crash is an answer, not silence."""

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_ANSWER_BYTES = 64 * 1024
MAX_TAIL_BYTES = 8 * 1024
MAX_TEXT = 500
CUT = " ... "
_PR_SET_PDEATHSIG = 1


class Skip(Exception):  # noqa: N818
    """A part has nothing to try here; the message is the reason."""


class Trouble(Exception):  # noqa: N818
    """A part found out in plain words what is wrong."""


@dataclass
class Outcome:
    """What came of a part. At most one of ``error``, ``skipped`` and ``undetermined`` is set."""

    seconds: float
    device: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None
    undetermined: str | None = None


def one_line(text: str) -> str:
    """Text of another program as a message may quote it: no line ends, no control codes, not long.

    Of a long one the beginning and the end are kept: a traceback says what at the one, and why at the other.
    """
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    half = MAX_TEXT // 2 - len(CUT)
    return line if len(line) <= MAX_TEXT else line[:half] + CUT + line[-half:]


def isolated(part: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], limit_s: float) -> Outcome:
    """Run ``part`` in a child and wait for it at most ``limit_s``; never raises for what the part does.

    The part returns its values as plain JSON types, with ``device`` among them where it ran on one.
    """
    started = time.monotonic()
    answer_from, answer_to = os.pipe()
    noise_from, noise_to = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _be_the_child(part, arguments, answer_to, noise_to, (answer_from, noise_from))
    os.close(answer_to)
    os.close(noise_to)
    # Both sides do it, so that the group is there before the first signal.
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    try:
        answer, noise, status = _listen(child, answer_from, noise_from, started + limit_s)
    finally:
        _kill_group(child)
        os.close(answer_from)
        os.close(noise_from)
    return _outcome(answer, noise, status, time.monotonic() - started, limit_s)


def _be_the_child(
    part: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
    answer_to: int,
    noise_to: int,
    others: tuple[int, ...],
) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        # Whoever kills the parent has no other way to reach the children.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in others:
            os.close(number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(noise_to, 1)
        os.dup2(noise_to, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        faulthandler.enable(file=2)
        answer = _try(part, arguments)
        _write_all(answer_to, answer)
        status = 0
    finally:
        # Not sys.exit: the parent's own clean-up belongs to the parent, and a library's may hang.
        os._exit(status)


def _try(part: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> bytes:
    said: dict[str, Any]
    try:
        said = {"values": part(*arguments)}
    except Skip as reason:
        said = {"skipped": one_line(str(reason))}
    except Trouble as trouble:
        said = {"error": one_line(str(trouble))}
    except MemoryError:
        said = {"error": "out of memory"}
    except Exception as err:
        said = {"error": one_line(f"{type(err).__name__}: {err}")}
    try:
        answer = json.dumps(said, allow_nan=False).encode()
    except (TypeError, ValueError) as err:
        answer = json.dumps({"error": one_line(f"its result is no JSON: {err}")}).encode()
    if len(answer) > MAX_ANSWER_BYTES:
        answer = json.dumps({"error": f"its result has {len(answer)} bytes, at most {MAX_ANSWER_BYTES}"}).encode()
    return answer


def _write_all(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]


def _listen(child: int, answer_from: int, noise_from: int, until: float) -> tuple[bytes, bytes, int | None]:
    """What the child answers, the end of what it prints, and its wait status; None where it did not end in time.

    It is the child's end that is waited for: a process that it left behind may hold the pipes open for ever.
    """
    heard = {answer_from: b"", noise_from: b""}
    most = {answer_from: 2 * MAX_ANSWER_BYTES, noise_from: MAX_TAIL_BYTES}
    status = None
    with selectors.DefaultSelector() as pipes:
        for number in heard:
            os.set_blocking(number, False)
            pipes.register(number, selectors.EVENT_READ)
        while status is None and time.monotonic() < until:
            _hear(pipes, heard, most, 0.02)
            ended, raw = os.waitpid(child, os.WNOHANG)
            status = raw if ended else None
        while _hear(pipes, heard, most, 0.0) and time.monotonic() < until:
            pass
    return heard[answer_from], heard[noise_from], status


def _hear(pipes: selectors.BaseSelector, heard: dict[int, bytes], most: dict[int, int], wait_s: float) -> bool:
    """Read what has come; False: nothing has."""
    if not pipes.get_map():
        time.sleep(wait_s)
        return False
    some = False
    for key, _ in pipes.select(wait_s):
        data = os.read(key.fd, 65536)
        if data:
            heard[key.fd] = (heard[key.fd] + data)[-most[key.fd] :]
            some = True
        else:
            pipes.unregister(key.fd)
    return some


def _kill_group(child: int) -> None:
    """Make an end of the child and of all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    # A process that hangs in the kernel cannot be killed: it is left behind rather than waited for.
    until = time.monotonic() + 5.0
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < until:
            time.sleep(0.01)


def _outcome(answer: bytes, noise: bytes, status: int | None, seconds: float, limit_s: float) -> Outcome:
    if status is None:
        return Outcome(seconds, error=f"did not come back within {limit_s:g} s{_last_words(noise)}")
    try:
        said = json.loads(answer.decode())
    except ValueError:
        said = None
    if not isinstance(said, dict):
        return Outcome(seconds, error=_how_it_ended(status) + _last_words(noise))
    values = said.get("values") or {}
    return Outcome(seconds, values.pop("device", None), values, said.get("error"), said.get("skipped"))


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"crashed with {signal.Signals(number).name}"
        return f"crashed with signal {number}"
    return f"ended with exit status {os.WEXITSTATUS(status)} and without a result"


def _last_words(noise: bytes) -> str:
    """The line in which a program says why it fell: Python's own summary of a crash, else its last one."""
    lines = [line.strip() for line in noise.decode(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if line.startswith("Fatal Python error"):
            return ": " + one_line(line)
    return ": " + one_line(lines[-1]) if lines else ""
