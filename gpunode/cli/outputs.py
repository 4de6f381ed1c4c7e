"""``--format`` and ``--output``: repeatable, each output belongs to the format before it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gpunode.errors import UsageError
from gpunode.report import formats
from gpunode.whole import in_place, must_not_be_redirected

STDOUT = ("-", "/dev/stdout")
"""If stdout is a file, its other name would cause that file to be replaced."""


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
        ctx.meta[__name__] = [
            (param.name, value)
            for param, value in _in_order([param for param in order if param.name in ("format", "output")], values)
        ]
        return super().parse_args(ctx, args)


def _in_order(params: list[click.Parameter], values: dict[str, Any]) -> list[tuple[click.Parameter, str]]:
    left = {name: list(values.get(name) or ()) for name in ("format", "output")}
    return [(param, left[str(param.name)].pop(0)) for param in params]


def options(command: Any) -> Any:
    """Add both options."""
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
    chosen: list[ReportOutput] = []
    taken: list[bool] = []
    for name, value in ctx.meta[__name__] or _configured(ctx):
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
