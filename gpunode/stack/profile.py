"""The driver's package names in another variant than the one that the stack was given."""

from gpunode.catalog import Catalog
from gpunode.stack.model import Stack


def driver_names(stack: Stack, catalog: Catalog, variant: str) -> tuple[str, ...]:
    """Names of the driver's packages in a ``variant`` of the catalog (``full``); empty where the source has none."""
    branch, family = stack.driver.branch, catalog.os(stack.os).family
    for row in catalog.packages.values():
        fits = (
            row.component == "driver"
            and row.origin == stack.source
            and row.family == family
            and row.variant == variant
            and row.flavour in (None, stack.module.flavour)
            and (not row.systems or stack.os in row.systems)
            and (row.first_branch is None or branch >= row.first_branch)
            and (row.last_branch is None or branch <= row.last_branch)
        )
        if fits:
            return tuple(name.format(branch=branch, version=stack.driver.constraint) for name in row.names)
    return ()
