"""What runs on a node, and the bundle it answers with."""

from gpunode.probe.bundle import Bundle, CommandResult, script_text

__all__ = ["Bundle", "CommandResult", "script_text"]
