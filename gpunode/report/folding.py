"""Identical findings told once: over components, over checks that lack the same data, over nodes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gpunode.checks import Finding, Status
from gpunode.report.model import WORST_FIRST, NodeReport


@dataclass(frozen=True)
class Told:
    """What several findings have in common."""

    status: Status
    checks: tuple[str, ...]
    """More than one where they could not be made for the same reason."""
    components: tuple[str, ...]
    message: str
    source: str | None
    remedy: str | None


@dataclass(frozen=True)
class Folded:
    """A finding, and the hosts that have it, in the order of their names."""

    told: Told
    hosts: tuple[str, ...]


def of_node(findings: Iterable[Finding]) -> list[Told]:
    """One node's findings, folded over components and checks; in the order in which they were found."""
    components: dict[tuple[Status, str, str, str | None, str | None], list[str]] = defaultdict(list)
    for found in findings:
        components[found.status, found.check, found.message, found.source, found.remedy].append(found.component)
    checks: dict[Told, list[str]] = defaultdict(list)
    for (status, check, message, source, remedy), names in components.items():
        # An error without a remedy is about data, not about what the check looks at.
        shared = status is Status.ERROR and remedy is None
        checks[Told(status, () if shared else (check,), tuple(names), message, source, remedy)].append(check)
    return [
        Told(told.status, tuple(names), told.components, told.message, told.source, told.remedy)
        for told, names in checks.items()
    ]


def of_nodes(nodes: Iterable[NodeReport], wanted: frozenset[Status]) -> list[Folded]:
    """The nodes' findings of the wanted statuses: worst first, then those that most nodes have."""
    hosts: dict[Told, list[str]] = defaultdict(list)
    for node in nodes:
        for told in of_node(finding for finding in node.findings if finding.status in wanted):
            hosts[told].append(node.host)
    folded = [Folded(told, tuple(sorted(names))) for told, names in hosts.items()]
    return sorted(folded, key=lambda one: (WORST_FIRST.index(one.told.status), -len(one.hosts), one.told.checks))
