"""Who hands out work to nodes: the interface of its adapters.

A drain carries a token. Only a drain with that token is ever ended; a drain of others, before or during the change,
stays as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpunode.errors import UndeterminedError, UsageError
from gpunode.fleet import process

CALL_S = 60.0
"""Limit of one call of a program."""
Run = Callable[[Sequence[str], str | None], process.Completed]


class Availability(StrEnum):
    """Whether a node gets work."""

    IN_SERVICE = "in service"
    OURS = "drained by this run"
    FOREIGN = "drained by others"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ServiceState:
    """The answer on one node."""

    service: Availability
    reason: str = ""
    """The reason of others, or why it is unknown."""

    @property
    def text(self) -> str:
        """Return the state for a message."""
        return f"{self.service.value}: {self.reason}" if self.reason else self.service.value


class SchedulerError(Exception):
    """A call failed: one line."""


class SchedulerMissingError(SchedulerError, UsageError):
    """The scheduler's program cannot be started: wrong usage before a run, a failed call in the middle of it."""


class Scheduler(Protocol):
    """What hands out work. Each method may be repeated; each raises SchedulerError."""

    def state(self, node: str, token: str) -> ServiceState:
        """Return whether the node gets work."""

    def drain(self, node: str, token: str) -> None:
        """Take care that the node gets no new work. A node that others drained is refused."""

    def busy(self, node: str, token: str) -> str:
        """Return what still runs on a drained node; empty if nothing does. Unknown is busy."""

    def resume(self, node: str, token: str) -> None:
        """End the drain with this token; a node without it is not changed."""

    def reboot(self, node: str, token: str) -> str:  # noqa: ARG002
        """Request the reboot of a drained node; return why nothing was requested, so that Ansible reboots it."""
        return "it reboots no nodes"

    def rebooting(self, node: str, token: str) -> bool:  # noqa: ARG002
        """Return whether a reboot that was requested is still to come, or came; True if that is unknown."""
        return True

    def cancel_reboot(self, node: str, token: str) -> str:  # noqa: ARG002
        """Remove a requested reboot, so that the drain stays; return why it may still come."""
        return "the scheduler may still do it"


def run_program(argv: Sequence[str], stdin: str | None = None) -> process.Completed:
    """Run a program of the scheduler. Raises SchedulerError."""
    try:
        return process.run(argv, timeout_s=CALL_S, stdin=stdin)
    except UsageError as err:
        raise SchedulerMissingError(str(err)) from None
    except UndeterminedError as err:
        raise SchedulerError(str(err)) from None
