"""The physical limit of a figure: which figures there are, what limits a machine, and the maximum rate by both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpunode.catalog import Catalog, Gpu, Platform, hardware
from gpunode.facts.models.measured import GEMM_TYPES

Metric = str
"""A key of ``METRICS``."""
Group = Literal["copy", "peer", "on_device", "memory", "gemm", "busbw", "storage", "network"]


@dataclass(frozen=True)
class MetricKind:
    """The groups of a metric in the catalog."""

    group: Group
    """The ``metric`` of its bands."""
    row: str | None
    """The ``metric`` of the expectations that apply to it; None: there are none."""


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
METRICS: Mapping[Metric, MetricKind] = {
    "host_to_device": MetricKind("copy", "host_to_device"),
    "device_to_host": MetricKind("copy", "host_to_device"),
    "on_device": MetricKind("on_device", None),
    "peer_to_peer": MetricKind("peer", "peer_to_peer"),
    **{f"memory_{kernel}": MetricKind("memory", "memory_bandwidth") for kernel in ("read", "write", "triad")},
    **{f"gemm_{dtype}": MetricKind("gemm", f"gemm_{dtype}") for dtype in GEMM_TYPES},
    **{f"storage_{pattern}": MetricKind("storage", None) for pattern in ("read", "write", "randread", "randwrite")},
    **{f"{name}_busbw": MetricKind("busbw", f"{name}_busbw") for name in COLLECTIVES},
    # Over several nodes (validate --fabric): a node's own figures have other names.
    **{f"fabric_{name}_busbw": MetricKind("busbw", f"{name}_busbw") for name in COLLECTIVES},
    "fabric_exchange": MetricKind("network", None),
}
UNITS: Mapping[Group, str] = {"gemm": "TFLOPS"}
"""Unit of a group; all others are GB/s (10^9 bytes)."""


def is_metric(name: str) -> bool:
    """Return whether a figure of this name can be expected."""
    return name in METRICS


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric."""
    return UNITS.get(METRICS[metric].group, "GB/s")


Pair = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """One node, or one node of several equal ones."""

    gpu: Gpu | None
    """The model of its GPUs; None: they are not all one model of the catalog."""
    count: int
    """Number of its GPUs."""
    nvswitch: bool = False
    """True if NVSwitches are on its board or in its rack."""
    links: Mapping[Pair, int] | None = None
    """NVLinks between two GPUs, the lower index first; 0: none. None: unknown."""
    pcie: Mapping[int, tuple[int | None, int | None]] = field(default_factory=dict)
    """Generation and width of a GPU's PCIe link that both ends support; default: its model's."""
    platforms: frozenset[str] = frozenset()
    """Ids of the catalog's platforms that it may be."""
    network_gb_per_s: float | None = None
    """Rate of all adapters for GPU traffic, in one direction; None: unknown."""
    network_sure: bool = True

    def links_between(self, first: int, second: int) -> int | None:
        """Return the NVLinks between two GPUs, behind NVSwitches those of one GPU; None if they are unknown."""
        if self.nvswitch and self.gpu is not None and self.gpu.nvlink is not None:
            return self.gpu.nvlink.links
        if self.links is None:
            return None
        return self.links.get((min(first, second), max(first, second)))

    @property
    def ring_of_nvlinks(self) -> bool | None:
        """Return whether NVLinks form a ring over all GPUs; None if the links are unknown.

        Switches and meshes do, and so does a cube of eight, in which not every two GPUs are linked. Bridged pairs and
        islands of four do not.
        """
        if self.nvswitch:
            return True
        if self.links is None:
            return None
        near: dict[int, set[int]] = {}
        for (first, second), number in self.links.items():
            if number:
                near.setdefault(first, set()).add(second)
                near.setdefault(second, set()).add(first)
        reached, waiting = set[int](), [*near][:1]
        while waiting:
            gpu = waiting.pop()
            reached.add(gpu)
            waiting += near[gpu] - reached
        return len(reached) == self.count > 1 and all(len(others) >= min(2, self.count - 1) for others in near.values())


def of_platform(catalog: Catalog, platform: Platform) -> Shape:
    """Return the shape of a platform of the catalog, as described by its rows."""
    ids = list(platform.gpus)
    gpu = catalog.gpus[ids[0]] if len(ids) == 1 else None
    rate = platform.nic_rate_gbit_per_s
    return Shape(
        gpu=gpu,
        count=platform.gpu_count,
        nvswitch=platform.nvswitches > 0 or (gpu is not None and gpu.fabric == "rack"),
        links=_links(gpu, platform),
        platforms=frozenset({platform.id, *([platform.board] if platform.board else [])}),
        network_gb_per_s=rate * platform.nics / 8 if rate is not None and platform.nics is not None else None,
        network_sure=platform.sure("nics") and platform.sure("nic_rate_gbit_per_s"),
    )


def _links(gpu: Gpu | None, platform: Platform) -> dict[Pair, int] | None:
    """Return the links of a mesh of up to four GPUs with all links in use, and none for models without NVLink."""
    pairs = [(first, second) for first in range(platform.gpu_count) for second in range(first + 1, platform.gpu_count)]
    if gpu is None:
        return None
    if gpu.nvlink is None:
        return dict.fromkeys(pairs, 0)
    others = platform.gpu_count - 1
    meshed = gpu.nvlink.form == "sxm" and 1 <= others <= 3 and not platform.nvswitches
    # The position of bridges depends on the installation; a cube of eight V100 has pairs with two, one and no link.
    return dict.fromkeys(pairs, gpu.nvlink.links // others) if meshed else None


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
    rate = hardware.pcie_payload_gb_per_s(gen, width)
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
        hardware.nvlink_gb_per_s(shape.gpu.nvlink, links),
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
    peak = None if gpu is None else hardware.tensor_tflops(gpu, dtype)
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
        rate = hardware.nvlink_gb_per_s(gpu.nvlink, _used_links(shape))
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
