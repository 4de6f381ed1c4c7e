"""The options of ``validate`` for the workload."""

import functools
from collections.abc import Callable
from typing import Any

import click

from gpunode.cli.options import IMAGE_FILE, NO_CONTAINER, Seconds, image_option
from gpunode.workload.options import BURN_S, FRAMEWORKS, IMAGE_TIMEOUT_S, WORKLOAD_TIMEOUT_S, WorkloadOptions


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
            image_option(),
            click.option(
                "--workload",
                "framework",
                type=click.Choice(FRAMEWORKS),
                help=f"Framework of the catalog's image.  [default: {FRAMEWORKS[0]}]",
            ),
            IMAGE_FILE,
            NO_CONTAINER,
            click.option(
                "--python",
                metavar="PATH",
                help="With --no-container: the Python on the nodes that has the framework: /opt/venv/bin/python3.",
            ),
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
