"""The table of all checks in docs/checks.md: ``python tests/contract/checks_table.py`` writes it, a test compares."""

from pathlib import Path

from gpunode.cli.checks import CheckEntry, check_list

PAGE = Path(__file__).parents[2] / "docs/checks.md"
START = "<!-- table of checks: written by tests/contract/checks_table.py -->\n"
END = "<!-- end of the table of checks -->\n"
HEAD = (
    "| check | category | about | kind | root | where | for | proven | s | on a failure |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def page() -> str:
    """The page with the table as it is now."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    assert start, f"{PAGE} lacks the mark {START}"
    assert end, f"{PAGE} lacks the mark {END}"
    rows = "".join(row(entry) for entry in check_list().checks if entry.origin is None)
    return before + START + HEAD + rows + END + after


def row(entry: CheckEntry) -> str:
    """One line of the table."""
    steps = ", ".join(f"`{step}`" for step in entry.actions)
    cells = (
        f"`{entry.id}`",
        entry.category,
        entry.scope,
        "active" if entry.active else "passive",
        "yes" if entry.needs_root else "",
        "bare metal" if entry.bare_metal else "",
        ", ".join(entry.architectures),
        entry.maturity,
        "" if entry.typical_seconds is None else f"{entry.typical_seconds:.2f}",
        f"{entry.state.value}: {steps}",
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
