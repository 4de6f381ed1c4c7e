"""What verbs write to: stdout and stderr with one-line errors if they cannot be written, and tables."""

import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from gpunode.errors import UndeterminedError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ReaderLeft(Exception):  # noqa: N818 (a reader that has read enough is not an error)
    """The reader of our output has left."""


class _Guarded(io.FileIO):
    def __init__(self, descriptor: int, called: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._called = called
        self.used = False

    def write(self, data: "ReadableBuffer", /) -> int:
        self.used = True
        try:
            return super().write(data)
        except OSError as err:
            # What Python would still flush at its end must be discarded.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(err, BrokenPipeError):
                raise ReaderLeft from None
            reason = "it is closed" if err.errno == errno.EBADF else err.strerror
            raise UndeterminedError(f"{self._called} cannot be written: {reason}") from None


def guard() -> None:
    """Let stdout and stderr raise ReaderLeft, and UndeterminedError if they are full or stdout is closed."""
    sys.stdout = _text(1, "standard output", sys.stdout, os.O_RDONLY)
    # The result of a verb without messages is still clear.
    sys.stderr = _text(2, "standard error", sys.stderr, os.O_WRONLY)


def has_written(stream: TextIO) -> bool:
    """Return whether something was written to a stream of ``guard``; False for others."""
    return bool(getattr(getattr(getattr(stream, "buffer", None), "raw", None), "used", False))


def _text(descriptor: int, called: str, old: TextIO | None, closed: int) -> TextIO:
    """Return the stream in place of ``old``; if that is None, of /dev/null opened with mode ``closed``."""
    if old is None:
        # Else the next opened file would get its descriptor.
        os.dup2(os.open(os.devnull, closed), descriptor)
    settings: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    if old is not None:
        # A sign that the locale lacks is escaped: it must not end a report.
        errors = "backslashreplace" if old.errors == "strict" else old.errors
        settings = {"encoding": old.encoding, "errors": errors, "line_buffering": old.isatty() or descriptor == 2}
    return io.TextIOWrapper(io.BufferedWriter(_Guarded(descriptor, called)), **settings)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; on a terminal, cells other than the first are folded to its width."""
    from rich.console import Console  # noqa: PLC0415 (slow to load, and most verbs do without)
    from rich.table import Table  # noqa: PLC0415 (the same)
    from rich.text import Text  # noqa: PLC0415 (the same)

    terminal = sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(Text(name), no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # A row stays one line in a file or a pipe, so that grep and awk find all of it.
    width = None if terminal else 1 << 20
    out = Console(file=io.StringIO(), force_terminal=colour, no_color=not colour, width=width, highlight=False)
    with out.capture() as captured:
        out.print(table)
    yield from (line.rstrip() for line in captured.get().splitlines())
