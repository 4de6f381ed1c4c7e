"""Facts as data, each with its source: GPUs, drivers, CUDA, libraries, packages, platforms, Xids, expected figures.

``load()`` returns the catalog; docs/catalog.md describes how to extend it.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from gpunode.catalog.catalog import Catalog
from gpunode.catalog.gpus import GpuMatch
from gpunode.catalog.hardware import Architecture, Chip, ExpectedFigure, Gpu, PciPart, Platform, Xid
from gpunode.catalog.read import read
from gpunode.catalog.rows import Row, Source
from gpunode.catalog.software import (
    Branch,
    ContainerEngine,
    ContainerToolkit,
    CudaMajor,
    Cudnn,
    Dcgm,
    ErrorMessage,
    ForwardCompat,
    Framework,
    KernelFlavour,
    Kubernetes,
    Nccl,
    OriginOffer,
    PackageSet,
    Pinning,
    System,
    Toolkit,
    WheelArchitectures,
    WorkloadImage,
)
from gpunode.errors import UsageError


def load(overlays: Sequence[Path | str] = ()) -> Catalog:
    """Return the catalog, with a user's own files merged over the package's in the given order.

    Cached per set of files. A malformed file of the user raises UsageError: ``file:line: key: what``.
    """
    stamped = []
    for path in map(Path, overlays):
        try:
            stamped.append((path, path.stat().st_mtime_ns))
        except OSError as err:
            raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    return _load(tuple(stamped))


@lru_cache(maxsize=8)
def _load(stamped: tuple[tuple[Path, int], ...]) -> Catalog:
    if not stamped:
        return Catalog()
    from gpunode.catalog.lint import lint  # noqa: PLC0415 (without overlays nobody waits for the linter)

    catalog = Catalog([read(path) for path, _ in stamped])
    problems = lint(catalog)
    if problems:
        more = f" (and {len(problems) - 1} more: see `gpunode catalog lint`)" if len(problems) > 1 else ""
        raise UsageError(f"{problems[0]}{more}")
    return catalog


__all__ = [
    "Architecture",
    "Branch",
    "Catalog",
    "Chip",
    "ContainerEngine",
    "ContainerToolkit",
    "CudaMajor",
    "Cudnn",
    "Dcgm",
    "ErrorMessage",
    "ExpectedFigure",
    "ForwardCompat",
    "Framework",
    "Gpu",
    "GpuMatch",
    "KernelFlavour",
    "Kubernetes",
    "Nccl",
    "OriginOffer",
    "PackageSet",
    "PciPart",
    "Pinning",
    "Platform",
    "Row",
    "Source",
    "System",
    "Toolkit",
    "WheelArchitectures",
    "WorkloadImage",
    "Xid",
    "load",
]
