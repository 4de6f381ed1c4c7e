"""Options that several verbs share: the same name has the same meaning everywhere."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from gpunode.cli.completing import complete_checks
from gpunode.cli.settings import origin_of
from gpunode.text import printable

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


class NodesOption(click.Option):
    """An option that selects nodes: a configured value gives way to other nodes of the command line."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if source is not ParameterSource.COMMANDLINE and any(_is_set(opts.get(name)) for name in OTHER_NODES):
            return (() if self.multiple else None), ParameterSource.DEFAULT
        return value, source


OTHER_NODES = (
    *("hosts", "bundles", "replay", "gpus", "platform", "system", "diff", "on_node", "print_probe", "listing"),
    *("run", "resume", "records", "dumps"),
)
"""Parameters that name nodes themselves, or that need none."""


def _is_set(value: Any) -> bool:
    return len(value) > 0 if isinstance(value, list | tuple) else isinstance(value, str) or value is True


def _name_inventory(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Print a configured inventory and its origin: what a verb acts on must be visible."""
    origin = origin_of(ctx, param)
    if value and origin is not None and not ctx.resilient_parsing and not ctx.meta.get(__name__):
        click.echo(printable(f"gpunode: -i {' '.join(value)} ({origin})"), err=True)
    return value


def inventory_option(*, required: bool = False) -> Callable[[Command], Command]:
    """Return -i. Without it, a configured inventory is used."""
    return click.option(
        "-i",
        "--inventory",
        "inventories",
        cls=NodesOption,
        multiple=True,
        required=required,
        callback=_name_inventory,
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
    shell_complete=complete_checks,
    help="Run only these checks: ids, or patterns such as 'host.*'.",
)
SKIP = click.option(
    "--skip",
    "skipped",
    multiple=True,
    metavar="ID[,ID]",
    shell_complete=complete_checks,
    help="Skip these checks, in the same form.",
)
QUIET = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, _, requested: ctx.meta.update({__name__: requested}),
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
    return context is not None and bool(context.meta.get(__name__))


STRICT = click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
VERBOSE_ACCEPTED = click.option(
    "-v", "--verbose", is_flag=True, hidden=True, expose_value=False, help="Accepted, without effect."
)
"""Every verb accepts -v."""
