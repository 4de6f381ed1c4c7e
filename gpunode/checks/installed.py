"""What is installed of the driver, by origin: the common ground of the checks on packages."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from gpunode.catalog import origins
from gpunode.facts.node import NodeFacts, Package

GONE = ("config-files", "not-installed")

# Nodes of a fleet have the same packages.
_origin_of = lru_cache(maxsize=10_000)(origins.origin_of)
_closure_line = lru_cache(maxsize=10_000)(origins.closure_line)


@dataclass(frozen=True)
class DriverPackages:
    """The driver closure's packages on one node, by origin.

    ``main`` is the origin that most of them come from (of equals, the one that brings the kernel module). What a
    few packages of another origin have as version or hold is that origin's affair: checks on version and hold look
    at ``main`` alone, so that a foreign package is found once, as what it is.
    """

    main: str | None
    """None where no package of any closure is installed."""
    by_origin: dict[str, tuple[Package, ...]]

    @property
    def of_main(self) -> tuple[Package, ...]:
        """Packages of the main origin."""
        return () if self.main is None else self.by_origin[self.main]


def present(package: Package) -> bool:
    """True for what is installed, also half; False for what was removed and left its configuration."""
    return package.installed or not package.state.endswith(GONE)


def origin_of(package: Package) -> str | None:
    """The package's origin after the catalog; None where no row knows it."""
    return package.published or _origin_of(package.name, package.version, package.maintainer)


def line_of(package: Package) -> str | None:
    """The closure line that the package belongs to; None where it may have a version of its own."""
    return _closure_line(package.name, package.source, origin_of(package))


def upstream(package: Package) -> str:
    """The driver's version that the package carries."""
    return origins.upstream_version(package.version)


def driver_packages(node: NodeFacts) -> DriverPackages:
    """The packages of the driver closure; none where the package database was not seen."""
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
    """True where a kernel module is to be expected: its package, its DKMS source, a file of it, or itself in memory."""
    return (
        any(present(package) and origins.brings_kernel_module(package.name) for package in node.packages or ())
        or any(module.name.startswith("nvidia") for module in node.dkms or ())
        or bool(node.module_files)
        or node.loaded_driver is not None
    )
