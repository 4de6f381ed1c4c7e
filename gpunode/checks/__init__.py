"""The check registry. Importing this package registers every check."""

from gpunode.checks import driver, gpu, node, packages  # noqa: F401
from gpunode.checks.identity import Gpu, Identity, Stack, identify
from gpunode.checks.registry import (
    LEVELS,
    Check,
    Expectation,
    Finding,
    Level,
    Status,
    Value,
    judge,
    registry,
)

__all__ = [
    "LEVELS",
    "Check",
    "Expectation",
    "Finding",
    "Gpu",
    "Identity",
    "Level",
    "Stack",
    "Status",
    "Value",
    "identify",
    "judge",
    "registry",
]
