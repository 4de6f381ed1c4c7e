"""Names of the figures that can be expected."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
