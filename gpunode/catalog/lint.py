"""Verify an overlay against the catalog: its shape, its references, names and look-ups with one answer.

These are the faults with which a run would end in the middle or take another row. Figures, dates and bounds of the
catalog itself are verified by ``scripts/catalog_lint.py``, which adds its rules to ``RULES``.
"""

import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from gpunode.catalog.catalog import MODELS, Catalog
from gpunode.catalog.gpus import normal
from gpunode.catalog.read import Document, Key, Problem, dotted, location_of
from gpunode.catalog.rows import no_such
from gpunode.catalog.software import PackageSet, Pinning
from gpunode.text import suggestion

Found = Iterator[tuple[Key, str] | tuple[Key, str, tuple[Key, ...]]]
"""Yielded by a rule: the location (section, id, field …), the problem, and the locations it was compared with."""
TEMPLATE_WORDS = {"branch", "version", "cuda", "cuda_major", "kernel"}
"""Words that are allowed in braces in a package name or version."""
REFERENCES = (
    ("gpus", "architecture", "architectures", "architecture"),
    ("branches", "oldest_architecture", "architectures", "architecture"),
    *((section, "last_branch", "branches", "driver branch") for section in ("architectures", "gpus")),
    ("gpus", "first_listed", "branches", "driver branch"),
    ("branches", "superseded_by", "branches", "driver branch"),
    ("cuda_majors", "branch", "branches", "driver branch"),
    ("xids", "recovery_reported_since", "branches", "driver branch"),
    *(("forward_compat", f"{verb}_on", "branches", "driver branch") for verb in ("works", "needless", "refused")),
    ("toolkits", "major", "cuda_majors", "CUDA major"),
    ("cudnn", "builds", "cuda_majors", "CUDA major"),
    ("nccl", "cuda_majors", "cuda_majors", "CUDA major"),
    *(
        (section, "systems", "systems", "operating system")
        for section in ("packages", "pinning", "kernel_flavours", "dcgm")
    ),
    ("platforms", "gpus", "gpus", "GPU model"),
    ("platforms", "board", "platforms", "platform"),
    ("platforms", "nvswitch", "pci_parts", "PCI function"),
    ("expectations", "gpu", "gpus", "GPU model"),
    ("expectations", "platform", "platforms", "platform"),
    ("xids", "follow", "xids", "Xid"),
)
"""Fields that name rows of a section: one name, a list of them, or a mapping with names as keys."""


class Rows:
    """Input of the rules: all valid rows, and the ids of the others."""

    def __init__(self, catalog: Catalog, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._catalog = catalog
        self._rows = rows

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self._rows[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def ids(self, section: str) -> Collection[str]:
        """Return every id of a section, valid or not: a reference to an invalid row is not a second problem."""
        return self._catalog.raw(section).keys()


def lint(catalog: Catalog, rules: Mapping[str, Callable[[Rows], Found]] | None = None) -> list[Problem]:
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
    for name, function in (RULES if rules is None else rules).items():
        for key, message, *beside in function(view):
            problems.append(_blamed(catalog, name, key, message, beside[0] if beside else ()))
    return sorted(set(problems))


def _blamed(catalog: Catalog, name: str, key: Key, message: str, beside: Iterable[Key]) -> Problem:
    """Return a problem at the field that the user wrote: of compared fields, the one that an overlay sets."""
    written = (field for field in (key, *beside) if any(document.has(field) for document in catalog.overlays))
    at = next(written, key)
    file, line = location_of(catalog.documents(str(at[0])), at)
    return Problem(file, line, dotted(at), message if at == key else f"conflicts with {dotted(key)}: {message}", name)


def _sections(document: Document) -> Iterator[Problem]:
    """Yield the problems of sections and defaults that are unknown or are not mappings."""
    defaults = document.sections.get("defaults")
    sections: list[tuple[Key, Any]] = [
        ((name,), value) for name, value in document.sections.items() if name != "defaults"
    ]
    if isinstance(defaults, Mapping):
        sections += [(("defaults", name), value) for name, value in defaults.items() if name != "all"]
    elif "defaults" in document.sections:
        yield _problem(document, ("defaults",), "is a mapping from section to fields", "shape")
    for key, value in sections:
        if key[-1] not in MODELS:
            yield _problem(
                document, key, f"unknown section; {suggestion(str(key[-1]), [*MODELS, 'defaults'])}", "section"
            )
        elif not isinstance(value, Mapping):
            yield _problem(document, key, "a section is a mapping from id to row", "shape")


def _problem(document: Document, key: Key, message: str, name: str) -> Problem:
    return Problem(document.name, document.line(key) or 1, dotted(key), message, name)


def _sources(rows: Rows) -> Found:
    """Check that a row's source is a key of ``sources``."""
    for section in rows:
        for row in rows[section].values():
            named = getattr(row, "source", ())
            yield from _missing(rows, "sources", "source", (((section, row.id, "source"), name) for name in named))


def _references(rows: Rows) -> Found:
    """Check that each reference names a row that exists."""
    for section, field, parents, kind in REFERENCES:
        for row in rows[section].values():
            yield from _missing(rows, parents, kind, _named((section, row.id, field), getattr(row, field)))
    for row in rows["toolkits"].values():
        # Before minor-version compatibility a toolkit named one driver, often of a branch without a row.
        if row.floor is None or row.floor != row.driver:
            yield from _missing(rows, "branches", "driver branch", [(("toolkits", row.id, "branch"), row.branch)])
    for row in rows["systems"].values():
        for origin, offer in row.origins.items():
            key = ("systems", row.id, "origins", origin, "branches")
            named = (*offer.transitional, *offer.transitional.values(), *offer.branches)
            yield from _missing(rows, "branches", "driver branch", ((key, branch) for branch in named))


def _named(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the names in a field, each with its location."""
    if isinstance(value, Mapping):
        yield from (((*key, name), name) for name in value)
    else:
        yield from ((key, name) for name in (value if isinstance(value, tuple) else (value,)))


def _missing(rows: Rows, section: str, kind: str, references: Iterable[tuple[Key, Any]]) -> Found:
    known = rows.ids(section)
    for key, value in references:
        if value is not None and str(value) not in known:
            yield key, no_such(kind, value, known)


def _names(rows: Rows) -> Found:
    """Check that a name, alias or product name means one thing, and that a family's name belongs to no single model.

    Product names are a separate namespace: ``NVIDIA H200`` is one model, ``H200`` a family.
    """
    for section in ("gpus", "platforms", "systems"):
        owner: dict[str, str] = {}
        products: dict[str, str] = {}
        for row in rows[section].values():
            aliases = (("aliases", normal(text), text) for text in row.aliases)
            for field, key, text in [("name", normal(row.id), row.id), ("name", normal(row.name), row.name), *aliases]:
                if owner.setdefault(key, row.id) != row.id:
                    yield (section, row.id, field), f"{text!r} is what {owner[key]} is called"
            for text in getattr(row, "product_names", ()):
                if products.setdefault(text.lower(), row.id) != row.id:
                    yield (section, row.id, "product_names"), f"{text!r} is what {products[text.lower()]} prints"
        for row in rows[section].values():
            for text in getattr(row, "families", ()):
                if normal(text) in owner:
                    message = f"the family {text!r} is the name of {owner[normal(text)]} alone"
                    yield (section, row.id, "families"), message


def _shared_ids(rows: Rows) -> Found:
    """Check that GPUs with one device id have distinct subsystems: all of them, or all but one."""
    holders: dict[str, list[Any]] = {}
    for row in rows["gpus"].values():
        for pci in row.pci:
            holders.setdefault(pci, []).append(row)
    for pci, held in holders.items():
        bare = [row for row in held if not row.subsystems]
        for row in bare[1:]:
            yield ("gpus", row.id, "pci"), f"{pci} is {bare[0].id}'s too: a subsystem must distinguish them"
        for first, second in combinations(held, 2):
            for subsystem in set(first.subsystems) & set(second.subsystems):
                yield ("gpus", second.id, "subsystems"), f"{pci} with subsystem {subsystem} is {first.id}'s already"


def _template_words(rows: Rows) -> Found:
    """Check that braces in package names and versions contain known words."""
    for section, row, field, text in _templates(rows):
        try:
            words = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        except ValueError:
            yield (section, row.id, field), f"{text!r}: a brace is open"
            continue
        for word in sorted(words - TEMPLATE_WORDS):
            yield (section, row.id, field), f"unknown {{{word}}}; {suggestion(word, sorted(TEMPLATE_WORDS))}"


def _templates(rows: Rows) -> Iterator[tuple[str, Any, str, str]]:
    for row in rows["packages"].values():
        yield from (("packages", row, "names", text) for text in row.names)
        yield from (
            ("packages", row, field, getattr(row, field)) for field in ("version", "stream") if getattr(row, field)
        )
    for row in rows["pinning"].values():
        if row.pattern:
            yield "pinning", row, "pattern", row.pattern
    for row in rows["kernel_flavours"].values():
        yield from (("kernel_flavours", row, "modules", text) for text in row.modules.values())


def _found_once(rows: Rows) -> Found:
    """Check that every look-up of packages or pinning has one answer at most."""
    for section in ("packages", "pinning"):
        for first, second in combinations(rows[section].values(), 2):
            if _same_question(first, second) and _meet(first, second):
                yield (section, second.id), f"answers the same question as {first.id}"


def _same_question(first: PackageSet | Pinning, second: PackageSet | Pinning) -> bool:
    fields = ("origin", "family", "component", "release", "variant")
    same = all(getattr(first, field, None) == getattr(second, field, None) for field in fields)
    flavours = {getattr(first, "flavour", None), getattr(second, "flavour", None)}
    arches = set(getattr(first, "arches", ("any",))) & set(getattr(second, "arches", ("any",)))
    return same and bool(arches) and (len(flavours) == 1 or None in flavours)


def _meet(first: PackageSet | Pinning, second: PackageSet | Pinning) -> bool:
    if first.systems and second.systems and not set(first.systems) & set(second.systems):
        return False
    low = max(first.first_branch or 0, second.first_branch or 0)
    return low <= min(first.last_branch or 10**6, second.last_branch or 10**6)


RULES: Mapping[str, Callable[[Rows], Found]] = {
    "source-known": _sources,
    "reference": _references,
    "name-once": _names,
    "shared-id": _shared_ids,
    "template": _template_words,
    "found-once": _found_once,
}
