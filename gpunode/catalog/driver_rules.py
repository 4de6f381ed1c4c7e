"""Driver bounds of a GPU model, shared by the resolver and the checks.

Each function returns the bound that a driver violates, or None if it is within the bound.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version as Number

from gpunode.catalog import open_modules
from gpunode.catalog.catalog import Catalog
from gpunode.catalog.hardware import Flavour, Gpu, Platform

DMA_BUF_KERNEL = Number("5.12")
DMA_BUF_CUDA = Number("11.7")
DMA_BUF_CAPABILITY = Number("7.5")
"""Minimum for GPUDirect RDMA over dma-buf: NVIDIA's NCCL guide, troubleshooting (sources.yml, ncclgdr)."""


@dataclass(frozen=True)
class Bound:
    """The value in the catalog, and whether it is sure."""

    value: str
    sure: bool


def last_branch(gpu: Gpu, branch: int) -> Bound | None:
    """Return the last branch that supports the model."""
    if gpu.last_branch is None or branch <= gpu.last_branch:
        return None
    return Bound(str(gpu.last_branch), gpu.sure("last_branch"))


def modules(catalog: Catalog, gpu: Gpu, flavour: Flavour | str | None) -> Bound | None:
    """Return the only kernel modules that support the model; an unknown flavour is within the bound."""
    if gpu.modules == "either" or flavour in (None, gpu.modules):
        return None
    architecture = catalog.architectures[gpu.architecture]
    of_all = architecture.modules == gpu.modules and architecture.sure("modules")
    return Bound(gpu.modules, of_all or gpu.sure("modules"))


def first_cuda(catalog: Catalog, gpu: Gpu, cuda: str) -> Bound | None:
    """Return the first CUDA that has code for the model."""
    architecture = catalog.architectures[gpu.architecture]
    first = architecture.first_cuda.get(gpu.compute_capability)
    if first is None or Number(cuda) >= Number(first):
        return None
    # If a capability's own value is unsure, the lowest one of the architecture is still sure.
    lowest = min(map(Number, architecture.first_cuda.values()))
    return Bound(first, architecture.sure("first_cuda") or Number(cuda) < lowest)


def min_driver(row: Gpu | Platform, driver: Number) -> Bound | None:
    """Return the documented minimum of a model or a platform."""
    if row.min_driver is None or driver >= Number(row.min_driver):
        return None
    return Bound(row.min_driver, row.sure("min_driver"))


def min_driver_of_boards(catalog: Catalog, gpu: Gpu, driver: Number) -> Bound | None:
    """Return the lowest minimum of the boards of a model with a fabric, if all of them have one that is sure."""
    boards = [row for row in catalog.platforms.values() if gpu.id in row.gpus]
    floors = [row.min_driver for row in boards if row.min_driver is not None and row.sure("min_driver")]
    if gpu.fabric == "none" or not floors or len(floors) < len(boards):
        return None
    floor = min(floors, key=Number)
    return Bound(floor, sure=True) if driver < Number(floor) else None


def first_listed(gpu: Gpu, branch: int, driver: Number) -> Bound | None:
    """Return the first release of a branch with a README that lists the model; ``never`` if none does.

    Releases before the first one that was read count as that one.
    """
    first = gpu.first_listed_on(branch)
    if _always(gpu, branch) or first in ("from the start", "unknown", open_modules.table().first_of(branch)):
        return None
    if unread(gpu, branch, driver) is not None:
        return None
    if first != "never" and driver >= Number(first):
        return None
    return Bound(first, gpu.sure("first_listed"))


def unread(gpu: Gpu, branch: int, driver: Number) -> str | None:
    """Return the last release of a branch with a README that was read, if it does not list the model and the driver is
    newer; else None."""
    last = open_modules.table().last_of(branch)
    absent = not _always(gpu, branch) and gpu.first_listed_on(branch) == "never"
    return last if absent and last is not None and driver > Number(last) else None


def listed_late(gpu: Gpu, branch: int, driver: Number) -> Iterator[str]:
    """Yield why a release that is not older than the first with the model may not support its board."""
    if driver in map(Number, gpu.omitted):
        yield "its README omits the model, which earlier releases of the branch list"
    for board, releases in gpu.later_boards.items():
        first = releases.get(branch)
        if branch in releases and (first is None or driver < Number(first)):
            yield f"its README does not list boards with subsystem {board}" + (f", {first} does" if first else "")


def _always(gpu: Gpu, branch: int) -> bool:
    return gpu.first_branch is not None and branch >= gpu.first_branch


def kernel_number(release: str | None) -> Number | None:
    """Return the leading numbers of a kernel's release: 5.14.0 of ``5.14.0-427.el9.x86_64``."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", release or "")
    return Number(match[0]) if match else None


def against_gpudirect(models: Sequence[Gpu]) -> list[str]:
    """Return the reasons why these GPUs do not support GPUDirect RDMA with any software; empty if there is none."""
    against = []
    if any(not gpu.gpudirect_rdma for gpu in models):
        against.append("the hardware of a GPU has no GPUDirect RDMA")
    if any(gpu.market == "consumer" for gpu in models):
        against.append("a GPU is not a data-center or professional GPU")
    return against


def against_dma_buf(
    models: Sequence[Gpu], flavour: Flavour | str | None, cuda: str | None, kernel: Number | None
) -> list[str]:
    """Return the reasons why GPUDirect RDMA does not work over dma-buf; an unknown ``kernel`` (None) is not a reason.

    ``cuda`` is the version that the driver contains.
    """
    against = []
    if flavour != "open":
        against.append("the modules are proprietary")
    if cuda is None or Number(cuda) < DMA_BUF_CUDA:
        against.append(f"the driver's CUDA is older than {DMA_BUF_CUDA}")
    if any(gpu.capability < DMA_BUF_CAPABILITY for gpu in models):
        against.append("a GPU is older than Turing")
    against += against_gpudirect(models)
    if kernel is not None and kernel < DMA_BUF_KERNEL:
        against.append(f"kernel {kernel} is older than {DMA_BUF_KERNEL}")
    return against
