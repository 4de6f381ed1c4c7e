"""The options of ``validate`` for the workload. ``workload_run``, which runs it, is slow to load."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from gpunode.cli.options import Seconds

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
    def given(self) -> list[str]:
        """Return the options that the user set."""
        values = (
            *(self.image, self.image_file, self.no_container, self.force, self.workload_timeout_s),
            *(self.image_timeout_s, self.storage, self.burn_s, self.data, self.model_rate, self.framework),
        )
        return [name for name, value in zip(NAMES, values, strict=True) if value not in (None, False)]


NAMES = (
    *("--image", "--image-file", "--no-container", "--force", "--workload-timeout", "--image-timeout"),
    *("--storage", "--burn", "--data", "--model-rate", "--workload"),
)
FRAMEWORKS = ("pytorch", "tensorflow")
"""Of the catalog's images; the first is the default."""
DEEP_ONLY = ("--storage", "--burn", "--data", "--model-rate")
WORKLOAD_TIMEOUT_S = {"standard": 900.0, "deep": 2100.0}
BURN_S = 120.0
IMAGE_TIMEOUT_S = 1800.0


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, and pass them to the command as ``workload``."""

    @functools.wraps(command)
    def with_options(*context: Any, **values: Any) -> Any:
        chosen = WorkloadOptions(
            **{name: values.pop(name) for name in WorkloadOptions.__dataclass_fields__ if name != "level"}
        )
        return command(*context, workload=chosen, **values)

    decorated: Callable[..., Any] = with_options
    for decorate in reversed(
        (
            click.option(
                "--image", metavar="IMAGE", help="Container image for the workload.  [default: from the catalog]"
            ),
            click.option(
                "--workload",
                "framework",
                type=click.Choice(FRAMEWORKS),
                help=f"Framework of the catalog's image.  [default: {FRAMEWORKS[0]}]",
            ),
            click.option(
                "--image-file",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="Archive of the image (docker save), loaded on nodes that lack it.",
            ),
            click.option("--no-container", is_flag=True, help="Run the workload with the node's own Python."),
            click.option("--force", is_flag=True, help="Also use GPUs that other processes compute on."),
            click.option(
                "--workload-timeout",
                "workload_timeout_s",
                type=Seconds(20),
                metavar="SECONDS",
                help="Time limit for the workload of a node, without its image.  [default: "
                + ", ".join(f"{limit_s:g} at level {level}" for level, limit_s in WORKLOAD_TIMEOUT_S.items())
                + ", plus what --burn exceeds its default]",
            ),
            click.option(
                "--image-timeout",
                "image_timeout_s",
                type=Seconds(20),
                metavar="SECONDS",
                help=f"Time limit for pulling or loading the image.  [default: {IMAGE_TIMEOUT_S:g}]",
            ),
            click.option(
                "--storage",
                metavar="DIR",
                help="Level deep: measure the storage of this directory on the nodes (fio, DataLoader).",
            ),
            click.option(
                "--burn",
                "burn_s",
                type=Seconds(1),
                metavar="SECONDS",
                help=f"Level deep: duration of the sustained load in seconds.  [default: {BURN_S:g}]",
            ),
            click.option(
                "--data",
                metavar="DIR",
                help="Level deep: read this directory of training data on the nodes, and name what limits the input.",
            ),
            click.option(
                "--model-rate",
                type=click.FloatRange(min=0, min_open=True, max=1e9),
                metavar="SAMPLES",
                help="Samples per second that one GPU uses, for --data.  [default: ResNet-50's for images]",
            ),
        )
    ):
        decorated = decorate(decorated)
    return decorated
