"""Which versions match: ``resolve`` picks a stack for a node, or says why none exists. Pure."""

from gpunode.stack.model import Conflict, GpuGroup, Installed, NodePicture, Request, Stack, stack_json_schema
from gpunode.stack.resolve import resolve

__all__ = ["Conflict", "GpuGroup", "Installed", "NodePicture", "Request", "Stack", "resolve", "stack_json_schema"]
