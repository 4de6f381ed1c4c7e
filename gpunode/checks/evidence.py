"""Evidence for each check, and the time to collect its data: the file that tests/captures/maturity.py writes."""

import json
from functools import cache
from importlib.resources import files
from typing import Literal

from gpunode.frozen import Frozen

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
