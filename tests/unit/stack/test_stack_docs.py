"""docs/stack.md says what the rules are."""

import pytest
from rules_table import PAGE, page

from gpunode.stack.rules import Rules, rules


def test_the_page_has_every_rule_as_it_is_declared() -> None:
    regenerate = "out of date: .venv/bin/python tests/unit/stack/rules_table.py"
    assert PAGE.read_text(encoding="utf-8") == page(), regenerate


def test_every_rule_is_declared_and_does_something() -> None:
    assert [rule.id for rule in rules] == sorted(rule.id for rule in rules)
    for rule in rules:
        assert rule.means, rule.id
        assert rule.facts, rule.id
        assert rule.ask or rule.judge or rule.decide, rule.id


def test_a_rule_is_declared_once() -> None:
    own = Rules()
    own.judges("R01-own", means="One", facts="none")
    own.decides("R01-own", "driver")
    with pytest.raises(ValueError, match="R01-own is declared twice"):
        own.asks("R01-own", means="Another", facts="none")
