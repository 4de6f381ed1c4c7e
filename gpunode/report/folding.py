"""Folding of identical findings: over components, over checks that lack the same data, over nodes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gpunode.checks import Finding, Status
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
    components: dict[tuple[Status, str, str, str | None, str | None, str | None], list[str]] = defaultdict(list)
    for found in findings:
        key = (found.status, found.check, found.message, found.source, found.remedy, found.observed)
        components[key].append(found.component)
    groups: dict[tuple[Status, str, tuple[str, ...], str, str | None, str | None], list[tuple[str, str | None]]]
    groups = defaultdict(list)
    for (status, check, message, source, remedy, observed), names in components.items():
        # An error is about missing data, not about the subject of the check.
        own = "" if status is Status.ERROR else f"{check} {remedy}"
        groups[status, own, tuple(names), message, source, observed].append((check, remedy))
    return [
        FindingGroup(status, tuple(check for check, _ in checks), names, message, source, _remedy(checks), observed)
        for (status, _, names, message, source, observed), checks in groups.items()
    ]


def _remedy(checks: list[tuple[str, str | None]]) -> str | None:
    given = [(cause_rank((check,)), remedy) for check, remedy in checks if remedy is not None]
    return min(given, key=lambda one: one[0])[1] if given else None


def of_nodes(nodes: Iterable[NodeReport], statuses: frozenset[Status]) -> list[FoldedFinding]:
    """Return the nodes' findings of some statuses: worst first, then those that most nodes have, then causes."""
    hosts: dict[FindingGroup, list[str]] = defaultdict(list)
    for node in nodes:
        for group in of_node(finding for finding in node.findings if finding.status in statuses):
            hosts[group].append(node.host)
    folded = [FoldedFinding(group, tuple(sorted(names))) for group, names in hosts.items()]
    return sorted(folded, key=_place)


def _place(one: FoldedFinding) -> tuple[int, int, int, tuple[str, ...]]:
    group = one.group
    return WORST_FIRST.index(group.status), -len(one.hosts), cause_rank(group.checks), group.checks
