"""Tables of the verbs: folded to a terminal's width, one line for each row elsewhere."""

import os
import sys
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNLIMITED = 1 << 20
"""Columns of a file or a pipe: a row stays one line, so that grep and awk find all of it."""


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; on a terminal, cells other than the first are folded to its width."""
    terminal = sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(Text(name), no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    width = None if terminal else _UNLIMITED
    out = Console(file=StringIO(), force_terminal=colour, no_color=not colour, width=width, highlight=False)
    with out.capture() as captured:
        out.print(table)
    yield from (line.rstrip() for line in captured.get().splitlines())
