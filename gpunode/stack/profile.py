"""Inputs of roles beside the stack: other variants of the driver's packages, and the installed driver packages."""

from gpunode.catalog import Catalog
from gpunode.catalog.origins import upstream_version
from gpunode.facts import NodeFacts
from gpunode.stack.model import InstalledPackage, Stack
from gpunode.stack.naming import alternatives, is_for
from gpunode.stack.picture import picture_from_facts

TOGETHER = ("driver", "fabric-manager", "nscq", "nvsdm", "imex")
"""Components that are upgraded with the driver in one transaction; components with versions of their own are not."""


def driver_names(stack: Stack, catalog: Catalog, variant: str) -> tuple[tuple[str, ...], ...]:
    """Return the driver's packages in a ``variant`` of the catalog (``full``); empty if the source has none.

    Each is its name, followed by the alternatives if the repository does not have it.
    """
    branch, system = stack.driver.branch, catalog.os(stack.os)
    for row in catalog.packages.values():
        fits = (
            row.component == "driver"
            and row.origin == stack.source
            and row.variant == variant
            and row.flavour in (None, stack.module.flavour)
            and is_for(row, system, branch)
        )
        if fits:
            names = (name.format(branch=branch, version=stack.driver.constraint) for name in row.names)
            return tuple(alternatives(name) for name in names)
    return ()


def installed_closure(node: NodeFacts, catalog: Catalog) -> dict[str, InstalledPackage]:
    """Return every installed package of a driver closure, of any publisher, by name."""
    installed = picture_from_facts(node, catalog).installed
    return {package.name: package for package in installed.closure} if installed else {}


def releases_from(source: str, installed: dict[str, InstalledPackage]) -> dict[str, str]:
    """Return name and release of the packages that came from ``source``."""
    return {name: upstream_version(row.version) for name, row in installed.items() if row.origin == source}
