"""Identical findings told once: over components, over checks that lack the same data, over nodes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gpunode.checks import Finding, Status
from gpunode.report.model import WORST_FIRST, NodeReport

CAUSES_FIRST = (
    "node.reachable",
    "gpu.present",
    "driver.module-built",
    "driver.nouveau",
    "driver.module-loaded",
    "driver.library-matches-module",
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
"""Checks whose findings explain those of others, in the order of cause and effect; all others follow by their ids."""


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
    observed: str | None = None
    """Why it counts for nothing."""


@dataclass(frozen=True)
class Folded:
    """A finding, and the hosts that have it, in the order of their names."""

    told: Told
    hosts: tuple[str, ...]


def cause_rank(checks: Iterable[str]) -> int:
    """Return the place of the first of some checks in ``CAUSES_FIRST``; one that is not in it comes behind."""
    return min((CAUSES_FIRST.index(check) for check in checks if check in CAUSES_FIRST), default=len(CAUSES_FIRST))


def of_node(findings: Iterable[Finding]) -> list[Told]:
    """One node's findings, folded over components and checks; in the order in which they were found.

    Errors with the same message are one, whichever checks have them: the remedy is that of the first by cause.
    """
    components: dict[tuple[Status, str, str, str | None, str | None, str | None], list[str]] = defaultdict(list)
    for found in findings:
        key = (found.status, found.check, found.message, found.source, found.remedy, found.observed)
        components[key].append(found.component)
    groups: dict[tuple[Status, str, tuple[str, ...], str, str | None, str | None], list[tuple[str, str | None]]]
    groups = defaultdict(list)
    for (status, check, message, source, remedy, observed), names in components.items():
        # An error is about data that is missing, not about what the check looks at.
        own = "" if status is Status.ERROR else f"{check} {remedy}"
        groups[status, own, tuple(names), message, source, observed].append((check, remedy))
    return [
        Told(status, tuple(check for check, _ in checks), names, message, source, _remedy(checks), observed)
        for (status, _, names, message, source, observed), checks in groups.items()
    ]


def _remedy(checks: list[tuple[str, str | None]]) -> str | None:
    given = [(cause_rank((check,)), remedy) for check, remedy in checks if remedy is not None]
    return min(given, key=lambda one: one[0])[1] if given else None


def of_nodes(nodes: Iterable[NodeReport], wanted: frozenset[Status]) -> list[Folded]:
    """The nodes' findings of the wanted statuses: worst first, then those that most nodes have, then causes."""
    hosts: dict[Told, list[str]] = defaultdict(list)
    for node in nodes:
        for told in of_node(finding for finding in node.findings if finding.status in wanted):
            hosts[told].append(node.host)
    folded = [Folded(told, tuple(sorted(names))) for told, names in hosts.items()]
    return sorted(folded, key=_place)


def _place(one: Folded) -> tuple[int, int, int, tuple[str, ...]]:
    told = one.told
    return WORST_FIRST.index(told.status), -len(one.hosts), cause_rank(told.checks), told.checks
