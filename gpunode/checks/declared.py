"""Own checks of a site as data: a fact, a comparison, a value, a message."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Field

from gpunode.checks.compare import Comparison, compared, holds, skipped, undetermined
from gpunode.checks.registry import OF_PREFIX, CheckDeclaration, CheckResult, Registry, Status, Value, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.node import NodeFacts
from gpunode.facts.paths import plain_type
from gpunode.text import counted, listed

NUMERIC = ("at_least", "at_most")
LISTS = ("one_of", "none_of")
_STEP = re.compile(r"(\w+)(?:(\[)(?:(\w+)=([^\]]+))?\])?")
_NAMED = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
Plain = bool | int | float | str
Measured = tuple[Any, Mapping[str, Any]]
"""A value, and the fields of the element that contains it."""


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
    """A path in the facts: ``memory.total_mib``; ``file_systems[].free_mib`` checks each element,
    ``units[active=failed].name`` those with this value."""
    count: bool = False
    """Compare the number of elements, in one finding."""
    any: bool = False
    """Require the comparison of one element only, in one finding, which no element at all fails."""
    comparison: Comparison
    value: Plain | tuple[Plain, ...]
    message: str
    """For findings that do not pass; ``{measured}``, ``{expected}`` and the element's own fields are filled in. With
    ``count`` and ``any`` also ``{items}``; ``{measured:unit}`` is ``1 unit``, ``2 units``."""
    good: str | None = None
    """For findings that pass; None: the fact with its value."""
    status: Literal["note", "warn", "fail"] = "fail"
    component: str = "node"
    """Component of each finding: ``{mount}`` is the element's field."""
    unit: str | None = None
    source: str | None = None


class Step(NamedTuple):
    """One name of a path: each element of a list, or those with a value of a field."""

    name: str
    each: bool
    field: str | None
    value: str | None


def steps(path: str) -> list[Step]:
    """Return the steps of a path; raise ValueError, and UnknownFact."""
    found = []
    for part in path.split("."):
        match = _STEP.fullmatch(part)
        if match is None:
            raise ValueError(f"{path}: expected names separated by dots, and [] or [FIELD=VALUE] after a list")
        found.append(Step(match[1], match[2] is not None, match[3], match[4]))
    _must_exist(found, path)
    return found


def _must_exist(path: Iterable[Step], text: str) -> None:
    kind: Any = NodeFacts
    for step in path:
        kind = plain_type(_field(kind, step.name, text))
        is_list = get_origin(kind) in (tuple, list)
        if is_list and not step.each:
            raise ValueError(f"{text}: {step.name} is a list: write {step.name}[]")
        if step.each and not is_list and kind is not Any:
            raise ValueError(f"{text}: {step.name} is not a list: write {step.name}")
        kind = plain_type(get_args(kind)[0]) if is_list else kind
        if step.field is not None:
            _field(kind, step.field, text)


def _field(kind: Any, name: str, text: str) -> Any:
    """Return the type of a field; Any where the type has no model."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if name not in kind.model_fields:
            raise UnknownFact(name, list(kind.model_fields))
        return kind.model_fields[name].annotation
    if kind is not Any:
        raise ValueError(f"{text}: {kind.__name__} has no fields")
    return Any


def declare(check_id: str, **declared: Any) -> None:
    """Register a check of gpunode as data, with the keys of own checks in YAML; by default the category is the id's."""
    category = OF_PREFIX.get(check_id.partition(".")[0])
    register(registry, DeclaredCheck.model_validate({"id": check_id, "category": category, **declared}))


def register(registry: Registry, check: DeclaredCheck, source: str | None = None) -> None:
    """Register a check as data, a site's own of a file ``source``; raise ValueError if the path, the value or an action
    is not valid."""
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
            source=check.source or source or "our choice",
            least=min(0, number) if isinstance(number, int | float) else 0,
        )

    def judge(node: NodeFacts) -> Iterator[CheckResult]:
        yield from _verdicts(check, node, path, check.value if limit is None else limit.value, source)

    declared = {name: value for name, value in check if name in CheckDeclaration.model_fields}
    declared["needs"] = tuple(dict.fromkeys((path[0].name, *check.needs)))
    registry.check(check_id=declared.pop("id"), **declared, thresholds=() if limit is None else (limit,))(judge)


def _value_must_fit(check: DeclaredCheck) -> None:
    value = check.value
    about_all = "count" if check.count else "any" if check.any else None
    if about_all and not any(step.each for step in steps(check.fact)):
        raise ValueError(f"{about_all}: {check.fact} has no list: write [] after its name")
    if check.count and check.any:
        raise ValueError("any: not together with count, which compares one number")
    if (check.count or check.comparison in NUMERIC) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"value: {'count' if check.count else check.comparison} needs a number, found {value!r}")
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
    check: DeclaredCheck, node: NodeFacts, path: list[Step], expected: Any, source: str | None
) -> Iterator[CheckResult]:
    found: list[Measured] = list(_elements(node, path, {}))
    if check.count or check.any:
        items = sorted(str(_shown(one)) for one, _ in found if one is not None)
        found = [(len(found), {"items": listed(items)})] if check.count else _best(check.comparison, found, expected)
        found = [(one, {**element, "items": listed(items)}) for one, element in found]
    if not found and check.any:
        component = _filled(check.component, {})
        words = {"measured": "nothing", "items": "nothing", "expected": expected, "component": component}
        yield CheckResult(
            Status(check.status),
            _filled(check.message, words),
            component,
            expected=_shown(expected),
            unit=check.unit,
            source=check.source or source,
        )
    elif not found:
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
                f"{check.fact} is {_shown(measured)}" if check.good is None else _filled(check.good, words),
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


def _best(comparison: Comparison, found: list[Measured], expected: Any) -> list[Measured]:
    """Return the first value that compares well, else an unknown one, else one that does not."""

    def rank(one: Measured) -> int:
        try:
            return 1 if one[0] is None else 0 if holds(comparison, one[0], expected) else 2
        except TypeError:
            return 1

    return sorted(found, key=rank)[:1]


def _elements(place: Any, path: list[Step], element: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the values of a path, None if unknown, each with the fields of the element that contains it."""
    if not path or place is None:
        yield place, element
        return
    step, rest = path[0], path[1:]
    inner = _value(place, step.name)
    if not step.each or inner is None:
        yield from _elements(inner, rest, element)
        return
    for one in inner:
        if step.field is not None and str(_value(one, step.field)).lower() != str(step.value).lower():
            continue
        own = dict(one) if isinstance(one, Mapping | BaseModel) else {"value": one}
        yield from _elements(one, rest, own)


def _value(place: Any, name: str) -> Any:
    return place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)


def _filled(text: str, words: Mapping[str, Any]) -> str:
    """Return a text with its ``{names}`` filled in; unknown names stay unchanged."""

    def word(match: re.Match[str]) -> str:
        name, noun = match.groups()
        if name not in words:
            return match[0]
        return counted(words[name], noun) if noun and isinstance(words[name], int) else str(_shown(words[name]))

    return _NAMED.sub(word, text)


def _shown(value: Any) -> Value:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset | dict):
        return ", ".join(str(one) for one in list(value)[:6])
    return str(value)[:200]
