"""Folding of identical findings: over components, over checks that lack the same data, over nodes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpunode.checks import Finding, Status
from gpunode.checks.registry import FigureReport
from gpunode.judging.report import WORST_FIRST, NodeReport

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
