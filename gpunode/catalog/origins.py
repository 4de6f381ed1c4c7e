"""Publishers of driver packages, and the packages that belong to one driver closure.

The facts are rows of ``origins.yml``, each with its source. Names of origins are those of that file: ``debian``,
``ubuntu``, ``nvidia`` …; an origin without a row is None.
"""

import datetime
import re
from functools import cache
from importlib.resources import files as resource_files
from typing import Annotated

import yaml
from pydantic import AfterValidator, ConfigDict

from gpunode.frozen import Frozen
from gpunode.text import matches_any
from gpunode.yaml_file import LOADER

"""Several times as fast where PyYAML has libyaml."""


def _compiles(pattern: str) -> str:
    re.compile(pattern)
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


class EvidencedRow(Frozen):
    """Base of all rows, with evidence."""

    model_config = ConfigDict(defer_build=True)

    source: str
    date: datetime.date


class OriginRow(EvidencedRow):
    """Patterns that together identify one origin; a pattern that is None is ignored."""

    origin: str
    maintainer: Pattern | None = None
    version: Pattern | None = None
    package: Pattern | None = None

    def matches(self, name: str, version: str, maintainer: str) -> bool:
        """Return True if every pattern of the row matches its field."""
        looked_at = ((self.package, name), (self.version, version), (self.maintainer, maintainer))
        return all(pattern is None or re.search(pattern, text) for pattern, text in looked_at)


class ClosureRow(EvidencedRow):
    """Packages of one origin that have one version."""

    origin: str
    line: str
    sources: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    except_: tuple[str, ...] = ()

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    def line_of(self, name: str, source: str) -> str | None:
        """Return the line that the package belongs to; None if the row does not contain it."""
        if matches_any(name, self.except_):
            return None
        if matches_any(source, self.sources) or matches_any(name, self.packages):
            return self.line.format(source=source)
        return None


class PackagesRow(EvidencedRow):
    """Packages by shell patterns of their names."""

    packages: tuple[str, ...]


class RepositoryRow(EvidencedRow):
    """A repository, by the fields of its Release file; a pattern that is None is ignored."""

    origin: str
    release: Pattern
    label: Pattern | None = None


class RepositoryKey(EvidencedRow):
    """The key of one of NVIDIA's repositories; a value that was not recorded is None."""

    file: str
    """File name, in the folder of the packages."""
    fingerprint: str | None
    sha256_without_version: str | None = None
    """Of the file without its Version line."""


class Origins(Frozen):
    """The content of the whole file."""

    repositories: tuple[RepositoryRow, ...]
    signing_keys: dict[str, RepositoryKey]
    origins: tuple[OriginRow, ...]
    closures: tuple[ClosureRow, ...]
    companions: PackagesRow
    kernel_module_packages: PackagesRow


@cache
def table() -> Origins:
    """Return the content of ``origins.yml``, read once."""
    text = resource_files("gpunode.catalog").joinpath("origins.yml").read_text(encoding="utf-8")
    return Origins.model_validate(yaml.load(text, Loader=LOADER))  # noqa: S506 (a safe one)


def origin_of(name: str, version: str, maintainer: str) -> str | None:
    """Return the origin of a package by its Maintainer and version; None if no row matches."""
    return next((row.origin for row in table().origins if row.matches(name, version, maintainer)), None)


def publisher(release: str, label: str) -> str | None:
    """Return the origin that a repository's Release file (its Origin and Label) belongs to; None for an unknown one."""
    rows = (row for row in table().repositories if re.search(row.release, release))
    return next((row.origin for row in rows if row.label is None or re.search(row.label, label)), None)


def is_companion(name: str) -> bool:
    """Return whether a package of a closure may be installed without a driver."""
    return matches_any(name, table().companions.packages)


def signing_key(folder: str) -> RepositoryKey | None:
    """Return the key of a repository; None without a fingerprint or checksum: neither https nor the 32 bits in the name
    of its file show that a key is NVIDIA's.
    """
    row = table().signing_keys.get(folder)
    return row if row is not None and (row.fingerprint or row.sha256_without_version) else None


def closure_line(name: str, source: str, origin: str | None) -> str | None:
    """Return the closure of a package, by the name of its line; None if the package may have a version of its own.

    ``origin`` None: the publisher is unknown; a package that belongs to the closure of any origin then belongs to a
    line called ``unknown origin``.
    """
    if origin is None:
        known = any(row.line_of(name, source) for row in table().closures)
        return "unknown origin" if known else None
    rows = (row for row in table().closures if row.origin == origin)
    return next((line for row in rows if (line := row.line_of(name, source))), None)


def closure_patterns(origin: str) -> dict[str, list[str]]:
    """Return the shell patterns of names (``names``, without those of ``except``) that have the driver's version."""
    rows = [row for row in table().closures if row.origin == origin]
    return {
        "names": [pattern for row in rows for pattern in row.packages],
        "except": [pattern for row in rows for pattern in row.except_],
    }


def brings_kernel_module(name: str) -> bool:
    """Return True for a package that installs or builds a kernel module."""
    return matches_any(name, table().kernel_module_packages.packages)


def upstream_version(version: str) -> str:
    """Return a package's version without epoch and distribution revision: ``1:535.261.03-1~deb12u1`` is
    ``535.261.03``."""
    without_epoch = version.split(":", 1)[-1]
    return without_epoch.rsplit("-", 1)[0] if "-" in without_epoch else without_epoch
