"""The check registry. Importing this package registers every check."""

from gpunode.checks import (  # noqa: F401
    containers,
    driver,
    fabric,
    frameworks,
    gpu,
    gpu_settings,
    host,
    host_health,
    host_pci,
    inside,
    inside_driver,
    inside_limits,
    links,
    memory_errors,
    node,
    nvlink,
    packages,
    rdma,
    thermal,
    upkeep,
    wheels,
    xids,
)
from gpunode.checks.actions import Action, State
from gpunode.checks.identity import Gpu, Identity, Stack, identify
from gpunode.checks.registry import (
    LEVELS,
    Category,
    Check,
    Expectation,
    Finding,
    Level,
    Status,
    Value,
    Verdict,
    judge,
    registry,
)
from gpunode.checks.thresholds import Threshold

__all__ = [
    "LEVELS",
    "Action",
    "Category",
    "Check",
    "Expectation",
    "Finding",
    "Gpu",
    "Identity",
    "Level",
    "Stack",
    "State",
    "Status",
    "Threshold",
    "Value",
    "Verdict",
    "identify",
    "judge",
    "registry",
]
