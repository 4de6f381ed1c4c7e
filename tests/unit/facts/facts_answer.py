"""A command's answer, as short as tests need it."""

from typing import Any

from gpunode.probe import CommandResult


def answer(stdout: str = "", rc: int = 0, stderr: str = "", *argv: str, **more: Any) -> CommandResult:
    """A command's answer."""
    return CommandResult(argv=list(argv or ("tool",)), rc=rc, stdout=stdout, stderr=stderr, seconds=0.1, **more)
