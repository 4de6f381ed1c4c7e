"""The physical limit of a figure: the component that transfers or computes, and its maximum rate."""

from dataclasses import dataclass
from typing import Literal

from gpunode.catalog import limits
from gpunode.expectations.metrics import METRICS, Metric
from gpunode.expectations.shape import Shape

Path = Literal["pcie", "nvlink", "nvswitch", "memory", "tensor", "network"]


@dataclass(frozen=True)
class PhysicalLimit:
    """A physical limit, with the component that has it."""

    value: float
    path: Path
    what: str
    """``PCIe 5.0 x16 without packet headers``."""
    sure: bool = True
    """False: a part of it is a guess, so that no figure fails by it."""


@dataclass(frozen=True)
class Where:
    """The part of the machine that a figure is about."""

    gpu: int = 0
    peer: int | None = None
    ranks: int | None = None
    """GPUs of all nodes; None: those of the shape."""
    nodes: int = 1
    clock_mhz: float | None = None
    """Clock of the SMs during the computation."""


def limit_of(metric: Metric, shape: Shape, where: Where) -> PhysicalLimit | None:
    """Return the limit of a figure; None if the machine's facts and the catalog do not determine it."""
    match METRICS[metric].group:
        case "copy":
            return _pcie(shape, where.gpu)
        case "peer":
            return None if where.peer is None else _peer(shape, where.gpu, where.peer)
        case "on_device" | "memory":
            return _memory(shape)
        case "gemm":
            return _tensor(shape, metric.removeprefix("gemm_"), where.clock_mhz)
        case "busbw":
            return _collective(shape, where)
        case "storage" | "network":
            return None


def _pcie(shape: Shape, gpu: int) -> PhysicalLimit | None:
    row = shape.gpu
    if row is not None and not row.pcie_judged:
        return None
    of_model = (row.pcie.gen, row.pcie.width) if row is not None and row.pcie is not None else (None, None)
    gen, width = shape.pcie.get(gpu, of_model)
    rate = limits.pcie_payload_gb_per_s(gen, width)
    if rate is None:
        return None
    seen = gpu in shape.pcie
    sure = seen or (row is not None and row.sure("pcie"))
    return PhysicalLimit(rate, "pcie", f"PCIe {gen}.0 x{width} without packet headers", sure)


def _peer(shape: Shape, first: int, second: int) -> PhysicalLimit | None:
    links = shape.links_between(first, second)
    if links is None:
        return None
    if links == 0 or shape.gpu is None or shape.gpu.nvlink is None:
        ends = [limit for gpu in (first, second) if (limit := _pcie(shape, gpu)) is not None]
        return min(ends, key=lambda limit: limit.value, default=None)
    return PhysicalLimit(
        limits.nvlink_gb_per_s(shape.gpu.nvlink, links),
        "nvswitch" if shape.nvswitch else "nvlink",
        f"{links} NVLinks of generation {shape.gpu.nvlink.gen}",
        shape.gpu.sure("nvlink"),
    )


def _memory(shape: Shape) -> PhysicalLimit | None:
    gpu = shape.gpu
    if gpu is None or gpu.memory_bandwidth_gb_per_s is None:
        return None
    return PhysicalLimit(
        gpu.memory_bandwidth_gb_per_s, "memory", f"memory of {gpu.name}", gpu.sure("memory_bandwidth_gb_per_s")
    )


def _tensor(shape: Shape, dtype: str, clock_mhz: float | None) -> PhysicalLimit | None:
    gpu = shape.gpu
    peak = None if gpu is None else limits.tensor_tflops(gpu, dtype)
    if gpu is None or gpu.tflops is None or peak is None:
        return None
    rated = gpu.tflops.clock_mhz or gpu.sm_clock_mhz
    if clock_mhz is None or rated is None:
        # At an unknown clock, which the power limit may have lowered, the peak is not a useful limit.
        return PhysicalLimit(peak, "tensor", f"peak of {gpu.name} for {dtype}, clock unknown", sure=False)
    label = f"peak of {gpu.name} for {dtype} at {clock_mhz:.0f} MHz"
    return PhysicalLimit(peak * clock_mhz / rated, "tensor", label, gpu.sure("tflops"))


def _collective(shape: Shape, where: Where) -> PhysicalLimit | None:
    """Return the rate of a ring over all ranks: that of the slowest of its steps."""
    ranks = where.ranks if where.ranks is not None else shape.count * where.nodes
    if ranks < 2:
        return None
    if where.nodes > 1:
        if shape.network_gb_per_s is None:
            return None
        label = "network adapters of a node, as a ring uses them"
        return PhysicalLimit(shape.network_gb_per_s, "network", label, shape.network_sure)
    gpu = shape.gpu
    if shape.ring_of_nvlinks and gpu is not None and gpu.nvlink is not None:
        path: Path = "nvswitch" if shape.nvswitch else "nvlink"
        rate = limits.nvlink_gb_per_s(gpu.nvlink, _used_links(shape))
        return PhysicalLimit(rate, path, f"NVLinks of {gpu.name}, as a ring uses them", gpu.sure("nvlink"))
    if shape.ring_of_nvlinks is None:
        return None
    slowest = [limit for number in range(shape.count) if (limit := _pcie(shape, number)) is not None]
    if not slowest or len(slowest) < shape.count:
        return None
    least = min(slowest, key=lambda limit: limit.value)
    return PhysicalLimit(least.value, "pcie", f"{least.what}, as a ring uses it", least.sure)


def _used_links(shape: Shape) -> int | None:
    """Return the number of links that connect one GPU to others; None: all of them."""
    if shape.nvswitch or shape.links is None:
        return None
    return min(sum(number for pair, number in shape.links.items() if gpu in pair) for gpu in range(shape.count))
