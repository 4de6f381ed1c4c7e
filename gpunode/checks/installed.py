"""The installed driver packages by origin, for the checks on packages."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from gpunode.catalog import origins
from gpunode.facts.node import NodeFacts
from gpunode.facts.packages import Package

GONE = ("config-files", "not-installed")

# Nodes of a fleet have the same packages.
_origin_of = lru_cache(maxsize=10_000)(origins.origin_of)
_closure_line = lru_cache(maxsize=10_000)(origins.closure_line)


@dataclass(frozen=True)
class DriverPackages:
    """The driver closure's packages on one node, by origin.

    ``main`` is the origin of most of them (of equals, the one with the kernel module). Checks on version and hold use
    only ``main``, so that a foreign package is reported once, by the check on foreign packages.
    """

    main: str | None
    """None if no package of a closure is installed."""
    by_origin: dict[str, tuple[Package, ...]]

    @property
    def of_main(self) -> tuple[Package, ...]:
        """Return the packages of the main origin."""
        return () if self.main is None else self.by_origin[self.main]


def present(package: Package) -> bool:
    """Return True for installed packages, also half-installed ones; False for removed ones with configuration left."""
    return package.installed or not package.state.endswith(GONE)


def origin_of(package: Package) -> str | None:
    """Return the package's origin by the catalog; None if no row matches."""
    return package.published or _origin_of(package.name, package.version, package.maintainer)


def line_of(package: Package) -> str | None:
    """Return the closure line of the package; None if it may have a version of its own."""
    return _closure_line(package.name, package.source, origin_of(package))


def upstream(package: Package) -> str:
    """Return the driver's version in the package's version."""
    return origins.upstream_version(package.version)


def driver_packages(node: NodeFacts) -> DriverPackages:
    """Return the packages of the driver closure; empty if the package database could not be read."""
    groups: dict[str, list[Package]] = defaultdict(list)
    for package in node.packages or ():
        if present(package) and line_of(package) is not None:
            groups[origin_of(package) or f"unknown ({package.maintainer})"].append(package)
    if all(origins.is_companion(package.name) for packages in groups.values() for package in packages):
        return DriverPackages(None, {})

    def weight(origin: str) -> tuple[int, bool, str]:
        brings_module = any(origins.brings_kernel_module(package.name) for package in groups[origin])
        return len(groups[origin]), brings_module, origin

    return DriverPackages(max(groups, key=weight), {origin: tuple(packages) for origin, packages in groups.items()})


def driver_installed(node: NodeFacts) -> bool:
    """Return True if a kernel module is expected: its package, its DKMS source or its file exists, or it is loaded."""
    return (
        any(present(package) and origins.brings_kernel_module(package.name) for package in node.packages or ())
        or any(module.name.startswith("nvidia") for module in node.dkms or ())
        or bool(node.module_files)
        or node.loaded_driver is not None
    )
