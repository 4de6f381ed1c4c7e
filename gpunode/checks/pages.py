"""What is shown of a check beside its declaration: why it matters, reported failures, an example, its evidence."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from gpunode.checks.actions import State
from gpunode.checks.registry import Category, Status
from gpunode.frozen import Frozen

WHY: dict[Category, str] = {
    "gpu": "A GPU that is absent, slow or faulty fails its job, and holds up all other GPUs of a collective operation.",
    "memory": "Errors of the GPU's memory end processes or damage results; a row that waits for repair fails again.",
    "nvlink": "A link that is down or retries makes all collective operations of the node as slow as itself, or hang.",
    "fabric": "Without a complete NVSwitch fabric CUDA does not start on the node's GPUs, or peers are not reached.",
    "pcie": "A link below its width or speed slows every copy between host and GPU, and the network beside it.",
    "network": "Jobs over several nodes run at the rate of the slowest port, and end if one is lost.",
    "host": "GPUs wait for the host: its memory, processors, disks and settings limit what they do.",
    "driver": "Programs find GPUs only if the module, the libraries and the packages of the driver belong together.",
    "container": "Jobs run in containers: what the engine does not pass on is missing, although the node is in order.",
}
STATES: dict[State, str] = {
    State.DRAIN: "A node that fails it should be drained.",
    State.OBSERVE: "A node that fails it can stay in service; observe it.",
    State.NONE: "A failure does not affect scheduling.",
}


class ReportedFailure(Frozen):
    """A failure of docs/failures.md that the check finds."""

    failure: str
    threads: tuple[str, ...]
    """``OWNER/REPOSITORY#NUMBER`` on GitHub."""


class ExampleFinding(Frozen):
    """A finding on simulated data with the fault."""

    status: Status
    component: str
    message: str
    expected: Any = None
    measured: Any = None
    unit: str | None = None
    source: str | None = None


class CheckPage(Frozen):
    """What the declaration of a check does not contain."""

    reported: tuple[ReportedFailure, ...] = ()
    example: ExampleFinding | None = None


@cache
def pages() -> dict[str, CheckPage]:
    """Return the pages by check; tests/contract/checks_pages.py writes the file."""
    text = files("gpunode.checks").joinpath("pages.json").read_text(encoding="utf-8")
    return {check: CheckPage.model_validate(page) for check, page in json.loads(text).items()}


Maturity = Literal["simulated", "recorded", "hardware"]


class Evidence(Frozen):
    """The content of the file."""

    recorded: frozenset[str]
    """Checks that had a result on a recording of a real machine."""
    hardware: frozenset[str]
    """Checks that had a result on a machine with a real GPU in a run of this project."""
    seconds_measured_on: str | None
    seconds: dict[str, float]
    """Seconds of the commands that provide the facts of each check."""

    def maturity(self, check_id: str) -> Maturity:
        """Return the best evidence for a check."""
        if check_id in self.hardware:
            return "hardware"
        return "recorded" if check_id in self.recorded else "simulated"


@cache
def evidence() -> Evidence:
    """Return the content of the file."""
    text = files("gpunode.checks").joinpath("evidence.json").read_text(encoding="utf-8")
    return Evidence.model_validate(json.loads(text))
