"""Common fields of all rows of the catalog: the source of a fact, the date of its check, its certainty.

Numbers have their unit in the key (``memory_gb``; GB is 10^9 bytes). Versions are text and compare as
``packaging.version.Version``. An unknown value is None, never 0 or a guess.
"""

import calendar
import re
from collections.abc import Mapping
from datetime import date
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from gpunode.frozen import Frozen

Confidence = Literal["sure", "derived", "unsure"]
"""``derived``: inferred from other facts. ``unsure``: sources conflict, or none was read. Both warn, and never
refuse."""


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
