"""Models of the facts, by topic, and their base: its classes, their declaration, and a parser's values as a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

from gpunode.facts.bundle_reader import BundleReader
from gpunode.facts.errors import ParseError
from gpunode.frozen import Frozen, invalid_field

FactT = TypeVar("FactT", bound="Fact")
ValueT = TypeVar("ValueT")


class Fact(Frozen):
    """Base of all facts. None has infinity or NaN, which would become null in its JSON."""

    model_config = ConfigDict(allow_inf_nan=False)

    VOLATILE: ClassVar[frozenset[str]] = frozenset()
    """Fields that differ between two readings of an unchanged node: histories do not compare them."""
    COUNTERS: ClassVar[frozenset[str]] = frozenset()
    """Fields that count events: histories compute their growth, and do not compare them otherwise."""


class RareFact(Fact):
    """Base of facts that few runs read. Their validators are built with the first one, not at every start."""

    model_config = ConfigDict(defer_build=True)


class FactArea(RareFact):
    """Base of the areas that make up NodeFacts. They have no objects of their own, so their validators are not
    built."""


@dataclass(frozen=True)
class FactSource:
    """How one fact of a node is read."""

    read: Callable[[BundleReader], Any]
    """It raises UnknownFactError or ParseError, with the reason, if it has no answer."""
    needs_root: bool
    """True if the fact is a gap without root."""
    volatile: bool
    """True if it differs between two readings of an unchanged node: histories do not compare it."""
    none_means: str | None
    """What None means if it is not a gap: ``Docker is not installed``; None: the reader never returns None."""

    def __call__(self, schema: JsonDict) -> None:
        """Add nothing to the field's JSON Schema: pydantic keeps the source of a field as its ``json_schema_extra``."""


def fact(
    read: Callable[[BundleReader], ValueT],
    *,
    needs_root: bool = False,
    volatile: bool = False,
    none_means: str | None = None,
) -> ValueT | None:
    """Return the declaration of a field of NodeFacts, which is None where it was not read: see ``FactSource``."""
    source = FactSource(read, needs_root=needs_root, volatile=volatile, none_means=none_means)
    return cast("ValueT | None", Field(default=None, json_schema_extra=source))


def checked(model: type[FactT], values: object, output: str) -> FactT:
    """Return a parser's values as their model; raise ParseError if the output has a value of another type."""
    try:
        return model.model_validate(values)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise ParseError(f"expected {output}, found a value of another type in {field}: {why}") from None
