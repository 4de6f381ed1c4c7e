"""The report ``gpunode.report/1``: results of nodes and their summary."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from gpunode.checks import (
    Category,
    Finding,
    GpuIdentity,
    Hardware,
    Identity,
    Level,
    RunningStack,
    State,
    Status,
    registry,
)
from gpunode.checks.actions import most_severe
from gpunode.checks.policy import NO_POLICY, Policy
from gpunode.checks.registry import CATEGORIES, OF_PREFIX
from gpunode.errors import Exit
from gpunode.facts.bundle_reader import NOT_COLLECTED
from gpunode.frozen import FrozenByName
from gpunode.text import counted

AFFECTED = (Status.FAIL, Status.ERROR, Status.WARN)
WORST_FIRST = (Status.FAIL, Status.ERROR, Status.WARN, Status.NOTE, Status.PASS, Status.SKIP)


REACHABLE = "node.reachable"


class Counts(FrozenByName):
    """Findings by status."""

    pass_: int = Field(0, alias="pass")
    warn: int = 0
    fail: int = 0
    skip: int = 0
    error: int = 0
    note: int = 0
    """Findings without anything to repair; they affect neither status nor exit code."""
    observed: int = 0
    """Findings that a policy only observes; the other counts do not include them."""


class CategoryReport(FrozenByName):
    """Summary of the findings of one category on one node."""

    category: Category
    status: Status
    checks: tuple[str, ...]
    """Checks with a finding that neither passed nor was skipped; ``components`` are those of these findings."""
    components: tuple[str, ...]


class PolicyReport(FrozenByName):
    """The policy that was applied."""

    source: str
    expired: tuple[str, ...]
    """Expired rules: their checks count again."""


class NodeReport(FrozenByName):
    """The result of one node."""

    host: str
    status: Status
    seconds: float | None
    """Duration of the collection; None for a saved bundle."""
    simulated: bool | None
    """True for a lab node; None if the node could not be reached."""
    stack: RunningStack
    gpus: tuple[GpuIdentity, ...]
    hardware: Hardware | None = None
    """None if the node could not be reached."""
    recommended_state: State = State.NONE
    """Recommended state for a scheduler: the most severe of its findings'."""
    categories: tuple[CategoryReport, ...] = ()
    """Categories with at least one finding."""
    policy: PolicyReport | None = None
    """None: the checks' own limits apply."""
    findings: tuple[Finding, ...]


class Fleet(FrozenByName):
    """Comparison of the nodes with each other and with an earlier run; None: they were not compared."""

    outliers: tuple[dict[str, Any], ...] | None = None
    """Nodes that differ from most others of their model and platform (``gpunode.history.outliers``)."""
    inconsistencies: tuple[dict[str, Any], ...] | None = None
    """Versions of which the fleet has several usual ones."""
    since: dict[str, Any] | None = None
    """The document ``gpunode.comparison/1`` of ``--since``."""


class Report(FrozenByName):
    """The document ``gpunode.report/1``."""

    schema_name: Literal["gpunode.report/1"] = Field("gpunode.report/1", alias="schema")
    gpunode_version: str
    started_at: str
    finished_at: str
    level: Level
    status: Status
    counts: Counts
    nodes: tuple[NodeReport, ...]
    fleet: Fleet

    def to_json(self) -> str:
        """Return the document as it is printed."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status: fail > error > warn > pass; ``skip`` if all are skipped, ``error`` if there are none.

    A note counts as passed.
    """
    seen = {Status.PASS if status is Status.NOTE else status for status in statuses}
    return next((status for status in WORST_FIRST if status in seen), Status.ERROR)


def count(findings: Iterable[Finding]) -> Counts:
    """Return the number of findings of each status."""
    numbers = Counter("observed" if finding.observed else finding.status.value for finding in findings)
    return Counts.model_validate(dict(numbers))


def counting(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that count, without those that a policy only observes."""
    return [finding for finding in findings if finding.observed is None]


def by_category(findings: Iterable[Finding]) -> tuple[CategoryReport, ...]:
    """Return the findings grouped by category, in the order of the categories."""
    groups: dict[Category, list[Finding]] = {}
    for finding in counting(findings):
        groups.setdefault(category_of(finding.check), []).append(finding)
    return tuple(
        CategoryReport(
            category=category,
            status=worst(finding.status for finding in groups[category]),
            checks=tuple(dict.fromkeys(finding.check for finding in groups[category] if finding.status in AFFECTED)),
            components=tuple(
                dict.fromkeys(finding.component for finding in groups[category] if finding.status in AFFECTED)
            ),
        )
        for category in CATEGORIES
        if category in groups
    )


def category_of(check_id: str) -> Category:
    """Return the category of a check, by its id if it is not registered here."""
    if check_id in registry:
        return registry[check_id].category
    return OF_PREFIX.get(check_id.partition(".")[0], "host")


def judged(
    host: str,
    identity: Identity,
    findings: Sequence[Finding],
    seconds: float | None,
    policy: Policy = NO_POLICY,
) -> NodeReport:
    """Return the report on a node with data that was evaluated."""
    findings = _of_older_probe(findings)
    return NodeReport(
        host=host,
        status=worst(finding.status for finding in counting(findings)),
        seconds=seconds,
        simulated=identity.simulated,
        stack=identity.stack,
        gpus=identity.gpus,
        hardware=identity.hardware,
        recommended_state=most_severe(finding.recommended_state for finding in counting(findings)),
        categories=by_category(findings),
        policy=PolicyReport(source=policy.source, expired=policy.expired) if policy.source else None,
        findings=tuple(findings),
    )


def _of_older_probe(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return the findings; errors for data that the bundle's probe does not read become one error of the node.

    Their checks are skipped: the rest of an older bundle is evaluated, and the node stays undetermined.
    """
    checks = {one.check for one in counting(findings) if _lacks_data(one)}
    if not checks:
        return findings
    message = f"collected by an older probe: {counted(len(checks), 'check needs', 'checks need')} a newer one"
    remedy = "Collect the data again with this gpunode: gpunode validate -i INVENTORY -l HOST --save DIR"
    cause = Finding(check=REACHABLE, status=Status.ERROR, component="node", message=message, remedy=remedy)
    reason = f"the probe does not read its data ({REACHABLE} reports the cause)"
    skipped = {"status": Status.SKIP, "message": reason, "remedy": None}
    others = [one.model_copy(update=skipped) if _lacks_data(one) else one for one in findings if one.check != REACHABLE]
    return sorted([*others, cause], key=lambda one: one.check)


def _lacks_data(finding: Finding) -> bool:
    return finding.status is Status.ERROR and finding.message.endswith(NOT_COLLECTED)


def with_findings(node: NodeReport, findings: Sequence[Finding]) -> NodeReport:
    """Return the report on a node with other findings."""
    return node.model_copy(
        update={
            "findings": tuple(findings),
            "status": worst(finding.status for finding in counting(findings)),
            "recommended_state": most_severe(finding.recommended_state for finding in counting(findings)),
            "categories": by_category(findings),
        }
    )


def unchecked(node: NodeReport, key: str) -> NodeReport:
    """Return the report on a node with a host key that was accepted unknown: it may be the report on another
    machine."""
    message = (
        f"host key not verified: {key}; no password was sent, and the findings may belong to another machine: add the "
        "key to known_hosts"
    )
    finding = Finding(check=REACHABLE, status=Status.WARN, component="node", message=message)
    others = [one for one in node.findings if one.check != REACHABLE or one.status is Status.ERROR]
    return with_findings(node, (finding, *others))


def unreachable(host: str, reason: str, seconds: float | None) -> NodeReport:
    """Return the report on a node that sent nothing: one finding ``node.reachable``."""
    finding = Finding(check=REACHABLE, status=Status.ERROR, component="node", message=reason)
    return NodeReport(
        host=host,
        status=Status.ERROR,
        seconds=seconds,
        simulated=None,
        stack=RunningStack(),
        gpus=(),
        categories=by_category((finding,)),
        findings=(finding,),
    )


def report(  # noqa: PLR0913
    nodes: Sequence[NodeReport],
    *,
    level: Level,
    version: str,
    started_at: str,
    finished_at: str,
    fleet: Fleet | None = None,
) -> Report:
    """Return the report on nodes, in the given order."""
    return Report(
        gpunode_version=version,
        started_at=started_at,
        finished_at=finished_at,
        level=level,
        status=worst(node.status for node in nodes),
        counts=count(finding for node in nodes for finding in node.findings),
        nodes=tuple(nodes),
        fleet=fleet or Fleet(),
    )


def exit_code(document: Report, *, strict: bool = False) -> Exit:
    """Return 0 for success (warnings too, unless ``strict``), 1 for failures, 3 for an error or if no check had a
    result."""
    match document.status:
        case Status.FAIL:
            return Exit.FAILED
        case Status.WARN:
            return Exit.FAILED if strict else Exit.GOOD
        case Status.PASS:
            return Exit.GOOD
    return Exit.UNDETERMINED
