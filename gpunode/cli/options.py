"""Options that several verbs share, or all forms of a verb: the same name has the same meaning everywhere."""

import functools
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from gpunode.cli.settings import QUIET_KEY, NodesOption, name_inventory
from gpunode.errors import UsageError
from gpunode.whole import in_place, must_not_be_redirected
from gpunode.workload.options import BURN_S, FRAMEWORKS, IMAGE_TIMEOUT_S, WORKLOAD_TIMEOUT_S, WorkloadOptions

Command = TypeVar("Command", bound=Callable[..., Any])
LONGEST_S = 7 * 24 * 3600
"""Longer than any node's work, and within the range of clocks."""


class Seconds(click.FloatRange):
    """A time limit of at least ``least_s``; ``nan``, which is within every range, is refused."""

    def __init__(self, least_s: float) -> None:
        super().__init__(min=least_s, max=LONGEST_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f'"{value}" is not a number of seconds (example: 90).', param, ctx)
        return super().convert(number, param, ctx)


class Duration(Seconds):
    """A time limit that may have a unit: ``5``, ``5s``, ``2m``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|)", str(value))
        if match is None:
            self.fail(f'"{value}" is not a duration (examples: 5, 5s, 2m).', param, ctx)
        return super().convert(float(match[1]) * (60 if match[2] == "m" else 1), param, ctx)


def inventory_option(*, required: bool = False) -> Callable[[Command], Command]:
    """Return -i. Without it, a configured inventory is used."""
    return click.option(
        "-i",
        "--inventory",
        "inventories",
        cls=NodesOption,
        multiple=True,
        required=required,
        callback=name_inventory,
        metavar="INVENTORY",
        help="Ansible inventory.  [repeatable]",
    )


def format_option(*choices: str, text: str | None = None) -> Callable[[Command], Command]:
    """Return --format; the first choice is the default."""
    return click.option(
        "--format", "form", type=click.Choice(choices), default=choices[0], show_default=True, help=text
    )


def output_option(text: str, *, metavar: str = "FILE", required: bool = False) -> Callable[[Command], Command]:
    """Return --output, of verbs that write one file or folder."""
    return click.option("--output", type=click.Path(path_type=Path), metavar=metavar, required=required, help=text)


def verbose_option(text: str) -> Callable[[Command], Command]:
    """Return -v, with its effect in this verb."""
    return click.option("-v", "--verbose", is_flag=True, help=text)


def image_option(
    text: str = "Container image for the workload.  [default: from the catalog]",
) -> Callable[[Command], Command]:
    """Return --image."""
    return click.option("--image", metavar="IMAGE", help=text)


def history_option(text: str = "yes", *, default: bool | None = None) -> Callable[[Command], Command]:
    """Return --history; ``text`` is its default in words."""
    return click.option(
        "--history/--no-history", default=default, help=f"Save this run: gpunode history --help.  [default: {text}]"
    )


FORMAT = format_option("console", "json")
INVENTORY = inventory_option()
LIMIT = click.option("-l", "--limit", cls=NodesOption, metavar="PATTERN", help="Ansible host pattern.")
PARALLEL = click.option(
    "--parallel",
    type=click.IntRange(1, 1000),
    default=32,
    show_default=True,
    help="Number of nodes to process in parallel.",
)
TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(1),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for connecting to and probing each node. With more than the default, each tool on a slow node has "
    "more time too.",
)
ASK_BECOME_PASS = click.option("-K", "--ask-become-pass", is_flag=True, help="Ask once for the sudo password.")
REPLAY = click.option(
    "--replay", is_flag=True, help="The arguments are saved bundles or directories of bundles; no node is contacted."
)
IMAGE_FILE = click.option(
    "--image-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Archive of the image (docker save), loaded on nodes that lack it.",
)
NO_CONTAINER = click.option("--no-container", is_flag=True, help="Run the workload with the node's own Python.")
SAVE = click.option("--save", type=click.Path(path_type=Path), metavar="DIR", help="Save the bundles as DIR/HOST.json.")
BASELINE = click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Report of --format json of an earlier run; measured figures are compared with those of the same node.",
)
OVERLAY = click.option(
    "--overlay", "overlays", multiple=True, metavar="FILE", help="Overlay a site catalog file.  [repeatable]"
)
EXTRA_VARS = click.option(
    "-e", "--extra-vars", multiple=True, metavar="KEY=VALUE|@FILE", help="Variables with the highest precedence."
)
VAULT_PASSWORD_FILE = click.option(
    "--vault-password-file", "vault_files", multiple=True, metavar="FILE", help="File with the vault password."
)
FORKS = click.option(
    "-f", "--forks", type=click.IntRange(min=1), metavar="N", help="Nodes that Ansible processes in parallel."
)
EXPECT = click.option(
    "--expect",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file with the expected properties of the nodes.",
)


def policy_option(more: str = "") -> Callable[[Command], Command]:
    """Return --policy; ``more`` follows its help."""
    return click.option(
        "--policy",
        "policy_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"YAML file with limits, checks to mute or observe, and site checks.{more}",
    )


SELECT = click.option(
    "--select",
    "selected",
    multiple=True,
    metavar="ID[,ID]",
    help="Run only these checks: ids, or patterns such as 'host.*'.",
)
SKIP = click.option(
    "--skip",
    "skipped",
    multiple=True,
    metavar="ID[,ID]",
    help="Skip these checks, in the same form.",
)
QUIET = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, _, requested: ctx.meta.update({QUIET_KEY: requested}),
    help="Print no progress on stderr; problems are printed.",
)
NO_COLOR = click.Option(
    ["--no-color"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda _ctx, _, requested: os.environ.update({"NO_COLOR": "1"} if requested else {}),
    help="Print without colours, as with NO_COLOR=1.",
)
"""An option of every verb."""


def quiet() -> bool:
    """Return whether the running verb has -q."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET_KEY))


STRICT = click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
VERBOSE_ACCEPTED = click.option(
    "-v", "--verbose", is_flag=True, hidden=True, expose_value=False, help="Accepted, without effect."
)
"""Every verb accepts -v."""


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of validate for the workload, and pass them to the command as ``workload``."""

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


STDOUT = ("-", "/dev/stdout")
"""If stdout is a file, its other name would cause that file to be replaced."""
OUTPUTS = "gpunode.outputs"
"""Key of what a context keeps of the command line."""


@dataclass(frozen=True)
class ReportOutput:
    """One rendering of a report; ``path`` None is stdout."""

    format: str
    path: Path | None


class CommandWithOutputs(click.Command):
    """Command that passes ``--format``/``--output`` on as ``outputs``, in the order of the command line.

    Click keeps the order within an option and loses it between two; its parser still has it.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, _, order = self.make_parser(ctx).parse_args(list(args))
        left = {name: list(values.get(name) or ()) for name in ("format", "output")}
        ctx.meta[OUTPUTS] = [(param.name, left[param.name].pop(0)) for param in order if param.name in left]
        return super().parse_args(ctx, args)


def output_options(command: Any) -> Any:
    """Add ``--format`` and ``--output``, repeatable: each output belongs to the format before it."""
    from gpunode.report import formats  # noqa: PLC0415 (what judges is slow to load, and most verbs do without)

    command = click.option(
        "--output", multiple=True, metavar="FILE", help="File for the preceding --format; - is stdout.  [repeatable]"
    )(command)
    return click.option(
        "--format",
        type=click.Choice(formats.NAMES),
        multiple=True,
        help="Report format.  [repeatable; default: console]",
    )(command)


def outputs(ctx: click.Context) -> list[ReportOutput]:
    """Return the formats and their files. Raises UsageError: an output without a format, one file twice, no such
    folder.
    """
    from gpunode.report import formats  # noqa: PLC0415 (the same)

    chosen: list[ReportOutput] = []
    taken: list[bool] = []
    for name, value in ctx.meta[OUTPUTS] or _configured(ctx):
        if name == "format":
            chosen.append(ReportOutput(value, None))
            taken.append(False)
            continue
        if not chosen or taken[-1]:
            raise UsageError(f"--output {value}: put its --format first: --format json --output {value}")
        chosen[-1] = ReportOutput(chosen[-1].format, None if value in STDOUT else Path(value))
        taken[-1] = True
    chosen = chosen or [ReportOutput("console", None)]
    places = [output.path for output in chosen]
    if places.count(None) > 1:
        raise UsageError("two formats for stdout: add --output FILE to one of them")
    for output in chosen:
        if output.path is None and output.format in formats.NOT_FOR_TERMINALS and sys.stdout.isatty():
            raise UsageError(f"--format {output.format}: stdout is a terminal; add --output FILE")
    for path in places:
        if path is not None:
            _must_be_writable(path)
            if places.count(path) > 1:
                raise UsageError(f"--output {path}: used for two formats")
    return chosen


def _configured(ctx: click.Context) -> list[tuple[str, str]]:
    """Return formats and outputs that a file or variable sets: the first output belongs to the first format."""
    formats_, files = (list(ctx.params.get(name) or ()) for name in ("format", "output"))
    pairs = ((("format", form), *(("output", file) for file in files[at : at + 1])) for at, form in enumerate(formats_))
    return [each for pair in pairs for each in pair]


def _must_be_writable(path: Path) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"--output {path}: is a folder")
        must_not_be_redirected(path, "--output")
        special = in_place(path)
        folder = path.resolve().parent
    except OSError as err:
        raise UsageError(f"--output {path}: {err.strerror}") from None
    if special and not os.access(path, os.W_OK):
        raise UsageError(f"--output {path}: not writable")
    if special:
        return
    if not folder.is_dir():
        raise UsageError(f"--output {path}: directory {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output {path}: {folder} is not writable")
