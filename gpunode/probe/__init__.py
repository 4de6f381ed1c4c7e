"""The program that runs on a node, and the bundle that it prints."""

from gpunode.probe.bundle import Bundle, CommandResult, script_text

__all__ = ["Bundle", "CommandResult", "script_text"]
