"""``gpunode checks ID`` has a page for every check; docs/failures.md, from which pages quote, is right and proven."""

import random
import re
from collections import Counter

import checks_pages
import pytest
import yaml
from checks_pages import FAILURES, QUOTED, ROOT, ROWS
from effort import EVERYTHING

from gpunode.checks import registry
from gpunode.checks.pages import pages
from gpunode.cli import run
from gpunode.lab.simulator import faults

WITHOUT_EXAMPLE = {"node.reachable"}
"""A host that could not be reached has no bundle, and so no mutant."""
IDS = [check.id for check in registry]
SAMPLE = IDS if EVERYTHING else random.Random(0).sample(IDS, 4)  # noqa: S311


def test_every_check_has_an_example() -> None:
    assert {check for check in IDS if check not in pages() or pages()[check].example is None} == WITHOUT_EXAMPLE
    assert set(pages()) <= set(IDS)


def test_the_reported_failures_are_those_of_the_page() -> None:
    assert {check: list(page.reported) for check, page in pages().items() if page.reported} == checks_pages.reported()


@pytest.mark.parametrize("check", SAMPLE)
def test_an_example_is_what_the_check_finds(check: str) -> None:
    assert pages()[check].model_dump(mode="json", exclude_defaults=True) == checks_pages.page(check), (
        "python tests/contract/checks_pages.py"
    )


@pytest.mark.parametrize("check", IDS)
def test_a_page_has_all_sections(check: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checks", check]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{check}  ")
    titles = {line for line in lines if line and not line.startswith(" ")}
    expected = {"Meaning", "Why it matters", "Remedy", "Data"}
    expected |= {"Limits"} if registry[check].thresholds else set()
    expected |= set() if check in WITHOUT_EXAMPLE else {"Example, on simulated data"}
    assert titles == {lines[0], *expected}
    assert f"  {registry[check].means}" in lines
    assert all(any(limit.name in line for line in lines) for limit in registry[check].thresholds)


def test_an_id_that_is_none_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checks", "link.pcie-widht"]) == 2
    assert capsys.readouterr().err.startswith("gpunode: unknown check link.pcie-widht: did you mean link.pcie-width")


def test_an_empty_id_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checks", ""]) == 2
    assert capsys.readouterr().err.startswith("gpunode: unknown check (empty): known: ")


CONDITIONS = yaml.load((ROOT / "tests/bench/conditions.yml").read_text(encoding="utf-8"), yaml.CSafeLoader)
ROLES = {path.name for path in (ROOT / "roles").iterdir() if path.is_dir()}
THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*")


def finds(name: str) -> set[str]:
    """The checks that a condition must turn."""
    return {finding.split()[0] for finding in CONDITIONS[name]["finds"]}


def test_there_are_forty_in_order_and_the_counts_are_right() -> None:
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, 41)]
    assert {len(row) for row in ROWS} == {8}
    now = Counter(row[7] for row in ROWS)
    assert f"\nNow: {now['yes']} yes, {now['half']} half, {now['no']} no.\n" in FAILURES
    assert now.total() == now["yes"] + now["half"] + now["no"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_there_is_and_a_proof_of_its_check(row: list[str]) -> None:
    _, _, threads, prevented, detected, shown, remedy, now = row
    assert THREAD.fullmatch(threads)
    assert {name for _, name in QUOTED.findall(prevented)} <= ROLES
    checks = {name for _, name in QUOTED.findall(detected)}
    assert checks <= set(IDS)
    proofs = QUOTED.findall(shown)
    assert not QUOTED.sub("", shown).strip(", "), "a proof is a condition of the bench, or a fault of the lab"
    assert (now == "no") == (not checks) == (not proofs) == (remedy == "none")
    for kind, name in proofs:
        if kind == "fault ":
            assert name in faults.KINDS
        else:
            assert finds(name) & checks, f"the condition {name} turns none of {sorted(checks)}"
