"""docs/failures.md: forty failures, each with checks that there are, a proof that there is, and the right count."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from gpunode.checks import registry
from gpunode.lab.simulator import faults

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in re.findall(r"(?m)^\| \d+ \|.*$", PAGE)]
CONDITIONS = yaml.load((ROOT / "tests/bench/conditions.yml").read_text(encoding="utf-8"), yaml.CSafeLoader)
ROLES = {path.name for path in (ROOT / "roles").iterdir() if path.is_dir()}
QUOTED = re.compile(r"(fault )?`([^`]+)`")
THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*")
KNOWN = {check.id for check in registry}


def finds(name: str) -> set[str]:
    """The checks that a condition must turn."""
    return {finding.split()[0] for finding in CONDITIONS[name]["finds"]}


def test_there_are_forty_in_order_and_the_counts_are_right() -> None:
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, 41)]
    assert {len(row) for row in ROWS} == {8}
    now = Counter(row[7] for row in ROWS)
    assert f"\nNow: {now['yes']} yes, {now['half']} half, {now['no']} no.\n" in PAGE
    assert now.total() == now["yes"] + now["half"] + now["no"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_there_is_and_a_proof_of_its_check(row: list[str]) -> None:
    _, _, threads, prevented, detected, shown, remedy, now = row
    assert THREAD.fullmatch(threads)
    assert {name for _, name in QUOTED.findall(prevented)} <= ROLES
    checks = {name for _, name in QUOTED.findall(detected)}
    assert checks <= KNOWN
    proofs = QUOTED.findall(shown)
    assert not QUOTED.sub("", shown).strip(", "), "a proof is a condition of the bench, or a fault of the lab"
    assert (now == "no") == (not checks) == (not proofs) == (remedy == "none")
    for kind, name in proofs:
        if kind == "fault ":
            assert name in faults.KINDS
        else:
            assert finds(name) & checks, f"the condition {name} turns none of {sorted(checks)}"
