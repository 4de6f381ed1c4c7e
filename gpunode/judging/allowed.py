"""Deviations that the site's file allows until a date: findings that they explain are notes."""

from collections.abc import Callable, Iterable, Sequence
from datetime import date

from gpunode.checks import Allowed, Expectation, Finding, Status
from gpunode.checks.gpu import SITE


def with_allowed(
    findings: Sequence[Finding],
    expectation: Expectation,
    judge: Callable[[Expectation, frozenset[str]], Iterable[Finding]],
    on: date,
) -> list[Finding]:
    """Return the findings of a day; ``judge`` returns those of some checks by another expectation.

    A deviation is used where fewer findings fail with its value. An expired one changes the origin only.
    """
    results = list(findings)
    for allowed in expectation.allowed or ():
        failed = _failed(results)
        checks = frozenset(finding.check for finding in failed)
        if not checks:
            break
        other = expectation.model_copy(update={allowed.key: allowed.value})
        judged = list(judge(other, checks))
        better = frozenset(
            check
            for check in checks
            if len([finding for finding in _failed(judged) if finding.check == check])
            < len([finding for finding in failed if finding.check == check])
        )
        if not better:
            continue
        if allowed.until < on:
            source = f"{SITE}: {allowed.key} {allowed.words} was allowed until {allowed.until} ({allowed.reason})"
            results = [
                finding.model_copy(update={"source": source})
                if finding in failed and finding.check in better
                else finding
                for finding in results
            ]
            continue
        expectation = other
        components = {(finding.check, finding.component) for finding in failed}
        news = [
            _explained(finding, allowed) if (finding.check, finding.component) in components else finding
            for finding in judged
            if finding.check in better
        ]
        results = sorted(
            [*(finding for finding in results if finding.check not in better), *news], key=lambda finding: finding.check
        )
    return results


def _failed(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status is Status.FAIL and finding.source == SITE]


def _explained(finding: Finding, allowed: Allowed) -> Finding:
    """Return a finding that passes by an allowed value, as a note with the reason."""
    if finding.status is not Status.PASS:
        return finding
    message = f"{finding.message}; {allowed.key} {allowed.words} is allowed until {allowed.until}: {allowed.reason}"
    return finding.model_copy(update={"status": Status.NOTE, "message": message, "source": SITE})
