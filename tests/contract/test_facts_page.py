"""docs/facts.md says which facts there are, and what each is read from."""

from facts_table import PAGE, described, fields, page, sources

from gpunode.facts.build import READERS

OF_THE_BUNDLE = {"records", "unanswered"}
"""Results of workloads, and what did not answer: of the bundle itself, and of all its commands."""


def test_the_page_has_every_fact_as_it_is_declared() -> None:
    assert set(READERS) == fields()
    regenerate = "out of date: .venv/bin/python tests/contract/facts_table.py"
    assert PAGE.read_text(encoding="utf-8") == page(), regenerate


def test_every_fact_is_read_from_something() -> None:
    assert {name for name, (commands, files) in sources().items() if not commands | files} <= OF_THE_BUNDLE


def test_every_fact_is_described() -> None:
    plain = {name for name, (_, text) in described().items() if not text}
    assert plain & fields() == set()
