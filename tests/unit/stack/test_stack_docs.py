"""The declarations of the rules, which the documentation lists."""

import pytest

from gpunode.stack.rules import Rules, rules


def test_every_rule_is_declared_and_does_something() -> None:
    assert [rule.id for rule in rules] == sorted(rule.id for rule in rules)
    for rule in rules:
        assert rule.means, rule.id
        assert rule.facts, rule.id
        assert rule.ask or rule.judge or rule.decide, rule.id


def test_a_rule_is_declared_once() -> None:
    rulebook = Rules()
    rulebook.judges("R01-own", means="One", facts="none")
    rulebook.decides("R01-own", "driver")
    with pytest.raises(ValueError, match="R01-own is declared twice"):
        rulebook.asks("R01-own", means="Another", facts="none")
