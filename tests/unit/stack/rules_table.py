"""The table of rules in docs/stack.md: ``python tests/unit/stack/rules_table.py`` writes it, a test compares."""

from pathlib import Path

from gpunode.stack.rules import rules

PAGE = Path(__file__).parents[3] / "docs/stack.md"
START = "<!-- table of rules: written by tests/unit/stack/rules_table.py -->\n"
END = "<!-- end of the table of rules -->\n"
HEAD = "| rule | means | facts |\n|---|---|---|\n"


def page() -> str:
    """Return the page with the table as it is now."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    assert start, f"{PAGE} lacks the mark {START}"
    assert end, f"{PAGE} lacks the mark {END}"
    return (
        before
        + START
        + HEAD
        + "".join(f"| {rule.id} | {rule.means} | {rule.facts} |\n" for rule in rules)
        + END
        + after
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
