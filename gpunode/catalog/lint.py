"""Linter of the catalog and a user's overlays: shape, names, references, figures, dates.

Rules are in ``lint_bounds``, ``lint_figures`` and ``lint_names``; each has an id, and a test that violates only this
rule.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpunode.catalog import lint_bounds, lint_figures, lint_names  # noqa: F401 (they register their rules)
from gpunode.catalog.catalog import MODELS, Catalog
from gpunode.catalog.lint_rules import RULES, Rows
from gpunode.catalog.read import Document, Key, Problem, dotted, place
from gpunode.text import suggestion


def lint(catalog: Catalog) -> list[Problem]:
    """Return all problems, by file and line; an empty list is a valid catalog."""
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
    """Return a problem at the field that the user wrote: of compared fields, the one that an overlay sets."""
    written = (one for one in (key, *beside) if any(document.has(one) for document in catalog.overlays))
    at = next(written, key)
    file, line = place(catalog.documents(str(at[0])), at)
    return Problem(file, line, dotted(at), what if at == key else f"conflicts with {dotted(key)}: {what}", name)


def _sections(document: Document) -> Iterator[Problem]:
    """Yield the problems of sections and defaults that are unknown or are not mappings."""
    defaults = document.sections.get("defaults")
    asked: list[tuple[Key, Any]] = [((name,), value) for name, value in document.sections.items() if name != "defaults"]
    if isinstance(defaults, Mapping):
        asked += [(("defaults", name), value) for name, value in defaults.items() if name != "all"]
    elif "defaults" in document.sections:
        yield _problem(document, ("defaults",), "is a mapping from section to fields", "shape")
    for key, value in asked:
        if key[-1] not in MODELS:
            yield _problem(
                document, key, f"unknown section; {suggestion(str(key[-1]), [*MODELS, 'defaults'])}", "section"
            )
        elif not isinstance(value, Mapping):
            yield _problem(document, key, "a section is a mapping from id to row", "shape")


def _problem(document: Document, key: Key, what: str, name: str) -> Problem:
    return Problem(document.name, document.line(key) or 1, dotted(key), what, name)
