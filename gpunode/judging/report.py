"""The report ``gpunode.report/1``: results of nodes and their summary."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

from pydantic import Field

from gpunode.checks import (
    Category,
    Finding,
    GpuIdentity,
    Hardware,
    Identity,
    Level,
    NodeLayout,
    PairMatrix,
    RunningStack,
    State,
    Status,
    registry,
)
from gpunode.checks.actions import most_severe
from gpunode.checks.registry import CATEGORIES, OF_PREFIX
from gpunode.checks.thresholds import NO_POLICY, Policy
from gpunode.errors import Exit
from gpunode.facts.bundle_reader import NOT_COLLECTED
from gpunode.frozen import FrozenByName
from gpunode.text import counted

AFFECTED = (Status.FAIL, Status.ERROR, Status.WARN)
WORST_FIRST = (Status.FAIL, Status.ERROR, Status.WARN, Status.NOTE, Status.PASS, Status.SKIP)


REACHABLE = "node.reachable"
COMPARED = frozenset({"gpu.present", "fabric.state"})
"""Checks with findings that ``gpunode.report.fleet`` compares between nodes."""
MOST_SHARED = 100_000
"""Parts of reports that are looked up; beyond, each report has its own."""
Part = TypeVar("Part")


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
    layout: NodeLayout | None = None
    """Parts and links, for drawings; None if the node could not be reached, and in a report of ``--on-node``."""
    matrices: tuple[PairMatrix, ...] = ()
    """Measured figures of pairs of GPUs."""
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


class CollectiveReport(FrozenByName):
    """One collective over all nodes, at its largest message."""

    name: str
    size_bytes: int
    time_us: float
    busbw_gb_per_s: float
    wrong: int


class FabricReport(FrozenByName):
    """What ranks on several nodes measured together (``validate --fabric``)."""

    engine: str
    """What started the ranks: ``ssh``, ``slurm``, ``mpi`` …"""
    backend: str
    ranks: int
    rounds: int
    minutes: float
    """Duration of the whole run."""
    usual_gb_per_s: float | None = None
    """Of a good pair of nodes, on each rail."""
    matrix: PairMatrix | None = None
    """The rate of each pair of nodes that was tried: that of its slowest rail."""
    collectives: tuple[CollectiveReport, ...] = ()
    nccl: str | None = None
    """What NCCL reports of the ranks: networks, adapters, GPUDirect RDMA, channels; None without NCCL."""


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
    fabric: FabricReport | None = None
    """None: no ranks ran on several nodes together."""

    def to_json(self) -> str:
        """Return the document as it is printed."""
        return "".join(self.json_parts())

    def json_parts(self) -> Iterator[str]:
        """Yield the document as it is printed, node by node: that of thousands of nodes is never in memory."""
        frame = self.model_copy(update={"nodes": ()}).model_dump_json(by_alias=True, indent=1)
        before, mark, after = frame.partition('\n "nodes": []')
        if not self.nodes:
            yield f"{frame}\n"
            return
        yield f"{before}{mark.removesuffix(']')}"
        for number, node in enumerate(self.nodes):
            text = node.model_dump_json(by_alias=True, indent=1).replace("\n", "\n  ")
            yield f"{',' if number else ''}\n  {text}"
        yield f"\n ]{after}\n"


class CompactReports:
    """Reports on many nodes in little memory: equal parts of them are kept once.

    ``findings`` False: findings without anything to repair are only counted, as the text for people does.
    """

    def __init__(self, *, findings: bool) -> None:
        self._findings = findings
        self._known: dict[Any, Any] = {}

    def compact(self, node: NodeReport) -> NodeReport:
        """Return an equal report, or one without the details that are only counted."""
        update: dict[str, Any] = {"findings": tuple(self._kept(finding) for finding in node.findings)}
        for name in ("stack", "hardware", "layout", "policy"):
            update[name] = self._once(getattr(node, name))
        update["categories"] = tuple(self._once(category) for category in node.categories)
        return node.model_copy(update=update)

    def _kept(self, finding: Finding) -> Finding:
        if self._findings or finding.status in AFFECTED or finding.check in COMPARED:
            # 1, 1.0 and True are equal, and not the same in the document.
            return self._once(finding, type(finding.expected), type(finding.measured))
        key = (finding.check, finding.status, finding.observed)
        bare = self._known.get(key)
        if bare is None:
            check, status, observed = key
            bare = Finding(check=check, status=status, component="node", message="", observed=observed)
            self._known[key] = bare
        return cast("Finding", bare)

    def _once(self, value: Part, *types: type) -> Part:
        key = (value, *types)
        if len(self._known) < MOST_SHARED:
            return cast("Part", self._known.setdefault(key, value))
        return cast("Part", self._known.get(key, value))


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


def in_words(counts: Counts) -> str:
    """Return ``1 failed, 2 not determined, 9 passed, 3 skipped``, without counts of 0."""
    words = (
        (counts.fail, "failed"),
        (counts.error, "not determined"),
        (counts.warn, "warned"),
        (counts.note, "noted"),
        (counts.pass_, "passed"),
        (counts.skip, "skipped"),
        (counts.observed, "observed only"),
    )
    return ", ".join(f"{number} {word}" for number, word in words if number) or "no check was run"


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
        layout=identity.layout,
        matrices=identity.matrices,
        recommended_state=most_severe(finding.recommended_state for finding in counting(findings)),
        categories=by_category(findings),
        policy=PolicyReport(source=policy.source, expired=policy.expired) if policy.source else None,
        findings=tuple(findings),
    )


def _of_older_probe(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return the findings; errors for data that the bundle's probe does not read become one error of the node.

    Their checks are skipped: the rest of an older bundle is evaluated, and the node stays undetermined.
    """
    checks = {finding.check for finding in counting(findings) if _lacks_data(finding)}
    if not checks:
        return findings
    message = f"collected by an older probe: {counted(len(checks), 'check needs', 'checks need')} a newer one"
    remedy = "Collect the data again with this gpunode: gpunode validate -i INVENTORY -l HOST --save DIR"
    cause = Finding(check=REACHABLE, status=Status.ERROR, component="node", message=message, remedy=remedy)
    reason = f"the probe does not read its data ({REACHABLE} reports the cause)"
    skipped = {"status": Status.SKIP, "message": reason, "remedy": None}
    others = [
        finding.model_copy(update=skipped) if _lacks_data(finding) else finding
        for finding in findings
        if finding.check != REACHABLE
    ]
    return sorted([*others, cause], key=lambda finding: finding.check)


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
    others = [finding for finding in node.findings if finding.check != REACHABLE or finding.status is Status.ERROR]
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
    fabric: FabricReport | None = None,
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
        fabric=fabric,
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
