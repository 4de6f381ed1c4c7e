"""The bundle that the probe prints, and what a node answered in its place."""

from gpunode.probe.bundle import Answer, Bundle, Collected, CommandResult

__all__ = ["Answer", "Bundle", "Collected", "CommandResult"]
