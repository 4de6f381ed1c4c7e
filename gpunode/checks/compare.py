"""Results of checks with their messages: comparisons with a limit, and one function per status."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

from packaging.version import InvalidVersion, Version

from gpunode.checks.actions import State
from gpunode.checks.registry import CheckResult, FigureReport, Status, Value

Comparison = Literal[
    "equals", "not_equals", "at_least", "at_most", "one_of", "none_of", "matches", "contains", "contains_not"
]


class Scale(TypedDict, total=False):
    """Unit of a value and source of its limit, which several results of a check share."""

    unit: str | None
    source: str | None


class About(Scale, total=False):
    """The fields of a result beside its status and message."""

    component: str
    expected: Value
    measured: Value
    figure: FigureReport | None
    remedy: str | None
    actions: tuple[str, ...] | None
    state: State | None


def passed(message: str, **about: Unpack[About]) -> CheckResult:
    """Return a result of status pass."""
    return CheckResult(Status.PASS, message, **about)


def noted(message: str, **about: Unpack[About]) -> CheckResult:
    """Return a result of status note: nothing to repair."""
    return CheckResult(Status.NOTE, message, **about)


def warned(message: str, **about: Unpack[About]) -> CheckResult:
    """Return a result of status warn."""
    return CheckResult(Status.WARN, message, **about)


def failed(message: str, **about: Unpack[About]) -> CheckResult:
    """Return a result of status fail."""
    return CheckResult(Status.FAIL, message, **about)


def skipped(message: str, **about: Unpack[About]) -> CheckResult:
    """Return a result of status skip: the check does not apply."""
    return CheckResult(Status.SKIP, message, **about)


def undetermined(message: str, **about: Unpack[About]) -> CheckResult:
    """Return a result of status error: data is missing or cannot be read."""
    return CheckResult(Status.ERROR, message, **about)


def holds(comparison: Comparison, measured: Any, expected: Any) -> bool:
    """Return the result of a comparison; raise TypeError for values that it cannot compare."""
    match comparison:
        case "equals":
            return bool(measured == expected)
        case "not_equals":
            return bool(measured != expected)
        case "at_least":
            return bool(measured >= expected)
        case "at_most":
            return bool(measured <= expected)
        case "one_of":
            return measured in expected
        case "none_of":
            return measured not in expected
        case "matches":
            return re.search(str(expected), measured) is not None
        case "contains":
            return expected in measured
        case "contains_not":
            return expected not in measured


def compared(  # noqa: PLR0913 - two values, two messages
    comparison: Comparison,
    value: Any,
    limit: Any,
    good: str,
    bad: str | None = None,
    *,
    fault: Status = Status.FAIL,
    **about: Unpack[About],
) -> CheckResult:
    """Return pass with the message ``good`` if the comparison holds, else ``fault`` with ``bad`` (None: the same).

    The result has the value as ``measured`` and the limit as ``expected``, unless ``about`` has other ones.
    """
    both: About = {"expected": limit, "measured": value}
    both |= about
    if holds(comparison, value, limit):
        return CheckResult(Status.PASS, good, **both)
    return CheckResult(fault, good if bad is None else bad, **both)


at_most = partial(compared, "at_most")
"""Compares as ``compared`` does: ``at_most(used, FULL.value, f"{used} % used", fault=Status.WARN, unit="%")``."""
at_least = partial(compared, "at_least")
equals = partial(compared, "equals")
matches = partial(compared, "matches")


def faultless(
    good: str, faults: Mapping[str, Any], *, fault: Status = Status.FAIL, **about: Unpack[About]
) -> CheckResult:
    """Return ``fault`` with the first message of ``faults`` with a condition that is true, else pass with ``good``."""
    message = next((message for message, condition in faults.items() if condition), None)
    return passed(good, **about) if message is None else CheckResult(fault, message, **about)


def parsed_version(text: str | None) -> Version | None:
    """Return a version; None for another text."""
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def first_fault(*results: CheckResult) -> CheckResult:
    """Return the first result that is not a pass, else the last one."""
    return next((result for result in results if result.status is not Status.PASS), results[-1])
