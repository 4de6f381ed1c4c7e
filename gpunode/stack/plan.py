"""A plan: the stacks of many nodes, equal nodes grouped, and the drift of the installed drivers from their locks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from pydantic import ConfigDict, Field

from gpunode.catalog import Catalog
from gpunode.errors import UsageError
from gpunode.stack.drift import Drift, DriftQuery, drifts, joined, read_lock, with_lock
from gpunode.stack.model import Conflict, NodePicture, Request, Stack, StackModel
from gpunode.stack.resolve import resolve

SCHEMA: Literal["gpunode.plan/1"] = "gpunode.plan/1"


@dataclass(frozen=True)
class PlanHost:
    """One node to plan for: exactly one of ``picture`` and ``reason`` is set."""

    name: str
    picture: NodePicture | None
    reason: str | None = None
    """Why no stack can be selected for it."""
    lock: Mapping[str, Any] | None = None
    """The host's variable ``gpunode_stack``."""
    request: Request | None = None
    """The request of the host's own variables; None: that of the plan."""


class PlanGroup(StackModel):
    """Nodes with one answer: exactly one of ``stack``, ``conflict`` and ``undetermined`` is set."""

    hosts: tuple[str, ...]
    """Empty for a hypothetical node."""
    stack: Stack | None = None
    conflict: Conflict | None = None
    undetermined: str | None = None
    drift: tuple[Drift, ...] = ()


class Plan(StackModel):
    """The document of ``gpunode plan``."""

    schema_name: Literal["gpunode.plan/1"] = Field(SCHEMA, alias="schema")
    today: date
    request: Request
    groups: tuple[PlanGroup, ...]
    notes: tuple[str, ...] = ()
    """Notes about the whole plan: the catalog is old."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def plan(hosts: Iterable[PlanHost], request: Request, catalog: Catalog, today: date) -> Plan:
    """Return the plan, with each different picture resolved once; a host's lock applies if the request names no driver.

    Raise UsageError for names that the catalog does not have.
    """
    members: dict[tuple[str, Request, Request], list[PlanHost]] = {}
    failed: dict[str, list[str]] = {}
    for host in hosts:
        if host.picture is None:
            failed.setdefault(host.reason or "no answer", []).append(host.name)
        else:
            requested = host.request or request
            locked = with_lock(requested, read_lock(host.lock, host.name))
            members.setdefault((host.picture.model_dump_json(), requested, locked), []).append(host)
    groups = [_group_of(same, requested, locked, catalog, today) for (_, requested, locked), same in members.items()]
    groups += [PlanGroup(hosts=tuple(sorted(names)), undetermined=why) for why, names in failed.items()]
    ordered = tuple(sorted(_merged(groups), key=lambda group: group.hosts))
    stale = catalog.stale(today)
    return Plan(today=today, request=request, groups=ordered, notes=(stale,) if stale else ())


def _group_of(same: list[PlanHost], request: Request, locked: Request, catalog: Catalog, today: date) -> PlanGroup:
    """Return the group of hosts; without a stack if their own driver is the reason that there is no answer.

    An invalid version from a node, or one of an unknown branch, must not end the plan of the others.
    """
    picture = same[0].picture
    installed = picture.installed.version if picture and picture.observed and picture.installed else None
    try:
        return _group(same, request, locked, catalog, today)
    except ValueError as err:
        if installed is None:
            raise
        why = str(err)
    except UsageError as err:
        if installed is None or not request.driver or not installed.startswith(request.driver):
            raise
        why = str(err)
    names = tuple(sorted(host.name for host in same if host.name))
    return PlanGroup(hosts=names, undetermined=f"its installed driver {installed[:40]!r} cannot be planned: {why}")


def _group(same: list[PlanHost], request: Request, locked: Request, catalog: Catalog, today: date) -> PlanGroup:
    picture = same[0].picture
    if picture is None:
        raise ValueError("a host without a picture is in no group")
    answer = resolve(locked, picture, catalog, today)
    names = tuple(sorted(host.name for host in same if host.name))
    locks = {host.name: read_lock(host.lock, host.name) for host in same}
    drift = drifts(DriftQuery(request, picture, catalog, today), locks) if picture.observed else ()
    if isinstance(answer, Stack):
        return PlanGroup(hosts=names, stack=answer, drift=drift)
    return PlanGroup(hosts=names, conflict=answer, drift=drift)


def _merged(groups: Iterable[PlanGroup]) -> list[PlanGroup]:
    """Return the groups with equal answers merged: pictures may differ in properties that do not matter."""
    merged: dict[str, PlanGroup] = {}
    for group in groups:
        key = group.model_dump_json(exclude={"hosts", "drift"})
        other = merged.get(key)
        if other is None:
            merged[key] = group
        else:
            hosts = tuple(sorted((*other.hosts, *group.hosts)))
            merged[key] = other.model_copy(update={"hosts": hosts, "drift": joined((*other.drift, *group.drift))})
    return list(merged.values())
