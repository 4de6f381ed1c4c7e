"""The examples and reported failures of the checks' pages: ``python tests/contract/checks_pages.py`` writes the file.

An example is the finding of the check's first mutant; a reported failure is a row of docs/failures.md.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import test_checks
from bundles import Mutant, apply, facts_of

from gpunode.checks import Status, judge
from gpunode.checks.pages import CheckPage, ExampleFinding, ReportedFailure

ROOT = Path(__file__).parents[2]
FILE = ROOT / "gpunode/checks/pages.json"
FAILURES = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")] for line in re.findall(r"(?m)^\| \d+ \|.*$", FAILURES)
]
QUOTED = re.compile(r"(fault )?`([^`]+)`")
SHOWN = (Status.FAIL, Status.WARN, Status.NOTE, Status.ERROR)


def example_mutants() -> dict[str, Mutant]:
    """The mutant of each check that shows its worst result; of several the first."""
    by_check: dict[str, Mutant] = {}
    for mutant in test_checks.MUTANTS:
        known = by_check.get(mutant.check)
        if mutant.becomes in SHOWN and (known is None or SHOWN.index(mutant.becomes) < SHOWN.index(known.becomes)):
            by_check[mutant.check] = mutant
    return by_check


def example(mutant: Mutant) -> ExampleFinding:
    """The finding of a mutant."""
    facts = facts_of(json.dumps(apply(mutant.base(), mutant.edits)))
    findings = judge(facts, mutant.expect, level="deep", only=[mutant.check])
    worst = next(finding for finding in findings if finding.status is mutant.becomes)
    return ExampleFinding(**{name: getattr(worst, name) for name in ExampleFinding.model_fields})


def reported() -> dict[str, list[ReportedFailure]]:
    """The rows of docs/failures.md by check."""
    by_check: dict[str, list[ReportedFailure]] = {}
    for _, failure, threads, _, detected, *_ in ROWS:
        for _, check in QUOTED.findall(detected):
            row = ReportedFailure(failure=re.sub(r"`", "", failure), threads=tuple(threads.split(", ")))
            by_check.setdefault(check, []).append(row)
    return by_check


def page(check: str) -> dict[str, Any]:
    """The page of a check as it is now."""
    mutant = example_mutants().get(check)
    whole = CheckPage(reported=tuple(reported().get(check, ())), example=None if mutant is None else example(mutant))
    values: dict[str, Any] = whole.model_dump(mode="json", exclude_defaults=True)
    return values


if __name__ == "__main__":
    checks = sorted({*example_mutants(), *reported()})
    FILE.write_text(json.dumps({check: page(check) for check in checks}, indent=1) + "\n", encoding="utf-8")
