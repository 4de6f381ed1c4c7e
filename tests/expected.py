"""Expected values of a JSON answer by their paths, as tests/captures/facts.yml describes them."""

import re
from typing import Any

_FILTER = re.compile(r"\[(\w+)=(.*)\]")


def at(value: Any, path: str) -> Any:
    """What stands at a path of facts.yml; raises LookupError or TypeError where there is no such place."""
    for step in path.split("/"):
        selection = _FILTER.fullmatch(step)
        if step == "#":
            return len(value)
        if step.startswith("*"):
            rest = path.split("*/", 1)[1]
            return [at(element, rest) for element in value]
        if step.startswith("+"):
            value = [inner for element in value for inner in element[step[1:]]]
        elif selection:
            value = [element for element in value if _has(element[selection[1]], selection[2])]
        elif isinstance(value, list):
            value = value[int(step)]
        else:
            value = value[step]
    return value


def _has(value: Any, text: str) -> bool:
    return text in map(str, value) if isinstance(value, list) else str(value) == text


def wrong(answer: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """One line for each fact that the answer does not have."""
    lines = []
    for path, expected in facts.items():
        try:
            actual = at(answer, path)
        except (LookupError, TypeError, ValueError) as err:
            lines.append(f"{path}: expected {expected!r}, found no such place: {err!r}")
            continue
        if actual != expected or isinstance(actual, bool) is not isinstance(expected, bool):
            lines.append(f"{path}: expected {expected!r}, found {actual!r}")
    return lines


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value} "
    if isinstance(value, list) and value:
        return [changed(value[0]), *value[1:]]
    if isinstance(value, dict) and value:
        first = next(iter(value))
        return value | {first: changed(value[first])}
    return "something" if value is None else None
