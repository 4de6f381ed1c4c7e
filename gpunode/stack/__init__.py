"""Which versions match: ``resolve`` picks a stack for a node, or says why none exists. Pure."""

from gpunode.stack.drift import LOCK_NAME, Drift, lock_document, read_lock
from gpunode.stack.model import Conflict, GpuGroup, Installed, NodePicture, Request, Stack
from gpunode.stack.picture import picture_from_facts, undetermined
from gpunode.stack.plan import Plan, PlanGroup, PlanHost, plan
from gpunode.stack.profile import TOGETHER, driver_names, installed_closure, releases_from
from gpunode.stack.resolve import resolve

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
