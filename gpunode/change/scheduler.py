"""Who hands out work to nodes: one interface, and its adapters.

A drain carries a token. Only a drain with that token is ever ended; a drain of others, before or during the change,
stays as it is.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpunode.errors import UndeterminedError, UsageError
from gpunode.fleet import process
from gpunode.text import last_line, one_line

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


class NoScheduler(Scheduler):
    """Nobody hands out work: whether a node is idle is seen on the node alone."""

    def state(self, node: str, token: str) -> ServiceState:
        """Return that the node is at the run's disposal."""
        return ServiceState(Availability.OURS if self._drained.get(node) == token else Availability.IN_SERVICE)

    def __init__(self) -> None:
        self._drained: dict[str, str] = {}

    def drain(self, node: str, token: str) -> None:
        """Record the drain."""
        self._drained[node] = token

    def busy(self, node: str, token: str) -> str:  # noqa: ARG002
        """Return that nothing is known to run."""
        return ""

    def resume(self, node: str, token: str) -> None:  # noqa: ARG002
        """Remove the record of the drain."""
        self._drained.pop(node, None)


_FLAGS = re.compile(r"[A-Z_]+")
_SLURM_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "DOWN", "FUTURE", "MAINT", "UNKNOWN"})
_SLURM_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING", "DRAINING", "FAILING", "ALLOC", "MIX", "COMP"})
_SLURM_REBOOTS = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})
_SLURM_NOTES = r"(?: : reboot (?:issued|complete|timed out))*"
"""What slurmctld adds to a reason."""


class SlurmScheduler(Scheduler):
    """Slurm, by ``scontrol``: the token is the reason of the drain.

    Reasons are compared as a whole, but for the notes that slurmctld adds when it reboots a node: a reason that
    somebody wrote since is theirs. A node that rebooted while it was drained may be DOWN with the same reason;
    ``State=RESUME`` ends both.

    From the sources of 22.05 to 25.11 (tests/integration/test_slurm_reboot.py asks 22.05): with ``nextstate=DOWN`` the
    registration of slurmd after a boot removes DRAIN and leaves DOWN; with ReturnToService=2 its second registration
    ends DOWN too. Without ``nextstate``, ``scontrol cancel_reboot`` would end the drain. Without ``reason`` the reason
    stays, whoever wrote it.
    """

    def __init__(self, run: Run = run_program) -> None:
        self._run = run

    def _call(self, *argv: str) -> str:
        done = self._run(["scontrol", *argv], None)
        if done.rc != 0:
            raise SchedulerError(f"scontrol {' '.join(argv)}: {last_line(done.stderr or done.stdout) or done.rc}")
        return done.stdout

    def _node_state(self, node: str) -> tuple[frozenset[str], str]:
        """Return the parts of a node's state, and its reason."""
        output = self._call("show", "node", node)
        state = re.search(r"^ *State=(\S+)", output, re.MULTILINE)
        if state is None:
            raise SchedulerError(f"scontrol show node {node}: no State in its answer")
        reason = re.search(r"^ *Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?$", output, re.MULTILINE)
        return frozenset(_FLAGS.findall(state[1])), reason[1] if reason else ""

    def state(self, node: str, token: str) -> ServiceState:
        """Return whether the node gets work: drained, down or failing nodes do not."""
        return _slurm_state(*self._node_state(node), token)

    def drain(self, node: str, token: str) -> None:
        """Set the node to DRAIN with the token as reason; after a reboot, restore both."""
        flags, reason = self._node_state(node)
        now = _slurm_state(flags, reason, token)
        if now.service is Availability.FOREIGN:
            raise SchedulerError(now.text)
        if "DRAIN" not in flags or (reason != token and not flags & _SLURM_REBOOTS):
            self._call("update", f"NodeName={node}", "State=DRAIN", f"Reason={token}")

    def busy(self, node: str, token: str) -> str:  # noqa: ARG002
        """Return the state of a node that still runs jobs or ends them, or that Slurm is about to reboot."""
        flags, _ = self._node_state(node)
        if flags & (_SLURM_BUSY | _SLURM_REBOOTS):
            return f"Slurm: {'+'.join(sorted(flags))}"
        return "" if flags & {"IDLE", "DOWN", "DRAINED"} else f"Slurm: {'+'.join(sorted(flags))}"

    def resume(self, node: str, token: str) -> None:
        """End the drain."""
        if self.state(node, token).service is Availability.OURS:
            self._call("update", f"NodeName={node}", "State=RESUME")

    def reboot(self, node: str, token: str) -> str:
        """Request the reboot where slurmctld has a RebootProgram; a refused request is left to Ansible."""
        config = dict(re.findall(r"^(\w+) += (.*?) *$", self._call("show", "config"), re.MULTILINE))
        if not {"RebootProgram", "ReturnToService"} <= config.keys():
            raise SchedulerError("scontrol show config: no RebootProgram or ReturnToService in its answer")
        self.drain(node, token)
        if config["RebootProgram"] == "(null)":
            return "Slurm has no RebootProgram"
        if config["ReturnToService"] == "2":
            return "with ReturnToService=2 Slurm would end the drain"
        flags, _ = self._node_state(node)
        if "NOT_RESPONDING" in flags:
            return "slurmd does not respond"
        refused = "Slurm ignored the request"
        if not flags & _SLURM_REBOOTS:
            try:
                self._call("reboot", "ASAP", "nextstate=DOWN", node)
            except SchedulerError as err:
                refused = str(err)
        if self.rebooting(node, token):
            return ""
        if busy := self.busy(node, token):
            raise SchedulerError(busy)  # the drain had been ended meanwhile, and a job began
        return refused

    def rebooting(self, node: str, token: str) -> bool:
        """Return whether slurmctld has the request, or noted on the drain's reason that it passed it on."""
        flags, reason = self._node_state(node)
        noted = reason != token and _slurm_state(flags, reason, token).service is Availability.OURS
        return noted or bool(flags & _SLURM_REBOOTS)

    def cancel_reboot(self, node: str, token: str) -> str:
        """Remove the request; Slurm refuses that once it is issued. With ``nextstate`` the drain stays."""
        flags, reason = self._node_state(node)
        if "REBOOT_REQUESTED" in flags and _slurm_state(flags, reason, token).service is Availability.OURS:
            self._call("cancel_reboot", node)
            return ""
        return f"Slurm: {'+'.join(sorted(flags))}"


def _slurm_state(flags: frozenset[str], reason: str, token: str) -> ServiceState:
    if not flags & _SLURM_DRAINED:
        return ServiceState(Availability.IN_SERVICE)
    if re.fullmatch(re.escape(token) + _SLURM_NOTES, reason):
        return ServiceState(Availability.OURS)
    return ServiceState(Availability.FOREIGN, one_line(reason or "+".join(sorted(flags))))


class CommandScheduler(Scheduler):
    """Programs of the site: ``PROGRAM state|drain|busy|resume|reboot NODE TOKEN``.

    ``state`` prints ``in-service``, ``ours`` (the drain with the token) or ``foreign REASON``; ``busy`` prints what
    still runs. An exit code other than 0 is a failure, with its last line as the reason. ``reboot`` is optional: a
    program that requests the reboot prints ``requested``.
    """

    def __init__(self, program: str, run: Run = run_program) -> None:
        self._program, self._run = program, run

    def _call(self, word: str, node: str, token: str) -> str:
        answer, problem = self._ran(word, node, token)
        if problem:
            raise SchedulerError(problem)
        return answer

    def _ran(self, word: str, node: str, token: str) -> tuple[str, str]:
        """Return what the program prints, and why it failed."""
        done = self._run([self._program, word, node, token], None)
        failed = f"{self._program} {word} {node}: {last_line(done.stderr or done.stdout) or done.rc}"
        return one_line(done.stdout), failed if done.rc != 0 else ""

    def state(self, node: str, token: str) -> ServiceState:
        """Return what the program prints."""
        word, _, reason = self._call("state", node, token).partition(" ")
        known = {"in-service": Availability.IN_SERVICE, "ours": Availability.OURS, "foreign": Availability.FOREIGN}
        if word not in known:
            raise SchedulerError(f"{self._program} state {node}: expected in-service, ours or foreign, got {word!r}")
        return ServiceState(known[word], reason)

    def drain(self, node: str, token: str) -> None:
        """Call the program unless the node is drained."""
        now = self.state(node, token)
        if now.service is Availability.FOREIGN:
            raise SchedulerError(now.text)
        if now.service is not Availability.OURS:
            self._call("drain", node, token)

    def busy(self, node: str, token: str) -> str:
        """Return what the program prints."""
        return self._call("busy", node, token)

    def resume(self, node: str, token: str) -> None:
        """End the drain if it has the token."""
        if self.state(node, token).service is Availability.OURS:
            self._call("resume", node, token)

    def reboot(self, node: str, token: str) -> str:
        """Call the program; one without this word fails, or prints something else.

        Raises SchedulerError if it does not end in time: it may have requested the reboot.
        """
        answer, problem = self._ran("reboot", node, token)
        return problem or ("" if answer == "requested" else "the program reboots no nodes")
