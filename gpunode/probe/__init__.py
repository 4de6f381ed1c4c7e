"""The bundle that the probe prints, and what a node answered in its place."""

from gpunode.probe.answer import Answer, Collected
from gpunode.probe.bundle import Bundle, CommandResult

__all__ = ["Answer", "Bundle", "Collected", "CommandResult"]
