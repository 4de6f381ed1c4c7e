"""``gpunode top``: what the GPUs of many nodes do, and what slows them down."""

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gpunode.cli import selection as selection_
from gpunode.cli.options import VERBOSE_ACCEPTED, Duration, format_option
from gpunode.cli.selection import Selection, ask_password
from gpunode.errors import Exit, UsageError
from gpunode.top.model import TopDocument, csv_lines
from gpunode.top.screen import ScreenLine, View, draw, press, text_of
from gpunode.top.stream import FleetModel, Watch

ONCE_WINDOW_S = 10.0
ONCE_GRACE_S = 10.0
"""Beyond the window, for nodes that sample late."""
_UNLIMITED = 1 << 16


@click.command("top")
@selection_.options
@click.option(
    "--interval",
    type=click.IntRange(1, 60),
    default=1,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples.",
)
@click.option(
    "--window",
    type=Duration(2),
    default=30,
    show_default="30s; 10s with --once",
    metavar="DURATION",
    help="Time over which a verdict is formed.",
)
@click.option("--duration", type=Duration(1), metavar="DURATION", help="End after this time.  [default: never]")
@click.option("--once", is_flag=True, help="Sample for one window, print the result, and end.")
@format_option("console", "json", "csv", text="json, csv: a document, or rows, for each interval: gpunode schema top.")
@VERBOSE_ACCEPTED
@click.pass_context
def top_command(  # noqa: PLR0913
    ctx: click.Context,
    /,
    *,
    selection: Selection,
    interval: int,
    window: float,
    duration: float | None,
    once: bool,
    form: str,
) -> int:
    """Show the GPUs of HOSTs, of an inventory (-i), or of this machine: load, memory, power, heat, PCIe, errors, jobs.

    The column VERDICT names what slows a GPU down: docs/top.md. Nothing is installed on a node; one connection per node
    stays open, and what runs there ends with it. Exit codes: 0 every node was sampled, 2 wrong usage, 3 a node was not.

    \b
    Examples:
      gpunode top -i inventory/hosts.yml
      gpunode top -i inventory/hosts.yml --once
      gpunode top gpu-[01-16] --interval 5 --duration 5m --format json > samples.jsonl
    """
    if once and duration is not None:
        raise UsageError("--once and --duration cannot be combined: --window is the time that --once samples")
    live = form == "console" and not once
    if live and not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal: add --once, --format json, or --format csv")
    if once and ctx.get_parameter_source("window") is not ParameterSource.COMMANDLINE:
        window = ONCE_WINDOW_S
    targets = selection.targets()
    password = ask_password() if selection.ask_become_pass else None
    model = FleetModel([target.name for target in targets], interval, max(window, 2.0 * interval))
    watch = Watch(
        targets,
        model,
        parallel=selection.parallel,
        timeout_s=selection.timeout_s,
        become_password=password,
        again=not once,
    )
    with _ended_by_signals(), watch:
        if live and not _console().is_dumb_terminal:
            document = _screen(model, duration)
        elif once:
            document = _settled(model, selection.timeout_s)
            _write(document, form, header=True)
        else:
            # Also on a terminal that cannot move its cursor: a table for each interval.
            document = _recorded(model, form, duration)
    return Exit.GOOD if all(node.status == "live" for node in document.nodes) else Exit.UNDETERMINED


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End as on Ctrl-C, with the connections closed."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _settled(model: FleetModel, timeout_s: float) -> TopDocument:
    """Return the document once each node failed, or was sampled for a window; or after the time for both."""
    live: dict[str, float] = {}
    deadline = time.monotonic() + timeout_s + model.window_s + ONCE_GRACE_S
    while True:
        document, now = model.snapshot(), time.monotonic()
        for node in document.nodes:
            if node.status == "live":
                live.setdefault(node.host, now)
        waiting = [
            node
            for node in document.nodes
            if node.status == "connecting" or (node.status == "live" and now - live[node.host] < model.window_s)
        ]
        if not waiting or now > deadline:
            return document
        time.sleep(0.2)


def _recorded(model: FleetModel, form: str, duration: float | None) -> TopDocument:
    """Write a document for each interval; return the last one."""
    started = time.monotonic()
    number = 0
    while True:
        number += 1
        due = started + number * model.interval_s
        time.sleep(max(0.0, due - time.monotonic()))
        document = model.snapshot()
        _write(document, form, header=number == 1)
        if duration is not None and due + model.interval_s > started + duration:
            return document


def _write(document: TopDocument, form: str, *, header: bool) -> None:
    if form == "json":
        click.echo(document.as_json())
    elif form == "csv":
        click.echo(csv_lines(document, header=header), nl=False)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED
        console = _console(width)
        for line in text_of(document, width):
            console.print(_text([line]), soft_wrap=True)
    sys.stdout.flush()


def _console(width: int | None = None) -> Console:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return Console(no_color=not colour, highlight=False, markup=False, emoji=False, width=width)


def _text(lines: list[ScreenLine]) -> Text:
    return Text("\n").join(Text(line.text, style=line.style, no_wrap=True) for line in lines)


def _screen(model: FleetModel, duration: float | None) -> TopDocument:
    """Show the screen until somebody ends it; return the last document."""
    view = View()
    console = _console()
    ends = None if duration is None else time.monotonic() + duration
    document = model.snapshot()
    with _keys() as read, Live(console=console, screen=True, auto_refresh=False) as shown:
        while ends is None or time.monotonic() < ends:
            if not view.paused:
                document = model.snapshot()
            shown.update(_text(draw(document, view, console.width, console.height)), refresh=True)
            until = time.monotonic() + 0.5 * model.interval_s
            for key in read(min(max(0.2, until - time.monotonic()), 1.0)):
                if not press(view, key):
                    return document
    return document


@contextmanager
def _keys() -> "Iterator[KeyReader]":
    """Yield a reader of keys; without a terminal on stdin it only waits."""
    if not sys.stdin or not sys.stdin.isatty():
        yield KeyReader(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield KeyReader(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class KeyReader:
    """KeyReader of a terminal without echo; an arrow is one key of several characters."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, timeout_s: float) -> Iterator[str]:
        """Yield the keys that are pressed within a time, which the first one ends."""
        if self._descriptor is None:
            time.sleep(timeout_s)
            return
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return
        data = os.read(self._descriptor, 64).decode(errors="replace")
        if not data:
            # The terminal is gone.
            raise KeyboardInterrupt
        while data:
            size = 1
            if data.startswith("\x1b["):
                size = next(
                    (index + 1 for index, char in enumerate(data) if index > 1 and "@" <= char <= "~"), len(data)
                )
            yield data[:size]
            data = data[size:]
