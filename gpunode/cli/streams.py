"""stdout and stderr that say in one line why they cannot be written."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from gpunode.errors import UndeterminedError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ReaderLeft(Exception):  # noqa: N818 (nothing is wrong where somebody has read enough)
    """Nobody reads any more what we write."""


class _Guarded(io.FileIO):
    def __init__(self, descriptor: int, called: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._called = called

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            # What Python would still flush at its end must go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(err, BrokenPipeError):
                raise ReaderLeft from None
            reason = "it is closed" if err.errno == errno.EBADF else err.strerror
            raise UndeterminedError(f"{self._called} cannot be written: {reason}") from None


def guard() -> None:
    """Let stdout and stderr raise ReaderLeft, and UndeterminedError where they are full or stdout is closed."""
    sys.stdout = _text(1, "standard output", sys.stdout, os.O_RDONLY)
    # A verb without messages is not in doubt.
    sys.stderr = _text(2, "standard error", sys.stderr, os.O_WRONLY)


def _text(descriptor: int, called: str, old: TextIO | None, closed: int) -> TextIO:
    """The stream in place of ``old``; where that is None, what is written to /dev/null opened as ``closed`` says."""
    if old is None:
        # Else the next file that is opened would be taken for it.
        os.dup2(os.open(os.devnull, closed), descriptor)
    settings: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    if old is not None:
        settings = {"encoding": old.encoding, "errors": old.errors, "line_buffering": old.isatty() or descriptor == 2}
    return io.TextIOWrapper(io.BufferedWriter(_Guarded(descriptor, called)), **settings)
