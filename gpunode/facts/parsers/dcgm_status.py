"""The words of ``dcgmi diag`` for a test's outcome."""

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import shorten

_STATUSES = {
    "pass": "pass",
    "passed": "pass",
    "fail": "fail",
    "failed": "fail",
    "warn": "warn",
    "warning": "warn",
    "skip": "skip",
    "skipped": "skip",
    "not run": "skip",
    "error": "error",
}
_WORST_FIRST = ("fail", "error", "warn", "pass", "skip")


def status_of(value: object) -> str:
    """A status in our words; raises ParseError for one that is unknown: it is never a pass."""
    status = _STATUSES.get(value.strip().lower()) if isinstance(value, str) else None
    if status is None:
        raise ParseError(f"expected a status of dcgmi diag, found '{shorten(str(value))}'")
    return status


def overall(statuses: list[str]) -> str:
    """The worst of them: fail > error > warn > pass, skip only if all are."""
    return next(status for status in _WORST_FIRST if status in statuses)


def failure(message: str) -> Failure:
    """Return the answer where dcgmi reports that it could not run the diagnostic."""
    return Failure(error=ToolError(kind="other", message=message))
