"""The options of ``validate`` for the workload. ``gpunode.workload``, which runs it, is slow to load."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import click

from gpunode.cli.options import Seconds
from gpunode.errors import UsageError

if TYPE_CHECKING:
    from gpunode.workload import WorkloadRequest

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


def read_request(options: WorkloadOptions) -> "WorkloadRequest":
    """Return the request; UsageError for options that contradict each other, and for a file that is not an image."""
    from gpunode.tuning import payload_settings  # noqa: PLC0415 (level quick does without)
    from gpunode.workload import WorkloadRequest, hides_image, read_image_file  # noqa: PLC0415 (slow to load)
    from gpunode.workload.run import image_of  # noqa: PLC0415 (the same)

    if options.image is not None and not options.image.strip():
        raise UsageError("--image: the name is empty")
    if options.framework is not None and (options.image or options.image_file or options.no_container):
        raise UsageError(
            "--workload chooses the catalog's image: --image, --image-file and --no-container name another"
        )
    if options.no_container and options.image_timeout_s is not None:
        raise UsageError("--no-container uses no image: --image-timeout cannot be combined with it")
    if options.no_container and (options.image or options.image_file):
        raise UsageError("--no-container uses no image: --image and --image-file cannot be combined with it")
    for name, directory in (("--storage", options.storage), ("--data", options.data)):
        if directory is not None and not PurePosixPath(directory).is_absolute():
            raise UsageError(f'{name}: "{directory}" is not an absolute path (example: /data)')
        if directory is not None and not options.no_container and hides_image(directory):
            raise UsageError(
                f"{name} {directory}: containers have their own directory there: choose another one, or use "
                "--no-container"
            )
    if options.model_rate is not None and options.data is None:
        raise UsageError("--model-rate applies to --data DIR: name the directory")
    if options.burn_s is not None and options.burn_s >= options.run_limit_s:
        raise UsageError(
            f"--burn {options.burn_s:g} does not fit into --workload-timeout {options.run_limit_s:g}: remove "
            f"--workload-timeout, or set at least {options.burn_s + WORKLOAD_TIMEOUT_S['deep'] - BURN_S:g}"
        )
    file = read_image_file(options.image_file) if options.image_file else None
    return WorkloadRequest(
        image=functools.partial(image_of, options.image, file, options.framework or FRAMEWORKS[0]),
        named=bool(options.image or file),
        file=file,
        in_container=not options.no_container,
        force=options.force,
        image_limit_s=options.image_limit_s,
        run_limit_s=options.run_limit_s,
        settings=payload_settings(),
        level=options.level,
        storage=options.storage,
        burn_s=options.burn_s,
        data=options.data,
        model_rate=options.model_rate,
    )
