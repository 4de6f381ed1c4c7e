"""docs/guides.md: every topic of the guides has an answer that exists, and the page counts itself."""

import re
from collections import Counter
from pathlib import Path

from gpunode.checks import registry
from gpunode.cli import VERBS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]
STATES = ("proven", "built", "documented", "missing", "not sensible")
FILES = ("docs/", "tests/", "contrib/", "inventory/")


def answers(text: str) -> list[str]:
    """Return the verbs, checks, roles and files of a cell that exist."""
    checks, roles = {check.id for check in registry}, {path.name for path in (ROOT / "roles").iterdir()}
    existing = []
    for quoted in re.findall(r"`([^`]+)`", text):
        verb = re.match(r"gpunode ([a-z]+)", quoted)
        known = (verb and verb[1] in VERBS) or quoted in checks or quoted in roles
        existing += [quoted] if known or (quoted.startswith(FILES) and (ROOT / quoted).is_file()) else []
    return existing


def test_every_topic_has_its_row() -> None:
    assert [len(row) for row in ROWS] == [4] * len(ROWS)
    assert [int(row[0]) for row in ROWS] == list(range(1, 141))
    assert len({row[1] for row in ROWS}) == len(ROWS)


def test_every_answer_exists() -> None:
    assert {row[3] for row in ROWS} <= set(STATES)
    assert [row[:3] for row in ROWS if row[3] in STATES[:3] and not answers(row[2])] == []
    dotted = {word for row in ROWS for word in re.findall(r"`([a-z]+\.[a-z-]+)`", row[2])}
    assert dotted - {check.id for check in registry} - {"ddp.sharded"} == set()
    assert [row[:2] for row in ROWS if len(row[2]) < 8] == []


def test_the_page_counts_its_states() -> None:
    counted = Counter(row[3] for row in ROWS)
    head = PAGE.partition("\n- **")[0].replace("\n", " ")
    stated = {name: int(number) for number, name in re.findall(rf"(\d+) ({'|'.join(STATES)})", head)}
    assert stated == {name: counted[name] for name in STATES}
    assert (counted["documented"], counted["missing"]) == (0, 0)


def test_a_row_without_its_answer_is_found() -> None:
    assert answers(
        "`gpunode top`, `gpu.stuck`, role `storage`, `docs/top.md`, `docs/none.md`, `gpunode fly`, `gpu.fly`"
    ) == [
        "gpunode top",
        "gpu.stuck",
        "storage",
        "docs/top.md",
    ]
