"""The program that runs on a node, and the bundle that it prints."""

from gpunode.probe.answer import Answer, Collected
from gpunode.probe.bundle import Bundle, CommandResult, script_text

__all__ = ["Answer", "Bundle", "Collected", "CommandResult", "script_text"]
