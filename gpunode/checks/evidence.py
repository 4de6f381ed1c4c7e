"""On what each check was proven, and how long its data takes: the file that tests/captures/maturity.py writes."""

import json
from functools import cache
from importlib.resources import files
from typing import Literal

from gpunode.frozen import Frozen

Maturity = Literal["simulated", "recorded", "hardware"]


class Evidence(Frozen):
    """The file."""

    recorded: frozenset[str]
    """Checks that came to a verdict on a recording of a real machine."""
    hardware: frozenset[str]
    """Checks that came to a verdict on a machine with a real GPU, run by us."""
    seconds_measured_on: str | None
    seconds: dict[str, float]
    """Check to the seconds of the commands that its facts are read from."""

    def maturity(self, check_id: str) -> Maturity:
        """Return the best proof that there is."""
        if check_id in self.hardware:
            return "hardware"
        return "recorded" if check_id in self.recorded else "simulated"


@cache
def evidence() -> Evidence:
    """Return the content of the file."""
    text = files("gpunode.checks").joinpath("evidence.json").read_text(encoding="utf-8")
    return Evidence.model_validate(json.loads(text))
