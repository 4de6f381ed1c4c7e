"""Tables: whole lines in a pipe, a terminal's width on a terminal."""

import sys

import pytest

from gpunode.cli.streams import table_lines

LONG = "word " * 100
ROWS = [("gpu-node-with-a-long-name-1", LONG), ("n2", "[bold]as it is[/bold]")]


def test_a_row_is_one_line_in_a_pipe() -> None:
    head, first, second = table_lines(("NODE", "TEXT"), ROWS)
    assert head == f"{'NODE':<29}TEXT"
    assert first == f"gpu-node-with-a-long-name-1  {LONG.rstrip()}"
    assert second == f"{'n2':<29}[bold]as it is[/bold]"


def test_on_a_terminal_all_but_the_first_column_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = list(table_lines(("NODE", "TEXT"), ROWS))
    assert max(map(len, lines)) <= 60
    assert sum("gpu-node-with-a-long-name-1" in line for line in lines) == 1
    assert " ".join(lines).count("word") == 100
