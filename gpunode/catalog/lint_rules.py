"""What a rule of the linter is, what it is given, and the table of all rules."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from gpunode.catalog.catalog import Catalog
from gpunode.catalog.read import Key

Found = Iterator[tuple[Key, str] | tuple[Key, str, tuple[Key, ...]]]
"""What a rule yields: the place (section, id, field …), what is wrong there, and the places it was compared with."""
Rule = Callable[["Rows"], Found]

RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register a function as a rule of the linter."""

    def register(function: Rule) -> Rule:
        if name in RULES:
            raise ValueError(f"lint rule {name} is registered twice")
        RULES[name] = function
        return function

    return register


class Rows:
    """What rules see: all rows that fit their model, and the ids of those that do not."""

    def __init__(self, catalog: Catalog, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._catalog = catalog
        self._rows = rows
        self._ids: dict[str, Collection[str]] = {}

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self._rows[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def ids(self, section: str) -> Collection[str]:
        """Every id of a section, fitting or not: a reference to a broken row is no second fault."""
        if section not in self._ids:
            self._ids[section] = self._catalog.raw(section).keys()
        return self._ids[section]
