"""The document of ``gpunode profile``."""

from typing import Literal

from pydantic import Field

from gpunode.frozen import FrozenByName
from gpunode.profiling.patterns import ProfilePattern


class ProfileDocument(FrozenByName):
    """The document ``gpunode.profile/1``."""

    schema_name: Literal["gpunode.profile/1"] = Field("gpunode.profile/1", alias="schema")
    tool: Literal["nsys", "torch", "py-spy"]
    seconds: float
    """Of the whole command."""
    exit_code: int | None
    """None: it was interrupted at the time limit."""
    signal: int | None
    steps: int
    """Recorded ones; 0 for tools that record the whole run."""
    torch: str | None
    """Version."""
    patterns: tuple[ProfilePattern, ...]
    utilization_percent: tuple[float, ...]
    """Samples of all GPUs, one each second; empty: no nvidia-smi."""
    trace: str | None
    checked: tuple[str, ...]
    """Versions and permissions, before the run."""
    remarks: tuple[str, ...]
