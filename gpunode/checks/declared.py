"""Own checks of a site: as data (a fact, a comparison, a value, a message), and in Python packages."""

import contextlib
import io
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Field

from gpunode.checks.compare import Comparison, holds, skipped, undetermined
from gpunode.checks.registry import OF_PREFIX, CheckDeclaration, CheckResult, Registry, Status, Value, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.node import NodeFacts, plain_type
from gpunode.frozen import Frozen
from gpunode.text import counted, listed, one_line

NUMERIC = ("at_least", "at_most")
LISTS = ("one_of", "none_of")
_STEP = re.compile(r"(\w+)(?:(\[)(?:(\w+)=([^\]]+))?\])?")
_NAMED = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
Plain = bool | int | float | str


class Measured(NamedTuple):
    """A value of a path."""

    value: Any
    """None: unknown."""
    beside: Any
    """The object with the value; None if a part of the path is unknown."""
    words: Mapping[str, Any]
    """The fields of the objects that the path leads through, the last one's before others of the same name."""


class UnknownFact(ValueError):  # noqa: N818
    """A path that names no fact; ``known`` are the names at the location where it ends."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name)
        self.name = name
        self.known = known


class Condition(Frozen):
    """A comparison of one fact, and the finding where it does not hold."""

    fact: str = Field(pattern=r"^\w+$")
    """A field beside the fact of the check."""
    comparison: Comparison
    value: Plain | tuple[Plain, ...]
    message: str
    """For findings that do not pass; ``{measured}``, ``{expected}`` and the element's own fields are filled in. With
    ``count`` and ``any`` also ``{items}``; ``{measured:unit}`` is ``1 unit``, ``2 units``."""
    status: Literal["note", "warn", "fail"] = "fail"


class DeclaredCheck(CheckDeclaration, Condition):
    """One entry of a file of own checks."""

    id: str = Field(pattern=r"^[a-z][a-z0-9-]*\.[a-z][a-z0-9-]*$")
    fact: str
    """A path in the facts: ``memory.total_mib``; ``file_systems[].free_mib`` checks each element,
    ``units[active=failed].name`` those with this value."""
    first: tuple[Condition, ...] = ()
    """Conditions of the same element that are compared before: the first that does not hold is its finding."""
    percent_of: str | None = Field(None, pattern=r"^\w+$")
    """Compare the value as a percentage of this field beside it, a whole number."""
    count: bool = False
    """Compare the number of elements, in one finding."""
    any: bool = False
    """Require the comparison of one element only, in one finding, which no element at all fails."""
    good: str | None = None
    """For findings that pass; None: the fact with its value."""
    nothing: str | None = None
    """Why the check does not apply if there is no element, or if the fact is absent."""
    unknown: str | None = None
    """Why there is no result if a value is unknown."""
    component: str = "node"
    """Component of each finding: ``{mount}`` is the element's field."""
    expected: Plain | None = None
    """Shown as the expected value; None: ``value``."""
    unit: str | None = None
    source: str | None = None


class Step(NamedTuple):
    """One name of a path: each element of a list, or those with a value of a field."""

    name: str
    each: bool
    field: str | None
    value: str | None
    """In lower case."""


def steps(path: str) -> list[Step]:
    """Return the steps of a path; raise ValueError, and UnknownFact."""
    all_steps = []
    kind: Any = NodeFacts
    for part in path.split("."):
        match = _STEP.fullmatch(part)
        if match is None:
            raise ValueError(f"{path}: expected names separated by dots, and [] or [FIELD=VALUE] after a list")
        step = Step(match[1], match[2] is not None, match[3], match[4] and match[4].lower())
        kind = plain_type(_field(kind, step.name, path))
        is_list = get_origin(kind) in (tuple, list)
        if is_list and not step.each:
            raise ValueError(f"{path}: {step.name} is a list: write {step.name}[]")
        if step.each and not is_list and kind is not Any:
            raise ValueError(f"{path}: {step.name} is not a list: write {step.name}")
        kind = plain_type(get_args(kind)[0]) if is_list else kind
        if step.field is not None:
            _field(kind, step.field, path)
        all_steps.append(step)
    return all_steps


def _field(kind: Any, name: str, text: str) -> Any:
    """Return the type of a field; Any where the type has no model."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if name not in kind.model_fields:
            raise UnknownFact(name, list(kind.model_fields))
        return kind.model_fields[name].annotation
    if kind is not Any:
        raise ValueError(f"{text}: {kind.__name__} has no fields")
    return Any


def declare(check_id: str, limit: Threshold | None = None, **declared: Any) -> None:
    """Register a check of gpunode as data, with the keys of own checks; ``limit``: its value, under another name."""
    category = OF_PREFIX.get(check_id.partition(".")[0])
    value = {} if limit is None else {"value": limit.default}
    check = DeclaredCheck.model_validate({"id": check_id, "category": category, **value, **declared})
    register(registry, check, limit=limit)


def register(
    registry: Registry, check: DeclaredCheck, source: str | None = None, limit: Threshold | None = None
) -> None:
    """Register a check as data, a site's own of a file ``source``; raise ValueError if a path, a value or an action is
    not valid."""
    path = steps(check.fact)
    _elements_must_fit(check, path)
    for condition in (*check.first, check):
        _value_must_fit(condition, numeric=condition is check and check.count)
    number, origin = check.value, check.source or source
    if limit is None and check.comparison in NUMERIC and isinstance(number, int | float):
        unit = check.unit or "of the fact"
        limit = Threshold(
            f"{check.id}.value", number, unit, check.means, source=origin or "our choice", least=min(0, number)
        )

    def in_force() -> Any:
        # Read for each finding that compares with it: only those name the policy that sets it.
        return check.value if limit is None else limit.value

    def judge(node: NodeFacts) -> Iterator[CheckResult]:
        yield from _results(check, node, path, in_force, origin)

    declared = {name: value for name, value in check if name in CheckDeclaration.model_fields}
    declared["needs"] = tuple(dict.fromkeys((path[0].name, *check.needs)))
    registry.check(check_id=declared.pop("id"), **declared, thresholds=() if limit is None else (limit,))(judge)


def _elements_must_fit(check: DeclaredCheck, path: list[Step]) -> None:
    about_all = "count" if check.count else "any" if check.any else None
    if about_all and not any(step.each for step in path):
        raise ValueError(f"{about_all}: {check.fact} has no list: write [] after its name")
    if check.count and check.any:
        raise ValueError("any: not together with count, which compares one number")
    if about_all and (check.first or check.percent_of):
        raise ValueError(f"{about_all}: not together with first and percent_of, which compare fields of one element")
    for field in filter(None, (*(condition.fact for condition in check.first), check.percent_of)):
        steps(".".join((*check.fact.split(".")[:-1], field)))


def _value_must_fit(condition: Condition, *, numeric: bool = False) -> None:
    value, comparison = condition.value, condition.comparison
    if (numeric or comparison in NUMERIC) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"value: {'count' if numeric else comparison} needs a number, found {value!r}")
    if comparison in LISTS and not isinstance(value, tuple):
        raise ValueError(f"value: {comparison} needs a list, found {value!r}")
    if comparison not in LISTS and isinstance(value, tuple):
        raise ValueError(f"value: {comparison} needs one value, found a list")
    if comparison == "matches":
        try:
            re.compile(str(value))
        except re.error as err:
            raise ValueError(f"value: not a regular expression: {err}") from None


def _results(
    check: DeclaredCheck, node: NodeFacts, path: list[Step], limit: Callable[[], Any], source: str | None
) -> Iterator[CheckResult]:
    readings, about_all = list(_elements(node, path, {})), check.count or check.any
    if check.nothing is not None and (_value(node, path[0].name) is None or not (readings or about_all)):
        readings = []
        yield skipped(check.nothing)
    elif check.any and not readings:
        yield _compared(check, check, Measured(None, None, {"items": "nothing"}), limit(), source)
    elif about_all:
        readings = _of_all(check, readings, limit)
    elif not readings:
        yield skipped(f"{check.fact}: nothing to compare")
    for reading in readings:
        yield _result(check, reading, limit, source)


def _of_all(check: DeclaredCheck, readings: list[Measured], limit: Callable[[], Any]) -> list[Measured]:
    """Return the number of values; or the first that compares well, else an unknown one, else one that does not."""
    items = {"items": listed(sorted(str(_shown(reading.value)) for reading in readings if reading.value is not None))}
    if check.count:
        return [Measured(None if any(reading.beside is None for reading in readings) else len(readings), None, items)]
    expected = limit()

    def rank(reading: Measured) -> int:
        try:
            return 1 if reading.value is None else 0 if holds(check.comparison, reading.value, expected) else 2
        except TypeError:
            return 1

    return [reading._replace(words={**reading.words, **items}) for reading in sorted(readings, key=rank)[:1]]


def _result(check: DeclaredCheck, reading: Measured, limit: Callable[[], Any], source: str | None) -> CheckResult:
    if check.percent_of is not None:
        reading = reading._replace(value=_percent(reading.value, _value(reading.beside, check.percent_of)))
    before = [(each, reading._replace(value=_value(reading.beside, each.fact))) for each in check.first]
    if reading.value is None or any(each.value is None for _, each in before):
        return undetermined(
            check.unknown or f"{check.fact} is unknown", component=_filled(check.component, reading.words)
        )
    results = (_compared(check, condition, each, condition.value, source) for condition, each in before)
    fault = next((result for result in results if result.status is not Status.PASS), None)
    return fault or _compared(check, check, reading, limit(), source)


def _percent(part: Any, whole: Any) -> int | None:
    """Return the share; None of anything but finite numbers."""
    is_known = isinstance(part, int | float) and isinstance(whole, int | float) and whole
    try:
        return round(100 * part / whole) if is_known else None
    except (ValueError, OverflowError):
        return None


def _compared(
    check: DeclaredCheck, condition: Condition, reading: Measured, expected: Any, source: str | None
) -> CheckResult:
    """Return the result of a condition; a value of None does not hold."""
    component = _filled(check.component, reading.words)
    measured = _shown(reading.value)
    shown = "nothing" if reading.value is None else reading.value
    words = {**reading.words, "measured": shown, "expected": expected, "component": component}
    try:
        good = reading.value is not None and holds(condition.comparison, reading.value, expected)
    except TypeError:
        message = f"{check.fact} is {measured!r}: {condition.comparison} cannot compare it"
        return undetermined(message, component=component)
    fact = f"{check.fact} is {measured}" if check.good is None else check.good
    return CheckResult(
        Status.PASS if good else Status(condition.status),
        _filled(fact if good else condition.message, words),
        component,
        expected=_shown(expected) if check.expected is None else check.expected,
        measured=measured,
        unit=check.unit,
        source=source,
    )


def _elements(parent: Any, path: list[Step], words: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the values of a path."""
    step, rest = path[0], path[1:]
    inner = _value(parent, step.name)
    for child in inner if step.each and inner is not None else (inner,):
        if step.field is not None and child is not None and step.value != str(_value(child, step.field)).lower():
            continue
        named = dict(child) if isinstance(child, Mapping | BaseModel) else {"value": child} if step.each else {}
        if child is not None and rest:
            yield from _elements(child, rest, {**words, **named})
        else:
            is_broken = child is None and (step.each or bool(rest))
            yield Measured(child, None if is_broken else parent, {**words, **named})


def _value(parent: Any, name: str) -> Any:
    return parent.get(name) if isinstance(parent, Mapping) else getattr(parent, name, None)


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
        return ", ".join(str(member) for member in list(value)[:6])
    return str(value)[:200]


GROUP = "gpunode.checks"
LOAD_S = 5
"""Limit for loading one package's module."""


class _TooSlow(BaseException):
    """Raised when the limit is reached; a BaseException, so that the module does not catch it."""


def load_packages(registry: Registry) -> None:
    """Register the checks of every installed package; a package that cannot be loaded becomes a check that reports
    it."""
    loaded = registry.packages
    for point in entry_points(group=GROUP):
        origin = f"package {point.dist.name if point.dist else point.value}"
        if (point.name, point.value) in loaded:
            continue
        loaded.add((point.name, point.value))
        try:
            with registry.loading(origin) as ids:
                _load(point)
            reason = None if ids else f"{point.value} registers no check"
        except BaseException as err:
            if isinstance(err, KeyboardInterrupt):
                raise
            reason = f"it took more than {LOAD_S} s" if isinstance(err, _TooSlow) else f"{type(err).__name__}: {err}"
        if reason is not None:
            _broken(registry, point.name, origin, reason)


def _load(point: EntryPoint) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _limited():
        point.load()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LOAD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _broken(registry: Registry, name: str, origin: str, reason: str) -> None:
    """Register a check that reports that a package's checks are missing: silence would look like health."""
    words = one_line(reason, 300)
    safe = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-") or "package"

    def judge(_: NodeFacts) -> Iterator[CheckResult]:
        yield undetermined(f"the checks of {origin} could not be loaded: {words}")

    check_id = f"own.{safe}"
    if check_id not in registry:
        registry.check(
            check_id,
            category="host",
            means=f"The checks of {origin} are loaded.",
            remedy="Repair or remove the package; gpunode checks test FILE tests its checks.",
            state="none",
            actions=("none",),
        )(judge)
