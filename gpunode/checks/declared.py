"""Own checks of a site as data: a fact, a comparison, a value, a message."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field

from gpunode.checks.compare import Comparison, compared, skipped, undetermined
from gpunode.checks.registry import CheckDeclaration, CheckResult, Registry, Status, Value
from gpunode.checks.thresholds import Threshold
from gpunode.facts.node import NodeFacts

NUMERIC = ("at_least", "at_most")
LISTS = ("one_of", "none_of")
_STEP = re.compile(r"(\w+)(\[\])?")
_NAMED = re.compile(r"\{(\w+)\}")
Plain = bool | int | float | str


class UnknownFact(ValueError):  # noqa: N818
    """A path that names no fact; ``known`` are the names at the location where it ends."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name)
        self.name = name
        self.known = known


class DeclaredCheck(CheckDeclaration):
    """One entry of a file of own checks."""

    id: str = Field(pattern=r"^[a-z][a-z0-9-]*\.[a-z][a-z0-9-]*$")
    fact: str
    """A path in the facts: ``memory.total_mib``; ``file_systems[].free_mib`` checks each element."""
    comparison: Comparison
    value: Plain | tuple[Plain, ...]
    message: str
    """For findings that do not pass; ``{measured}``, ``{expected}`` and the element's own fields are filled in."""
    status: Literal["note", "warn", "fail"] = "fail"
    component: str = "node"
    """Component of each finding: ``{mount}`` is the element's field."""
    unit: str | None = None
    source: str | None = None


def steps(path: str) -> list[tuple[str, bool]]:
    """Return a path's names, each with whether it applies to every element; raise ValueError, and UnknownFact."""
    found = []
    for part in path.split("."):
        match = _STEP.fullmatch(part)
        if match is None:
            raise ValueError(f"{path}: expected names separated by dots, and [] after a list")
        found.append((match[1], match[2] is not None))
    _must_exist(found, path)
    return found


def _must_exist(path: Iterable[tuple[str, bool]], text: str) -> None:
    kind: Any = NodeFacts
    for name, each in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if name not in kind.model_fields:
                raise UnknownFact(name, list(kind.model_fields))
            kind = _plain(kind.model_fields[name].annotation)
        elif kind is not Any:
            raise ValueError(f"{text}: {kind.__name__} has no fields")
        is_list = get_origin(kind) in (tuple, list)
        if is_list and not each:
            raise ValueError(f"{text}: {name} is a list: write {name}[]")
        if each and not is_list and kind is not Any:
            raise ValueError(f"{text}: {name} is not a list: write {name}")
        kind = _plain(get_args(kind)[0]) if is_list else kind


def _plain(annotation: Any) -> Any:
    """Return a type without None; Any for a union of several types, and for a mapping."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _plain(others[0]) if len(others) == 1 else Any
    return Any if get_origin(annotation) in (dict, Mapping) or annotation is Mapping else annotation


def register(registry: Registry, check: DeclaredCheck, source: str) -> None:
    """Register an own check; raise ValueError if the path, the value or an action is not valid."""
    path = steps(check.fact)
    _value_must_fit(check)
    limit = None
    if check.comparison in NUMERIC and not isinstance(check.value, tuple):
        number = check.value
        limit = Threshold(
            f"{check.id}.value",
            number if isinstance(number, int | float) else 0,
            check.unit or "of the fact",
            check.means,
            source=check.source or source,
            least=min(0, number) if isinstance(number, int | float) else 0,
        )

    def judge(node: NodeFacts) -> Iterator[CheckResult]:
        yield from _verdicts(check, node, path, check.value if limit is None else limit.value, source)

    declared = {name: value for name, value in check if name in CheckDeclaration.model_fields}
    declared["needs"] = tuple(dict.fromkeys((path[0][0], *check.needs)))
    registry.check(check_id=declared.pop("id"), **declared, thresholds=() if limit is None else (limit,))(judge)


def _value_must_fit(check: DeclaredCheck) -> None:
    value = check.value
    if check.comparison in NUMERIC and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"value: {check.comparison} needs a number, found {value!r}")
    if check.comparison in LISTS and not isinstance(value, tuple):
        raise ValueError(f"value: {check.comparison} needs a list, found {value!r}")
    if check.comparison not in LISTS and isinstance(value, tuple):
        raise ValueError(f"value: {check.comparison} needs one value, found a list")
    if check.comparison == "matches":
        try:
            re.compile(str(value))
        except re.error as err:
            raise ValueError(f"value: not a regular expression: {err}") from None


def _verdicts(
    check: DeclaredCheck, node: NodeFacts, path: list[tuple[str, bool]], expected: Any, source: str
) -> Iterator[CheckResult]:
    found = list(_elements(node, path, {}))
    if not found:
        yield skipped(f"{check.fact}: nothing to compare")
    for measured, element in found:
        component = _filled(check.component, element)
        if measured is None:
            yield undetermined(f"{check.fact} is unknown", component=component)
            continue
        words = {**element, "measured": measured, "expected": expected, "component": component}
        try:
            yield compared(
                check.comparison,
                measured,
                expected,
                f"{check.fact} is {_shown(measured)}",
                _filled(check.message, words),
                fault=Status(check.status),
                component=component,
                expected=_shown(expected),
                measured=_shown(measured),
                unit=check.unit,
                source=check.source or source,
            )
        except TypeError:
            message = f"{check.fact} is {_shown(measured)!r}: {check.comparison} cannot compare it"
            yield undetermined(message, component=component)


def _elements(
    place: Any, path: list[tuple[str, bool]], element: Mapping[str, Any]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield the values of a path, None if unknown, each with the fields of the element that contains it."""
    if not path or place is None:
        yield place, element
        return
    (name, each), rest = path[0], path[1:]
    inner = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
    if not each or inner is None:
        yield from _elements(inner, rest, element)
        return
    for one in inner:
        own = dict(one) if isinstance(one, Mapping | BaseModel) else {"value": one}
        yield from _elements(one, rest, own)


def _filled(text: str, words: Mapping[str, Any]) -> str:
    """Return a text with its ``{names}`` filled in; unknown names stay unchanged."""
    return _NAMED.sub(lambda match: str(_shown(words[match[1]])) if match[1] in words else match[0], text)


def _shown(value: Any) -> Value:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset | dict):
        return ", ".join(str(one) for one in list(value)[:6])
    return str(value)[:200]
