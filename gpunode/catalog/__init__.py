"""Facts as data, each with its source: GPUs, drivers, CUDA, libraries, packages, platforms, Xids, expected figures.

``load()`` returns the catalog; docs/catalog.md describes how to extend it.
"""

from gpunode.catalog.catalog import Catalog
from gpunode.catalog.gpus import GpuMatch
from gpunode.catalog.hardware import Architecture, Chip, ExpectedFigure, Gpu, PciPart, Platform, Xid
from gpunode.catalog.loading import load
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
