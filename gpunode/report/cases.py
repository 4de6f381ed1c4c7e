"""The results of a node as test cases, one for each check: what JUnit and CTRF have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from gpunode.checks import Category, Finding, Status
from gpunode.judging.report import AFFECTED, WORST_FIRST, NodeReport, Report, category_of, counting, worst
from gpunode.names import fold
from gpunode.report.folding import FindingGroup, of_node, page_of
from gpunode.text import moment, printable

FAILED = (Status.FAIL, Status.ERROR)


@dataclass(frozen=True)
class Case:
    """One check on one node. All texts are printable."""

    host: str
    check: str
    category: Category
    status: Status
    """The worst of its findings that count; ``skip`` if none counts."""
    message: str
    """The findings with this status, on one line."""
    details: str
    """All findings that did not pass, with remedy and origin of the limit; empty if all passed."""


def cases(node: NodeReport) -> Iterator[Case]:
    """Yield the checks of a node in the order of their ids."""
    findings = sorted(node.findings, key=lambda finding: finding.check)
    for check, group in groupby(findings, key=lambda finding: finding.check):
        yield _case(node.host, check, list(group))


def _case(host: str, check: str, findings: list[Finding]) -> Case:
    counted = counting(findings)
    status = worst(finding.status for finding in counted) if counted else Status.SKIP
    groups = sorted(of_node(findings), key=lambda group: WORST_FIRST.index(group.status))
    shown = [group for group in groups if group.observed is None and group.status is status] or groups[:1]
    message = "; ".join(f"{_where(group)}{group.message}" for group in shown)
    if not counted:
        message = f"observed only ({groups[0].observed}): {message}"
    details = [line for group in groups if group.status in (*AFFECTED, Status.NOTE) for line in _lines(group)]
    if details:
        details.append(f"about this check: {page_of(check)}")
    return Case(
        host=printable(host),
        check=printable(check),
        category=category_of(check),
        status=status,
        message=printable(message),
        details="\n".join(map(printable, details)),
    )


def _where(group: FindingGroup) -> str:
    return "" if set(group.components) == {"node"} else f"{fold(group.components)}: "


def _lines(group: FindingGroup) -> Iterator[str]:
    yield f"{group.status.value}: {_where(group)}{group.message}"
    if group.observed:
        yield f"  observed only, does not affect the result: {group.observed}"
    if group.source:
        yield f"  expected by: {group.source}"
    if group.remedy:
        yield f"  to do: {group.remedy}"


def no_node() -> Case:
    """Return the case of a report without nodes, which must not look like success."""
    return Case("gpunode", "node.reachable", "host", Status.ERROR, "no node was judged", "")


def started(document: Report) -> datetime | None:
    """Return the beginning of the run; None if it is unknown."""
    return moment(document.started_at)


def seconds(document: Report) -> float:
    """Return the duration of the run; 0 if it is unknown."""
    begin, end = moment(document.started_at), moment(document.finished_at)
    return max((end - begin).total_seconds(), 0.0) if begin and end else 0.0
