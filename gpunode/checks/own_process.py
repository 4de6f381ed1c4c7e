"""Execution of a site's own check in a separate process: its exceptions, output and memory do not affect other
checks."""

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

LIMIT_S = 3
"""Limit of one own check on one node, in elapsed time and in processor time."""
MEMORY_MIB = 512
"""Limit in addition to the memory of the process at its start."""
ANSWER_BYTES = 1 << 20


Part = TypeVar("Part", bound=BaseModel)


class Escaped(Exception):  # noqa: N818 - it becomes a finding
    """An own check that did not finish; the message is the reason in one line."""


def contained(work: Callable[[], Sequence[Part]], kind: type[Part]) -> list[Part]:
    """Return the result of ``work``, called in a child process with discarded output; raise Escaped."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _work(work, kind, writer)
    os.close(writer)
    try:
        answer = _read(reader)
    finally:
        os.close(reader)
        # A process group of its own: processes that it started end with it.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return _understood(answer, kind)


def _work(work: Callable[[], Sequence[Part]], kind: type[Part], writer: int) -> NoReturn:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory()
        try:
            answer = b"=" + TypeAdapter(list[kind]).dump_json(list(work()))  # type: ignore[valid-type]
        except BaseException as err:
            answer = b"!" + f"{type(err).__name__}: {err}".encode()[:500]
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer[: ANSWER_BYTES + 1] + b"\n")
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib is not lighter here
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + (MEMORY_MIB << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(reader: int) -> bytes:
    deadline = time.monotonic() + LIMIT_S
    answer = b""
    while len(answer) <= ANSWER_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise Escaped(f"it took more than {LIMIT_S} s")
        part = os.read(reader, 1 << 16)
        if not part:
            return answer
        answer += part
        if part.endswith(b"\n"):
            return answer
    raise Escaped(f"it found more than {ANSWER_BYTES >> 20} MiB")


def _understood(answer: bytes, kind: type[Part]) -> list[Part]:
    if answer.startswith(b"!"):
        raise Escaped(" ".join(answer[1:].decode(errors="replace").split()))
    if not answer.startswith(b"="):
        raise Escaped("it ended the process without an answer")
    try:
        return TypeAdapter(list[kind]).validate_json(answer[1:])  # type: ignore[valid-type]
    except ValidationError:
        raise Escaped("its findings are malformed") from None
