"""The resolver: ``resolve`` selects a software stack for a node, or reports why none exists. It has no side effects."""

from typing import TYPE_CHECKING, Any

from gpunode.stack.drift import LOCK_NAME, Drift, lock_document, read_lock
from gpunode.stack.model import Conflict, GpuGroup, Installed, NodePicture, Request, Stack
from gpunode.stack.plan import Plan, PlanGroup, PlanHost, plan
from gpunode.stack.resolve import resolve

if TYPE_CHECKING:
    from gpunode.stack.picture import (
        TOGETHER,
        driver_names,
        installed_closure,
        picture_from_facts,
        releases_from,
        undetermined,
    )

_OF_MACHINES = {
    "TOGETHER",
    "driver_names",
    "installed_closure",
    "picture_from_facts",
    "releases_from",
    "undetermined",
}
"""Names that need the facts of a machine; imported on first use, because a hypothetical node needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _OF_MACHINES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 (only needed here)

    return getattr(import_module("gpunode.stack.picture"), name)


__all__ = [
    "LOCK_NAME",
    "TOGETHER",
    "Conflict",
    "Drift",
    "GpuGroup",
    "Installed",
    "NodePicture",
    "Plan",
    "PlanGroup",
    "PlanHost",
    "Request",
    "Stack",
    "driver_names",
    "installed_closure",
    "lock_document",
    "picture_from_facts",
    "plan",
    "read_lock",
    "releases_from",
    "resolve",
    "undetermined",
]
