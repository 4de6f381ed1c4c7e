"""The nodes of a run together: findings that only their comparison shows, and identical findings folded.

Folded are those of several components, of checks that lack the same data, and of several nodes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode.checks import CheckResult, Finding, Status, registry
from gpunode.checks.gpu import SITE
from gpunode.checks.registry import FigureReport
from gpunode.judging.report import WORST_FIRST, NodeReport, with_findings
from gpunode.text import counted, listed

CAUSES_FIRST = (
    "node.reachable",
    "gpu.present",
    "driver.module-built",
    "driver.nouveau",
    "driver.module-loaded",
    "driver.library-matches-module",
    "node.next-boot",
    "driver.tools-answer",
    "gpu.model",
    "gpu.count",
    "gpu.answers",
    "gpu.messages",
    "gpu.recovery",
    "gpu.xid",
    "driver.log",
    "driver.expected",
    "fabric.manager",
    "fabric.manager-version",
    "fabric.state",
    "nvlink.state",
)
"""Checks with findings that explain those of others, in the order of cause and effect; all others follow by their
ids."""


FIGURE = FigureReport(metric="any")


@dataclass(frozen=True)
class FindingGroup:
    """The common part of several findings."""

    status: Status
    checks: tuple[str, ...]
    """Several if they could not be determined for the same reason."""
    components: tuple[str, ...]
    message: str
    source: str | None
    remedy: str | None
    observed: str | None = None
    """Why it does not count."""
    actions: tuple[str, ...] = ()
    """Steps of the remedy, as ``VERB:TARGET``; of several checks those of the first by cause."""
    measured: bool = False
    """True for a measured figure, of which the origin of the limit is always shown."""


@dataclass(frozen=True)
class FoldedFinding:
    """A group of findings, and the hosts that have it, in the order of their names."""

    group: FindingGroup
    hosts: tuple[str, ...]


def cause_rank(checks: Iterable[str]) -> int:
    """Return the lowest index of the checks in ``CAUSES_FIRST``; its length if none is in it."""
    return min((CAUSES_FIRST.index(check) for check in checks if check in CAUSES_FIRST), default=len(CAUSES_FIRST))


def of_node(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Return one node's findings, grouped over components and checks, in the order in which they were found.

    Errors with the same message are one group, whichever checks have them: the remedy is that of the first by cause.
    """
    components: dict[Finding, list[str]] = defaultdict(list)
    for finding in findings:
        components[_without_component(finding)].append(finding.component)
    groups: dict[tuple[Any, ...], list[Finding]] = defaultdict(list)
    for finding, names in components.items():
        # An error is about missing data, not about the subject of the check.
        subject = () if finding.status is Status.ERROR else (finding.check, finding.remedy, finding.actions)
        groups[finding.status, subject, tuple(names), finding.message, finding.source, finding.observed].append(finding)
    return [
        FindingGroup(
            status=status,
            checks=tuple(finding.check for finding in alike),
            components=names,
            message=message,
            source=source,
            remedy=_cause(alike).remedy,
            observed=observed,
            actions=tuple(map(str, _cause(alike).actions)),
            measured=any(finding.figure is not None for finding in alike),
        )
        for (status, _, names, message, source, observed), alike in groups.items()
    ]


def _without_component(finding: Finding) -> Finding:
    """Return what findings of several components have in common; measured values are in their messages."""
    steps = tuple(step.model_copy(update={"component": "node"}) for step in finding.actions)
    update = {"component": "node", "actions": steps, "expected": None, "measured": None, "unit": None}
    return finding.model_copy(update=update | {"figure": FIGURE if finding.figure else None})


def _cause(alike: list[Finding]) -> Finding:
    """Return the finding with the remedy: the first by cause of those that have one."""
    remedied = [finding for finding in alike if finding.remedy is not None] or alike
    return min(remedied, key=lambda finding: cause_rank((finding.check,)))


def of_nodes(nodes: Iterable[NodeReport], statuses: frozenset[Status]) -> list[FoldedFinding]:
    """Return the nodes' findings of some statuses: worst first, then those that most nodes have, then causes."""
    hosts: dict[FindingGroup, list[str]] = defaultdict(list)
    for node in nodes:
        for group in of_node(finding for finding in node.findings if finding.status in statuses):
            hosts[group].append(node.host)
    folded = [FoldedFinding(group, tuple(sorted(names))) for group, names in hosts.items()]
    return sorted(folded, key=_rank)


def _rank(folded: FoldedFinding) -> tuple[int, int, int, tuple[str, ...]]:
    group = folded.group
    return WORST_FIRST.index(group.status), -len(folded.hosts), cause_rank(group.checks), group.checks


def page_of(check: str) -> str:
    """Return where a check is described: a command, or the page of those that are no checks of one node."""
    return "docs/fabric.md" if check.startswith("nodes.") else f"gpunode checks {check}"


PRESENT = "gpu.present"
DOMAIN = "fabric.state"
LEAST_NODES = 3
"""Nodes of a kind from which on most of them are a rule."""
ONE_DRIVER = "Install one driver release on all nodes of the domain (role nvidia_driver), and reboot them together."
MUTED = "muted by"
HALVED = (1, 2, 4)
"""Numbers of GPUs that a node of the same kind may have been ordered with: only a note."""


def compared(nodes: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the nodes in their order, with the findings that only their comparison shows.

    A site file's number, and a failure that is known already, stay as they are.
    """
    added: dict[str, list[Finding]] = defaultdict(list)
    for finding, host in [*_fewer_gpus(nodes), *_mixed_drivers(nodes)]:
        added[host].append(finding)
    return [
        with_findings(node, _merged(node.findings, added[node.host])) if node.host in added else node for node in nodes
    ]


def _merged(findings: Iterable[Finding], added: Sequence[Finding]) -> list[Finding]:
    """Return the findings; an added one takes the place of those of its check that passed or warned for the node."""
    over = {finding.check for finding in added}
    left = [
        finding
        for finding in findings
        if finding.check not in over
        or finding.component != "node"
        or finding.status not in (Status.PASS, Status.WARN, Status.SKIP)
    ]
    return sorted([*left, *added], key=lambda finding: finding.check)


def _fewer_gpus(nodes: Iterable[NodeReport]) -> Iterable[tuple[Finding, str]]:
    """Yield findings for nodes with fewer GPUs than most nodes of their kind: same machine, same model.

    Virtual machines are given any number of GPUs on purpose, and a machine without a product name has no kind.
    """
    kinds: dict[tuple[str, str], list[tuple[NodeReport, int]]] = defaultdict(list)
    for node in nodes:
        hardware = node.hardware
        if hardware is None or hardware.virtual is not False or None in (hardware.product, hardware.gpu_model):
            continue
        kinds[str(hardware.product), str(hardware.gpu_model)].append((node, hardware.gpus or 0))
    for (product, model), members in kinds.items():
        usual, number = _most(gpus for _, gpus in members)
        if len(members) < LEAST_NODES or 2 * number <= len(members):
            continue
        for node, gpus in members:
            if gpus >= usual or not _may_be_replaced(node):
                continue
            source = f"this run: {number} of {counted(len(members), 'node')} of {product} with {model}"
            message = f"{counted(gpus, 'NVIDIA GPU')} on the PCI bus, most nodes of this kind have {usual}"
            status = Status.NOTE if gpus in HALVED and usual % gpus == 0 else Status.FAIL
            result = CheckResult(status, message, expected=usual, measured=gpus, source=source)
            yield registry[PRESENT].finding(result), node.host


def _most(values: Iterable[int]) -> tuple[int, int]:
    """Return the most frequent value and how often it occurs; of two as frequent the larger value."""
    return max(Counter(values).items(), key=lambda pair: (pair[1], pair[0]))


def _may_be_replaced(node: NodeReport) -> bool:
    """Return True if no better source has spoken: the finding exists, and is neither a failure nor a site file's."""
    existing = [finding for finding in node.findings if finding.check == PRESENT]
    return bool(existing) and all(
        finding.status in (Status.PASS, Status.WARN) and finding.source != SITE and finding.observed is None
        for finding in existing
    )


def _mixed_drivers(nodes: Iterable[NodeReport]) -> Iterable[tuple[Finding, str]]:
    """Yield findings for nodes with another driver than most nodes of their NVLink domain; for all of them if none has
    most."""
    domains: dict[str, list[NodeReport]] = defaultdict(list)
    for node in nodes:
        if node.hardware is not None and node.hardware.nvlink_domain is not None and node.stack.driver is not None:
            domains[node.hardware.nvlink_domain].append(node)
    for domain, members in domains.items():
        versions: Mapping[str, int] = Counter(str(node.stack.driver) for node in members)
        if len(versions) < 2:
            continue
        usual, number = max(versions.items(), key=lambda pair: pair[1])
        most = 2 * number > len(members)
        shown = listed([f"{count} x {version}" for version, count in sorted(versions.items())])
        for node in members:
            existing = [
                finding
                for finding in node.findings
                if finding.check == DOMAIN and not finding.message.startswith(MUTED)
            ]
            if (most and node.stack.driver == usual) or not existing:
                continue
            result = CheckResult(
                Status.WARN,
                f"driver {node.stack.driver} in an NVLink domain with {shown}",
                expected=usual if most else None,
                measured=node.stack.driver,
                source=f"this run: {counted(len(members), 'node')} of NVLink domain {domain}",
                remedy=ONE_DRIVER,
                actions=("run_role:nvidia_driver",),
            )
            finding = registry[DOMAIN].finding(result)
            yield finding.model_copy(update={"observed": existing[0].observed}), node.host
