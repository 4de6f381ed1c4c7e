"""A program of ours in a fork of the process that runs the tests: streams of its own, without the imports' cost.

What only the start of a program does is tested with the program itself.
"""

import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from gpunode.cli import main

Stream = Path | str | int | None
"""A file, a descriptor, or None for a stream that is closed."""
Program = Callable[[Sequence[str]], int | None]
MOST_DESCRIPTORS = 4096


def run(words: Sequence[str], *, stdout: Stream, stderr: Stream, limit_s: float = 60, program: Program = main) -> int:
    """Return the exit code of gpunode, or of another program, with these streams and nothing on stdin."""

    def connect() -> None:
        streams = (os.devnull, stdout, stderr)
        for descriptor, stream in enumerate(streams):
            if stream is not None:
                opened = stream if isinstance(stream, int) else os.open(stream, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(opened, descriptor)
        # Last: what is opened takes the lowest number that is free.
        os.closerange(3, MOST_DESCRIPTORS)
        for descriptor, stream in enumerate(streams):
            if stream is None:
                os.close(descriptor)

    return ended(fork(words, connect, program), limit_s=limit_s)


def fork(words: Sequence[str], connect: Callable[[], object], program: Program = main) -> int:
    """Start a program in a child and return its process id; ``connect`` puts its streams in place there."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(words, connect, program)
    return pid


def ended(pid: int, *, limit_s: float = 60) -> int:
    """Return the exit code of a child; one that does not end is killed."""
    handle = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child(words: Sequence[str], connect: Callable[[], object], program: Program) -> NoReturn:
    code = 70
    try:
        # What the tests hold open stays theirs: nothing of it is finalized here.
        gc.freeze()
        connect()
        os.closerange(3, MOST_DESCRIPTORS)
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, name, _opened(descriptor))
        code = program(words) or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code if _flushed() else 120)


def _opened(descriptor: int) -> TextIO | None:
    """A stream as Python opens it at its start: None where it is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        return None
    errors = "backslashreplace" if descriptor == 2 else "strict"
    return open(descriptor, "w" if descriptor else "r", encoding="utf-8", errors=errors, closefd=False)


def _flushed() -> bool:
    """Whether everything is written; Python ends with 120 where it is not."""
    try:
        for stream in (sys.stderr, sys.stdout):
            if stream:
                stream.flush()
    except Exception:
        return False
    return True
