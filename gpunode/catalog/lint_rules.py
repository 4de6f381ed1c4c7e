"""Types of the linter's rules, and the table of all rules."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from gpunode.catalog.catalog import Catalog
from gpunode.catalog.read import Key

Found = Iterator[tuple[Key, str] | tuple[Key, str, tuple[Key, ...]]]
"""Yielded by a rule: the location (section, id, field …), the problem, and the locations it was compared with."""
Rule = Callable[["Rows"], Found]

RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as a rule of the linter."""

    def register(function: Rule) -> Rule:
        if name in RULES:
            raise ValueError(f"lint rule {name} is registered twice")
        RULES[name] = function
        return function

    return register


class Rows:
    """Input of the rules: all valid rows, and the ids of the others."""

    def __init__(self, catalog: Catalog, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._catalog = catalog
        self._rows = rows
        self._ids: dict[str, Collection[str]] = {}

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self._rows[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def ids(self, section: str) -> Collection[str]:
        """Return every id of a section, valid or not: a reference to an invalid row is not a second problem."""
        if section not in self._ids:
            self._ids[section] = self._catalog.raw(section).keys()
        return self._ids[section]
