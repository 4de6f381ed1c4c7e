"""Rows of the catalog: their common fields, and their conversion from text, with error messages for the authors.

Common are the source of a fact, the date of its check, its certainty. Numbers have their unit in the key
(``memory_gb``; GB is 10^9 bytes). Versions are text and compare as ``packaging.version.Version``. An unknown value is
None, never 0 or a guess.
"""

import calendar
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from gpunode.catalog.read import Document, Key, Problem, dotted, location_of
from gpunode.frozen import Frozen
from gpunode.text import did_you_mean, nearest, suggestion

Confidence = Literal["sure", "derived", "unsure"]
"""``derived``: inferred from other facts. ``unsure``: sources conflict, or none was read. Both warn, and never
refuse."""
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


@lru_cache(maxsize=4096)
def last_day(when: str) -> date:
    """Return the last day that a date of any precision covers: ``2028-06`` is 2028-06-30."""
    year, month, day = ([int(part) for part in when.split("-")] + [0, 0])[:3]
    month = month or 12
    return date(year, month, day or calendar.monthrange(year, month)[1])


@lru_cache(maxsize=4096)
def first_day(when: str) -> date:
    """Return the first day that a date of any precision covers: ``2028-06`` is 2028-06-01."""
    year, month, day = ([int(part) for part in when.split("-")] + [1, 1])[:3]
    return date(year, month, day)


def _when(text: str) -> str:
    if not re.fullmatch(r"[12]\d{3}(-\d\d){0,2}", text):
        raise ValueError("expected a date: YYYY-MM-DD, YYYY-MM or YYYY")
    try:
        last_day(text)
    except ValueError:
        raise ValueError(f"no such day:  {text}") from None
    return text


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise ValueError("expected a version: numbers and dots")
    return text


def _number(text: str) -> str:
    if not re.fullmatch(r"\d{1,6}", text):
        raise ValueError("the id of this section is a number")
    return text


def _pci(text: str) -> str:
    text = text.lower()
    if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", text):
        raise ValueError("expected a PCI id: vendor:device, four hex digits each (example: 10de:2330)")
    return text


def _capability(text: str) -> str:
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise ValueError("expected a compute capability (example: 9.0)")
    return text


def _digest(text: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise ValueError("expected the digest of an image (example: sha256: and 64 hex digits)")
    return text


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


When = Annotated[str, AfterValidator(_when)]
"""A date with the precision of its source: ``2026-08-03``, ``2026-08`` or ``2026``."""
Version = Annotated[str, AfterValidator(_version)]
NumberId = Annotated[str, AfterValidator(_number)]
"""The id of a row with a numeric name: a branch, a CUDA major, an Xid."""
PciId = Annotated[str, AfterValidator(_pci)]
"""``10de:2330``, lower case."""
ImageDigest = Annotated[str, AfterValidator(_digest)]
Capability = Annotated[str, AfterValidator(_capability)]
"""CUDA compute capability: ``9.0``."""
Words = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
"""A list of texts; a single text is a list of one."""


class Part(Frozen):
    """A group of fields inside a row. Its validator is built with the first row."""

    model_config = ConfigDict(defer_build=True)


class Row(Part):
    """One entry of the catalog."""

    id: str
    """The row's key in its section; other rows and the command line use it."""
    source: Annotated[Words, Field(min_length=1)]
    """Keys of the section ``sources``."""
    date: When
    """The date on which the row was last checked against its sources."""
    confidence: Confidence = "sure"
    unsure: Mapping[str, str] = {}
    """Fields that are less certain than the row, with the reason."""
    note: str | None = None

    def sure(self, field: str | None = None) -> bool:
        """Return True if the row, and this field of it, may cause a refusal and not only a warning."""
        return self.confidence == "sure" and (field is None or field not in self.unsure)


class Source(Part):
    """A document or a file from which facts are taken."""

    id: str
    title: str
    url: str | None = None
    date: str | None = None
    """In the source's own form: a date, an edition, a range."""


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
