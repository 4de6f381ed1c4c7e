"""Base class of the facts, and the conversion of a parser's values into a model."""

from typing import ClassVar, TypeVar

from pydantic import ConfigDict, ValidationError

from gpunode.facts.errors import ParseError
from gpunode.frozen import Frozen, invalid_field

FactT = TypeVar("FactT", bound="Fact")


class Fact(Frozen):
    """Base of all facts."""

    VOLATILE: ClassVar[frozenset[str]] = frozenset()
    """Fields that differ between two readings of an unchanged node: histories do not compare them."""
    COUNTERS: ClassVar[frozenset[str]] = frozenset()
    """Fields that count events: histories compute their growth, and do not compare them otherwise."""


class RareFact(Fact):
    """Base of facts that few runs read. Their validators are built with the first one, not at every start."""

    model_config = ConfigDict(defer_build=True)


def checked(model: type[FactT], values: object, output: str) -> FactT:
    """Return a parser's values as their model; raise ParseError if the output has a value of another type."""
    try:
        return model.model_validate(values)
    except ValidationError as err:
        place, why = invalid_field(err)
        raise ParseError(f"expected {output}, found a value of another type in {place}: {why}") from None
