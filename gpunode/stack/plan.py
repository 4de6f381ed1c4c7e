"""A plan: the stacks of many nodes, equal nodes grouped, and the drift of the installed drivers from their locks.

``gpunode plan --diff A B``: the differences between two saved plans.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import ConfigDict, Field, ValidationError

from gpunode.catalog import Catalog
from gpunode.errors import UsageError
from gpunode.frozen import invalid_field
from gpunode.stack.drift import LOCK_NAME, Drift, DriftQuery, drifts, joined, read_lock, with_lock
from gpunode.stack.model import Conflict, NodePicture, Request, Stack, StackModel
from gpunode.stack.resolve import resolve
from gpunode.yaml_file import LOADER, load_bounded

SCHEMA: Literal["gpunode.plan/1"] = "gpunode.plan/1"
MOST_BYTES = 16_000_000


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


class FieldDifference(NamedTuple):
    """One field that differs; None: that plan has no such field."""

    host: str
    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{where}{self.field}: {_shown(self.before)} -> {_shown(self.after)}"


def differences(first: Path, second: Path, *, verbose: bool) -> list[FieldDifference]:
    """Return the differences, host by host. Warnings are compared; reasons only with ``verbose``. Raises UsageError."""
    before, after = _answers(first), _answers(second)
    if len(before) == len(after) == 1:
        # Two plans for hypothetical nodes, or for one host under two names, are comparable.
        (name,) = after
        before = {name: next(iter(before.values()))}
    return [
        change
        for host in dict.fromkeys([*before, *after])
        for change in _changes(host, before.get(host, {}), after.get(host, {}), verbose=verbose)
    ]


def _answers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the answer by host of a saved plan, a stack or a lock; "" for a hypothetical node."""
    document = _read(path)
    try:
        if LOCK_NAME in document or document.get("schema") == "gpunode.stack/1":
            return {"": _flat(Stack.model_validate(document.get(LOCK_NAME, document)).model_dump(mode="json"))}
        plan = Plan.model_validate(document)
    except ValidationError as err:
        where, why = invalid_field(err)
        raise UsageError(f"{path}: {where}: {why}; expected a plan of --format json") from None
    return {host: _flat(_answer(group)) for group in plan.groups for host in group.hosts or ("",)}


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES // 1_000_000} MB: not a plan")
        document = load_bounded(path.read_text(encoding="utf-8"), LOADER)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        raise UsageError(f"{path}: is not valid JSON or YAML; expected a plan of --format json") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: contains no document; expected a plan of --format json")
    return document


def _answer(group: PlanGroup) -> dict[str, Any]:
    if group.stack is not None:
        return group.stack.model_dump(mode="json")
    if group.conflict is not None:
        return {"conflict": group.conflict.message}
    return {"undetermined": group.undetermined}


def _flat(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested fields under dotted names; packages by name, warnings by rule, other lists as a whole."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{above}{key}"
        if key == "packages" and not above:
            flat |= {f"packages {row['name']}": row["version"] or "set by the repository" for row in item}
        elif key == "warnings":
            flat |= {f"warning [{row['rule']}] {row['text']}": "yes" for row in item}
        elif isinstance(item, Mapping):
            flat |= _flat(item, f"{name}.")
        elif key != "schema_name":
            flat[name] = item
    return flat


def _changes(
    host: str, before: Mapping[str, Any], after: Mapping[str, Any], *, verbose: bool
) -> Iterator[FieldDifference]:
    for field in dict.fromkeys([*before, *after]):
        if before.get(field) != after.get(field) and (verbose or not field.startswith("reasons.")):
            yield FieldDifference(host, field, before.get(field), after.get(field))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text) or "-"
