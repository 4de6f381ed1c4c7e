"""The documentation's table of facts: complete, with what each is read from."""

from facts_table import described, fields, rows, sources

from gpunode.facts.node import FACTS

OF_THE_BUNDLE = {"records", "unanswered"}
"""Results of workloads, and what did not answer: of the bundle itself, and of all its commands."""


def test_the_table_has_every_fact() -> None:
    assert FACTS.keys() == fields()
    assert {cells[0] for cells in rows()} == {f"`{name}`" for name in FACTS}


def test_every_fact_is_read_from_something() -> None:
    assert {name for name, (commands, files) in sources().items() if not commands | files} <= OF_THE_BUNDLE


def test_every_fact_is_described() -> None:
    plain = {name for name, (_, text) in described().items() if not text}
    assert plain & fields() == set()
