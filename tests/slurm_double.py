"""slurmctld 22.05 as ``scontrol`` shows it: drains, reasons, and what a reboot does to them.

The transitions are those that tests/integration/test_slurm_reboot.py finds on the real one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunode.fleet.process import Completed

REFUSED = "scontrol_reboot_nodes error: Permission denied"
FATES = ("boots", "late", "never", "refused", "cancelled", "waits")
"""What becomes of a request: ``late``: after ResumeTimeout; ``waits``: it is not passed on, as while a job runs."""
BOOTS, TIMES_OUT, LATE = 5, 8, 14
"""Steps after the request was passed on."""


@dataclass
class SlurmNode:
    """One node."""

    reason: str = ""
    drained: bool = False
    down: bool = False
    reboot: str = ""
    """REQUESTED or ISSUED."""
    steps: int = 0
    boots: int = 0

    @property
    def drain(self) -> str:
        """The reason of a node that gets no work."""
        return self.reason if self.drained or self.down else ""

    @drain.setter
    def drain(self, reason: str) -> None:
        self.reason, self.drained = reason, bool(reason)
        if not reason:
            self.down, self.reboot = False, ""

    def _note(self, text: str) -> None:
        self.reason = text if text in self.reason else f"{self.reason} : {text}"

    def booted(self) -> None:
        """What the node does at its boot."""
        self.boots += 1

    def step(self, fate: str, *, idle: bool = True, returns: str = "1") -> None:
        """A moment passes."""
        if self.reboot == "REQUESTED":
            if fate == "cancelled":
                self.reboot = ""
            elif idle and fate != "waits":
                self.reboot, self.down, self.steps = "ISSUED", True, 1
                self._note("reboot issued")
        elif self.steps:
            self.steps += 1
            if self.reboot and self.steps == TIMES_OUT and fate in ("late", "never"):
                self._note("reboot timed out")
                self.reboot, self.drained = "", False
            elif fate != "never" and self.steps >= (LATE if fate == "late" else BOOTS):
                self.steps = 0
                if self.reboot:
                    self._note("reboot complete")
                    self.reboot, self.drained = "", False
                self.booted()
        elif self.down and returns == "2":
            self.down = False


class Slurmctld:
    """The controller; ``scontrol`` is for the adapter."""

    def __init__(self, nodes: Mapping[str, SlurmNode], program: str = "/sbin/reboot", returns: str = "1") -> None:
        self.nodes, self.program, self.returns, self.fate = nodes, program, returns, "boots"

    def busy(self, name: str) -> bool:  # noqa: ARG002
        """Whether jobs run on a node."""
        return False

    def resumed(self, name: str) -> None:
        """A drain is about to be ended."""

    def scontrol(self, argv: Sequence[str], _: str | None = None) -> Completed:
        """Answer one call."""
        if argv[1:3] == ["show", "config"]:
            text = f"RebootProgram           = {self.program}\nReturnToService         = {self.returns}\n"
            return Completed(0, text, "")
        name = argv[-1] if argv[1] in ("show", "reboot", "cancel_reboot") else argv[2].removeprefix("NodeName=")
        node = self.nodes[name]
        if argv[1] == "reboot":
            assert argv[2:4] == ["ASAP", "nextstate=DOWN"]
            if self.fate == "refused":
                return Completed(1, "", REFUSED)
            node.reboot = node.reboot or "REQUESTED"
        elif argv[1] == "cancel_reboot":
            assert node.reboot == "REQUESTED"
            node.reboot = ""
        elif argv[1] == "update" and argv[3] == "State=RESUME":
            self.resumed(name)
            node.drain = ""
        elif argv[1] == "update":
            node.drain = argv[4].removeprefix("Reason=")
        flags = [
            "DOWN" if node.down else "ALLOCATED" if self.busy(name) else "IDLE",
            *(["DRAIN"] if node.drained else []),
        ]
        flags += [f"REBOOT_{node.reboot}"] if node.reboot else []
        reason = f"   Reason={node.reason} [root@2026-11-28T20:46:01]\n" if node.reason else ""
        return Completed(0, f"NodeName={name} Arch=x86_64\n   State={'+'.join(flags)} Weight=1\n{reason}", "")
