"""Rules about names: references resolve, names are unique, package look-ups have one answer."""

import string
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from gpunode.catalog.gpus import normal
from gpunode.catalog.lint_rules import Found, Rows, rule
from gpunode.catalog.read import Key
from gpunode.catalog.software import OriginOffer, PackageSet, Pinning
from gpunode.catalog.typed import no_such
from gpunode.text import did_you_mean, nearest, suggestion

TEMPLATE_WORDS = {"branch", "version", "cuda", "cuda_major", "kernel"}
"""Words that are allowed in braces in a package name or version."""


def _missing(rows: Rows, section: str, what: str, references: Iterable[tuple[Key, Any]]) -> Found:
    known = rows.ids(section)
    for key, value in references:
        if value is not None and str(value) not in known:
            yield key, no_such(what, value, known)


@rule("source-known")
def sources(rows: Rows) -> Found:
    """Check that a row's source is a key of ``sources``."""
    for section in rows:
        for row in rows[section].values():
            named = getattr(row, "source", ())
            yield from _missing(rows, "sources", "source", (((section, row.id, "source"), name) for name in named))


@rule("unsure-field")
def unsure(rows: Rows) -> Found:
    """Check that ``unsure`` names fields of the row."""
    for section in rows:
        for row in rows[section].values():
            for name in getattr(row, "unsure", {}):
                if name.split(".", maxsplit=1)[0] not in type(row).model_fields:
                    hint = did_you_mean(nearest(name, type(row).model_fields))
                    yield (section, row.id, "unsure", name), f"is not a field of the row{hint and f'; {hint}'}"


@rule("reference")
def references(rows: Rows) -> Found:
    """Check that each reference names a row that exists."""
    yield from _missing(rows, "architectures", "architecture", _architectures(rows))
    yield from _missing(rows, "branches", "driver branch", [*_branches(rows), *_offered(rows)])
    yield from _missing(rows, "cuda_majors", "CUDA major", _cuda_majors(rows))
    yield from _missing(rows, "systems", "operating system", _systems(rows))
    yield from _missing(rows, "gpus", "GPU model", _gpus(rows))
    boards = ((("platforms", row.id, "board"), row.board) for row in rows["platforms"].values())
    places = ((("expectations", row.id, "platform"), row.platform) for row in rows["expectations"].values())
    yield from _missing(rows, "platforms", "platform", [*boards, *places])
    switches = ((("platforms", row.id, "nvswitch"), row.nvswitch) for row in rows["platforms"].values())
    yield from _missing(rows, "pci_parts", "PCI function", switches)
    follow = ((("xids", row.id, "follow"), name) for row in rows["xids"].values() for name in row.follow)
    yield from _missing(rows, "xids", "Xid", follow)


References = Iterator[tuple[Key, Any]]


def _architectures(rows: Rows) -> References:
    for row in rows["gpus"].values():
        yield ("gpus", row.id, "architecture"), row.architecture
    for row in rows["branches"].values():
        yield ("branches", row.id, "oldest_architecture"), row.oldest_architecture


def _branches(rows: Rows) -> References:
    for section, field in (
        ("architectures", "last_branch"),
        ("gpus", "last_branch"),
        ("branches", "superseded_by"),
        ("cuda_majors", "branch"),
        ("xids", "recovery_reported_since"),
    ):
        for row in rows[section].values():
            yield (section, row.id, field), getattr(row, field)
    for row in rows["toolkits"].values():
        # Before minor-version compatibility a toolkit named one driver, often of a branch without a row.
        if row.floor is None or row.floor != row.driver:
            yield ("toolkits", row.id, "branch"), row.branch
    for row in rows["forward_compat"].values():
        for field in ("works_on", "needless_on", "refused_on"):
            for branch in getattr(row, field):
                yield ("forward_compat", row.id, field), branch
    for row in rows["gpus"].values():
        for branch in row.first_listed:
            yield ("gpus", row.id, "first_listed"), branch


def _offered(rows: Rows) -> References:
    for row in rows["systems"].values():
        for origin, offer in row.origins.items():
            for branch in (*offer.transitional, *offer.transitional.values(), *offer.branches):
                yield ("systems", row.id, "origins", origin, "branches"), branch


def _cuda_majors(rows: Rows) -> References:
    for row in rows["toolkits"].values():
        yield ("toolkits", row.id), row.major
    for section, field in (("cudnn", "builds"), ("nccl", "cuda_majors")):
        for row in rows[section].values():
            for major in getattr(row, field):
                yield (section, row.id, field), major


def _systems(rows: Rows) -> References:
    for section in ("packages", "pinning", "kernel_flavours", "dcgm"):
        for row in rows[section].values():
            for name in row.systems:
                yield (section, row.id, "systems"), name


def _gpus(rows: Rows) -> References:
    for row in rows["platforms"].values():
        for name in row.gpus:
            yield ("platforms", row.id, "gpus", name), name
    for row in rows["expectations"].values():
        yield ("expectations", row.id, "gpu"), row.gpu


@rule("name-once")
def names(rows: Rows) -> Found:
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
                    what = f"the family {text!r} is the name of {owner[normal(text)]} alone"
                    yield (section, row.id, "families"), what


@rule("shared-id")
def shared_ids(rows: Rows) -> Found:
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


@rule("template")
def templates(rows: Rows) -> Found:
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


@rule("found-once")
def found_once(rows: Rows) -> Found:
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


@rule("branch-order")
def branch_order(rows: Rows) -> Found:
    """Check that a range of branches starts before it ends."""
    bounded: list[tuple[Key, OriginOffer | PackageSet | Pinning]] = [
        ((section, row.id), row) for section in ("packages", "pinning") for row in rows[section].values()
    ]
    for row in rows["systems"].values():
        bounded += [(("systems", row.id, "origins", name), offer) for name, offer in row.origins.items()]
    for key, item in bounded:
        if item.first_branch is not None and item.last_branch is not None and item.first_branch > item.last_branch:
            yield (*key, "last_branch"), f"{item.last_branch} is before first_branch, {item.first_branch}"
