"""Holds the catalog, ours and a user's, against itself: shape, names, references, figures, dates.

Rules live in ``lint_names`` and ``lint_figures``; each has an id, and a test that breaks it alone.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpunode.catalog.catalog import MODELS, Catalog
from gpunode.catalog.read import Document, Key, Problem, dotted, place

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
        self._ids: dict[str, Iterable[str]] = {}

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self._rows[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def ids(self, section: str) -> Iterable[str]:
        """Every id of a section, fitting or not: a reference to a broken row is no second fault."""
        if section not in self._ids:
            self._ids[section] = self._catalog.raw(section).keys()
        return self._ids[section]


def lint(catalog: Catalog) -> list[Problem]:
    """Everything that is wrong, by file and line; an empty list is a sound catalog."""
    from gpunode.catalog import lint_bounds, lint_figures, lint_names  # noqa: F401, PLC0415 (they register their rules here)

    problems: list[Problem] = []
    documents: list[Document] = []
    for name in MODELS:
        documents += [document for document in catalog.documents(name) if document not in documents]
    for document in documents:
        problems += document.duplicates
        problems += _sections(document)
    rows = {}
    for name in MODELS:
        rows[name], wrong = catalog.validated(name)
        problems += wrong
    view = Rows(catalog, rows)
    for name, function in RULES.items():
        for key, what, *beside in function(view):
            problems.append(_blamed(catalog, name, key, what, beside[0] if beside else ()))
    return sorted(set(problems))


def _blamed(catalog: Catalog, name: str, key: Key, what: str, beside: Iterable[Key]) -> Problem:
    """A fault at the field that the user wrote: of fields compared with each other, the one that an overlay has."""
    written = (one for one in (key, *beside) if any(document.has(one) for document in catalog.overlays))
    at = next(written, key)
    file, line = place(catalog.documents(str(at[0])), at)
    return Problem(file, line, dotted(at), what if at == key else f"does not go with {dotted(key)}: {what}", name)


def _sections(document: Document) -> Iterator[Problem]:
    """Sections and defaults that exist and are mappings."""
    defaults = document.sections.get("defaults")
    asked: list[tuple[Key, Any]] = [((name,), value) for name, value in document.sections.items() if name != "defaults"]
    if isinstance(defaults, Mapping):
        asked += [(("defaults", name), value) for name, value in defaults.items() if name != "all"]
    elif "defaults" in document.sections:
        yield _problem(document, ("defaults",), "is a mapping from section to fields", "shape")
    for key, value in asked:
        if key[-1] not in MODELS:
            close = difflib.get_close_matches(str(key[-1]), [*MODELS, "defaults"], n=1)
            hint = f"did you mean {close[0]}" if close else f"known: {', '.join(MODELS)}"
            yield _problem(document, key, f"there is no such section, {hint}", "section")
        elif not isinstance(value, Mapping):
            yield _problem(document, key, "a section is a mapping from id to row", "shape")


def _problem(document: Document, key: Key, what: str, name: str) -> Problem:
    return Problem(document.name, document.line(key) or 1, dotted(key), what, name)
