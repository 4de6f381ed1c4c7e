"""What is written by hand in a second place: tables of the documentation, and what the simulator knows."""

import re
from pathlib import Path

import pytest

from gpunode.checks import registry
from gpunode.cli.verbs import VERBS
from gpunode.facts.parsers.kinds import KINDS
from gpunode.lab.hardware import names
from gpunode.lab.simulator import faults

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def first_column(page: str, heading: str) -> set[str]:
    """Return the quoted words in the first cells of the first table below a heading."""
    _, found, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert found, f"docs/{page} has no heading {heading}"
    table = re.search(r"(?m)^\|---.*\n((?:\|.*\n)+)", rest)
    cells = re.findall(r"(?m)^\| ([^|]*`[^|]*) \|", table[1] if table else "")
    return {quoted.split()[0] for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("page", "heading", "there"),
    [
        ("parse.md", "## Kinds", set(KINDS)),
        ("lab.md", "## Simulated hardware", set(names())),
        ("lab.md", "### Faults", set(faults.KINDS)),
    ],
    ids=["kinds of parse", "simulated hardware", "simulated faults"],
)
def test_a_table_lists_what_there_is(page: str, heading: str, there: set[str]) -> None:
    assert first_column(page, heading) == there, f"docs/{page}: the table below {heading} is out of date"


def test_the_front_page_has_the_number_of_checks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) checks", readme) == [str(len(list(registry)))]


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_shows_every_verb(verb: str) -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    shown = [page.name for page in pages if f"gpunode {verb}" in page.read_text(encoding="utf-8")]
    assert shown, f"no page of docs/ shows `gpunode {verb}`"


@pytest.mark.parametrize("fault", faults.KINDS)
def test_a_test_sets_every_fault(fault: str) -> None:
    tests = [*(ROOT / "tests/unit/lab").glob("*.py"), *(ROOT / "tests/lab").glob("*.py")]
    assert any(f'"{fault}"' in path.read_text(encoding="utf-8") for path in tests), (
        f"no test in tests/unit/lab sets the fault {fault}"
    )
