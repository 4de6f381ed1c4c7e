"""What is requested of the workload on nodes, as plain values; ``run`` makes a request of it, and is slow to load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

END_S = 3.0
"""Seconds between the launcher's limit and the node's, for the launcher to report what was not done in time."""
BETWEEN_S = 60.0
"""For all requests to an engine other than the image and the run."""


@dataclass(frozen=True)
class WorkloadOptions:
    """The workload options of the command line."""

    image: str | None = None
    image_file: Path | None = None
    no_container: bool = False
    python: str | None = None
    force: bool = False
    workload_timeout_s: float | None = None
    image_timeout_s: float | None = None
    storage: str | None = None
    burn_s: float | None = None
    data: str | None = None
    model_rate: float | None = None
    framework: str | None = None
    level: Literal["standard", "deep"] = "standard"

    @property
    def run_limit_s(self) -> float:
        """Return how long a node's workload may run; a longer sustained load than the default extends it."""
        longer_s = max(0.0, (self.burn_s or 0.0) - BURN_S)
        return self.workload_timeout_s or WORKLOAD_TIMEOUT_S[self.level] + longer_s

    @property
    def image_limit_s(self) -> float:
        """Return how long pulling or loading its image may take."""
        return self.image_timeout_s or IMAGE_TIMEOUT_S

    @property
    def limit_s(self) -> float:
        """Return how long both may take on a node; a run without a container has no image."""
        return self.run_limit_s + END_S + (0.0 if self.no_container else self.image_limit_s + BETWEEN_S)

    @property
    def set_by_user(self) -> list[str]:
        """Return the options that the user set."""
        return [option for field, option in NAMES.items() if getattr(self, field) not in (None, False)]


NAMES = {
    "image": "--image",
    "image_file": "--image-file",
    "no_container": "--no-container",
    "python": "--python",
    "force": "--force",
    "workload_timeout_s": "--workload-timeout",
    "image_timeout_s": "--image-timeout",
    "storage": "--storage",
    "burn_s": "--burn",
    "data": "--data",
    "model_rate": "--model-rate",
    "framework": "--workload",
}
"""Field to option: all that a user sets; the level has its own rules."""
FRAMEWORKS = ("pytorch", "tensorflow")
"""Of the catalog's images; the first is the default."""
DEEP_ONLY = ("--storage", "--burn", "--data", "--model-rate")
WORKLOAD_TIMEOUT_S = {"standard": 900.0, "deep": 2100.0}
BURN_S = 120.0
IMAGE_TIMEOUT_S = 1800.0
