"""Conversion of text to typed rows, with error messages for the authors of catalog files."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpunode.catalog.read import Document, Key, Problem, dotted, location_of
from gpunode.text import did_you_mean, nearest, suggestion

R = TypeVar("R", bound=BaseModel)

UNITS = {
    "_gb_per_s": "GB/s (10^9 bytes)",
    "_gbit_per_s": "Gbit/s",
    "_gb": "GB (10^9 bytes)",
    "_mib": "MiB",
    "_w": "W",
    "_mhz": "MHz",
    "_bytes": "bytes",
}
"""Unit by the end of a key; the longest match applies."""
_UNIT = re.compile(r"_(([kmgt]i?b(it)?|bytes?)(_per_s|ps|s)?|m?w|[kmg]?hz|watts?|[kmgt]?flops)$")


def no_such(kind: str, name: str | int, known: Iterable[str]) -> str:
    """Return ``unknown architecture 'hoper'; did you mean hopper?``."""
    return "; ".join(filter(None, (f"unknown {kind} {name!r}", did_you_mean(nearest(str(name), known)))))


def unit_of(key: str) -> str | None:
    """Return the unit in a key's name."""
    return next((unit for end, unit in UNITS.items() if key.endswith(end)), None)


def typed_row(
    model: type[R], key: str, fields: Any, section: str, documents: Sequence[Document]
) -> tuple[R | None, list[Problem]]:
    """Return one typed row, or all its problems."""

    def problem(where: Key, message: str, rule: str) -> Problem:
        file, line = location_of(documents, where)
        return Problem(file, line, dotted(where), message, rule)

    if not isinstance(fields, Mapping):
        return None, [problem((section, key), "a row is a mapping of fields", "shape")]
    if "id" in fields:
        return None, [problem((section, key, "id"), "the id is the row's key, not a field", "value")]
    try:
        return model.model_validate({**fields, "id": key}), []
    except ValidationError as err:
        problems = []
        for error in err.errors(include_url=False):
            where = _where((section, key), error["loc"])
            message, rule = _message(model, error)
            problems.append(problem(where, message, rule))
        return None, problems


def _where(above: Key, loc: Sequence[int | str]) -> Key:
    if tuple(loc) == ("id",):
        return above
    return (*above, *(part for part in loc if part != "[key]" and not str(part).startswith(("function-", "literal["))))


def _message(model: type[BaseModel], error: ErrorDetails) -> tuple[str, str]:
    kind, content = error["type"], error["input"]
    names = [str(part) for part in error["loc"] if isinstance(part, str) and part != "[key]"]
    key = names[-1] if names else ""
    if kind == "extra_forbidden":
        return _unknown(key, _fields(model, error["loc"][:-1]))
    if kind == "missing":
        return "is missing", "missing-key"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        hint = did_you_mean(nearest(str(content), known))
        return f"{content!r} is not one of {', '.join(known)}{hint and f'; {hint}'}", "value"
    if kind in ("int_parsing", "float_parsing", "int_type", "float_type", "int_from_float"):
        expected = "a whole number" if kind.startswith("int") else "a number"
        unit = unit_of(key)
        rule = "unit" if unit and re.search(r"\d\s*[A-Za-z]", str(content)) else "value"
        return f"expected {expected}{f' in {unit}' if unit else ''}, found {content!r}", rule
    if kind in ("tuple_type", "list_type"):
        return f"expected a list{'' if isinstance(content, Mapping) else f': [{content}]'}", "value"
    if kind in ("dict_type", "mapping_type", "model_type", "model_attributes_type"):
        return f"expected a mapping of keys, found {content!r}", "value"
    if kind == "string_type":
        return f"expected text, found {content!r}", "value"
    if kind == "too_short":
        return "expected at least one", "value"
    if kind == "bool_parsing":
        return f"expected true or false, found {content!r}", "value"
    if kind == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        rule = "date" if "day" in message or "date" in message else "value"
        return f"{message}; {content!r} found" if str(content) not in message else message, rule
    return f"{error['msg'][0].lower()}{error['msg'][1:]}", "value"


def _fields(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Return the keys of the model at this location."""
    level = model
    for part in loc:
        if part in level.model_fields:
            level = _model_in(level.model_fields[str(part)].annotation) or level
    return [name for name in level.model_fields if name != "id"]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(part) for part in getattr(annotation, "__args__", ()))
    return next((model for model in inner if model), None)


def _unknown(key: str, known: Sequence[str]) -> tuple[str, str]:
    stem = _UNIT.sub("", key)
    if stem != key:
        same = [name for name in known if _UNIT.sub("", name) == stem]
        if same:
            return f"wrong unit: this is stored in {unit_of(same[0])}, as {same[0]}", "unit"
    return f"unknown key; {suggestion(key, known, likeness=0.5)}", "key"
