"""Package names and version patterns for a candidate, from the catalog's rows."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gpunode.catalog import PackageSet
from gpunode.catalog.software import Pinning, System
from gpunode.stack.model import PackageChoice
from gpunode.stack.rules import CandidateCase

DRIVER_VARIANTS = ("headless", "compute", "full")
"""Variants of driver packages, the preferred one first: a server needs no X."""
OWN_VERSION = {"debian": ("nvidia-persistenced", "nvidia-modprobe"), "ubuntu": ("linux-*",)}
"""Packages in the rows of a driver that have versions of their own: helpers of Debian (tests/evidence/compat.yml,
debian_archive), and precompiled modules, which have their kernel's."""


def version_word(case: CandidateCase) -> str:
    """Return the release, or the shell pattern of releases if the repository decides it."""
    candidate = case.candidate
    return f"{candidate.branch.number}.*" if candidate.decided_by == "repository" else candidate.version


def any_revision(release: str) -> str:
    """Return apt's pattern of the versions of a release, or of a shell pattern of releases that ends with a star.

    apt drops a star at the end and compares the rest as text, in which an earlier star stands for itself.
    """
    return release if release.endswith("*") else f"{release}-*"


def upstream_pattern(case: CandidateCase, version: str) -> str:
    """Return the pattern of one upstream version: deb versions include a revision, rpm's version field does not."""
    return f"{version}-*" if case.candidate.system.family == "deb" else version


def applies(case: CandidateCase, row: PackageSet | Pinning) -> bool:
    """Return True if a row of names or of pinning applies to the case's system and branch."""
    return is_for(row, case.candidate.system, case.candidate.branch.number)


def is_for(row: PackageSet | Pinning, system: System, branch: int) -> bool:
    """Return True if a row of names or of pinning applies to a system and a branch."""
    return (
        row.family == system.family
        and (not row.systems or system.id in row.systems)
        and (row.first_branch is None or branch >= row.first_branch)
        and (row.last_branch is None or branch <= row.last_branch)
    )


def package_set(
    case: CandidateCase, component: str, variants: Sequence[str | None] = (None,), *, release: int | None = None
) -> PackageSet | None:
    """Return the row that names a component (in its own major ``release``); the first of ``variants`` that has one."""
    candidate = case.candidate
    origins = {"container-toolkit"} if component == "container-toolkit" else {candidate.source}
    if case.lacks(component):
        return None
    fitting = [
        row
        for row in case.question.catalog.packages.values()
        if row.component == component
        and row.origin in origins
        and row.release == release
        and applies(case, row)
        and row.flavour in (None, candidate.flavour)
        and candidate.arch in row.arches
    ]
    by_variant = {row.variant: row for row in reversed(fitting)}
    return next((by_variant[variant] for variant in variants if variant in by_variant), None)


def fill(case: CandidateCase, template: str, *, cuda: str = "", kernel: str = "") -> str:
    """Return a name or version template with this case's values; ``cuda`` is a series (``13.0``)."""
    return template.format(
        branch=case.candidate.branch.number,
        version=version_word(case),
        cuda=cuda.replace(".", "-"),
        cuda_major=cuda.split(".", maxsplit=1)[0],
        kernel=kernel,
    )


def alternatives(template: str) -> tuple[str, ...]:
    """Return the names in a row's entry (``a | b``): the first one that exists is installed."""
    return tuple(name.strip() for name in template.split("|"))


def choices(
    case: CandidateCase, row: PackageSet, *, cuda: str = "", kernel: str = "", version: str | None = None
) -> tuple[PackageChoice, ...]:
    """Return a row's packages for this case; ``version`` replaces the row's pattern."""
    pattern = version if version is not None else row.version
    chosen = []
    for template in row.names:
        name, *others = alternatives(fill(case, template, cuda=cuda, kernel=kernel))
        own_version = any(fnmatchcase(name, glob) for glob in OWN_VERSION.get(case.candidate.source, ()))
        chosen.append(
            PackageChoice(
                name=name,
                version=None if pattern is None or own_version else fill(case, pattern, cuda=cuda),
                component=row.component,
                alternatives=tuple(others),
                with_driver=row.with_driver and not own_version,
            )
        )
    return tuple(chosen)
