"""Comparators: on every value below, at and above its limit they agree with Python, and the result has both numbers."""

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
from effort import effort

from gpunode.checks.compare import at_least, at_most, equals, failed, first_fault, matches, passed, warned
from gpunode.checks.registry import CheckResult, Status

DRAWN = random.Random(3)  # noqa: S311
PAIRS = [(DRAWN.choice((0, -1, 5, 0.5, 1e9)), DRAWN.choice((0, -1, 5, 0.5, 1e9))) for _ in range(effort(40, 4000))]


@pytest.mark.parametrize(
    ("comparator", "good"),
    [(at_most, operator.le), (at_least, operator.ge), (equals, operator.eq)],
    ids=["at_most", "at_least", "equals"],
)
def test_a_comparator_compares(comparator: Callable[..., CheckResult], good: Callable[[Any, Any], bool]) -> None:
    for value, limit in PAIRS:
        result = comparator(value, limit, "good", "bad", fault=Status.WARN, unit="errors")
        expected = ("good", Status.PASS) if good(value, limit) else ("bad", Status.WARN)
        assert (result.message, result.status) == expected, (value, limit)
        assert (result.measured, result.expected, result.unit) == (value, limit, "errors")


def test_matches_searches_the_text() -> None:
    assert matches("580.95.05", r"^580\.", "branch 580").status is Status.PASS
    assert matches("570.1", r"^580\.", "branch 580", "another branch").message == "another branch"


def test_a_fault_is_fail_with_the_same_message_and_numbers_unless_others_are_given() -> None:
    result = at_least(3, 5, "3 of 5 GiB", expected="5 GiB", component="memlock")
    assert result == CheckResult(Status.FAIL, "3 of 5 GiB", "memlock", expected="5 GiB", measured=3)
    # An empty message is a mistake of the check; it does not turn into the good one.
    assert at_least(3, 5, "enough", "").message == ""


def test_the_first_fault_counts_else_the_last_pass() -> None:
    fine, warning, fault = passed("fine"), warned("warning"), failed("fault")
    assert first_fault(fine, warning, fault) is warning
    assert first_fault(passed("first"), fine) is fine
