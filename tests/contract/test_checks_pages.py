"""``gpunode checks ID``: a page for every check, with examples and reported failures that are up to date."""

import random

import checks_pages
import pytest
from effort import EVERYTHING

from gpunode.checks import registry
from gpunode.checks.pages import pages
from gpunode.cli import run

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
