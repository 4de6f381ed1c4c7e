"""Recorded outputs of real machines: parsed, and every fact of facts.yml found. tests/captured.py describes them."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from captured import FOLDER, ROWS, each
from click.testing import CliRunner
from expected import changed, wrong

from gpunode.cli.lookup import parse_command
from gpunode.errors import UsageError

HERE = Path(__file__).resolve().parent
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "facts.yml").read_text(encoding="utf-8"))["captures"]
CAPTURES = {name: {**entry, "kind": ROWS[name]["kind"]} for name, entry in EXPECTED.items()}
PARSED = {name: entry for name, entry in CAPTURES.items() if "facts" in entry}
REFUSED = {name: entry for name, entry in CAPTURES.items() if "refused" in entry}
NO_KIND = {name: entry for name, entry in CAPTURES.items() if "no_kind" in entry}


@cache
def parsed(name: str) -> dict[str, Any]:
    """The capture through the command line: one JSON document on stdout and exit 0. Not to be changed."""
    result = CliRunner().invoke(parse_command, [CAPTURES[name]["kind"], str(FOLDER / name)], standalone_mode=False)
    if result.exception:
        raise result.exception
    assert result.return_value == 0
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    """Print what the folder holds and what became of it; ``pytest -s`` shows it."""
    yield
    facts = sum(len(entry["facts"]) for entry in PARSED.values())
    print(f"\n{len(CAPTURES)} captures: {len(PARSED)} parsed, {facts} facts checked")
    for title, entries, key in (("refused", REFUSED, "refused"), ("of no kind", NO_KIND, "no_kind")):
        print(f"{len(entries)} {title}:")
        for name, entry in entries.items():
            print(f"  {name}: {entry[key]}")


def test_every_capture_has_its_expectations() -> None:
    assert set(ROWS) == set(CAPTURES)
    assert {name for name, row in ROWS.items() if row["kind"] == "-"} == set(NO_KIND)
    assert all(len({"facts", "refused", "no_kind"} & set(entry)) == 1 for entry in CAPTURES.values())


@pytest.mark.parametrize("name", each(PARSED))
def test_key_facts(name: str) -> None:
    assert wrong(parsed(name), PARSED[name]["facts"]) == []


@pytest.mark.parametrize("name", each(REFUSED))
def test_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(name)
    message = str(caught.value)
    assert Path(name).name in message
    assert CAPTURES[name]["kind"] in message
    assert "expected" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", each(PARSED))
def test_a_changed_fact_fails(name: str) -> None:
    answer = parsed(name)
    for path, value in PARSED[name]["facts"].items():
        assert len(wrong(answer, {path: changed(value)})) == 1, path
