"""Selection of nodes for a verb, and collecting from them: shared by ``validate`` and ``collect``."""

import functools
import getpass
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpunode.cli.options import ASK_BECOME_PASS, INVENTORY, LIMIT, PARALLEL, QUIET, TIMEOUT, quiet
from gpunode.cli.verbs import loading
from gpunode.errors import UsageError
from gpunode.names import fold
from gpunode.text import printable

if TYPE_CHECKING:
    from gpunode.fleet import Collected, Target, Then


@dataclass(frozen=True)
class Selection:
    """Nodes named on the command line, and how to collect from them."""

    hosts: tuple[str, ...]
    inventories: tuple[str, ...]
    limit: str | None
    parallel: int
    timeout_s: float
    ask_become_pass: bool

    def targets(self) -> "list[Target]":
        """Return the nodes; this machine if none is named. Raises UsageError."""
        with loading():
            from gpunode import fleet  # noqa: PLC0415 (slow to load, and a replay does without)

        if self.hosts and self.inventories:
            raise UsageError(
                f"{self.hosts[0]}: hosts and -i cannot be combined; choose hosts of an inventory with --limit"
            )
        if self.limit is not None and not self.inventories:
            raise UsageError("--limit needs an inventory: -i INVENTORY")
        if self.inventories:
            return fleet.targets_from_inventory(self.inventories, self.limit)
        if self.hosts:
            return fleet.targets_from_hosts(self.hosts)
        return [fleet.local_target()]

    def collect(
        self, then: "Callable[[NodeProgress], Then] | None" = None, targets: "list[Target] | None" = None
    ) -> "Iterator[Collected]":
        """Yield the result of each node, in order of arrival.

        ``targets`` are the nodes if they were read already. ``then`` creates the work after the probe on each node.
        Progress goes to stderr if that is a terminal.
        """
        from gpunode import fleet  # noqa: PLC0415

        targets = self.targets() if targets is None else targets
        password = ask_password() if self.ask_become_pass else None
        with shown_progress([target.name for target in targets]) as shown:
            answers = fleet.collect(
                targets,
                parallel=self.parallel,
                timeout_s=self.timeout_s,
                become_password=password,
                then=then(shown.step) if then else None,
            )
            for answer in answers:
                shown(answer.host)
                yield answer


LINE_EVERY_S = 30.0
NodeProgress = Callable[[str, str], None]
"""Called with a node's name and the current step there."""


class Shown:
    """Progress display: this base class shows nothing."""

    def __call__(self, name: str) -> None:
        """Count a node that has answered."""

    def step(self, name: str, text: str) -> None:
        """Show the current step at a node."""


class _Counted(Shown):
    def __init__(self, show: Callable[[str], None], names: Sequence[str], doing: str) -> None:
        self._show = show
        self._verb = doing
        self._waiting = set(names)
        self._nodes = len(names)
        self._doing: dict[str, str] = {}

    def __call__(self, name: str) -> None:
        self._waiting.discard(name)
        self._doing.pop(name, None)
        self._update()

    def step(self, name: str, text: str) -> None:
        self._doing[name] = text
        self._update()

    def _update(self) -> None:
        line = progress(self._waiting, self._nodes, self._verb)
        latest = [f"{name}: {text}" for name, text in list(self._doing.items())[-1:]]
        self._show(printable("; ".join([line, *latest])))


@contextmanager
def shown_progress(names: Sequence[str], doing: str = "collecting") -> Iterator[Shown]:
    """Yield a line on stderr: how many nodes have answered, at the end which have not, and the last step of one.

    In a pipe and with NO_COLOR it is a new line, at most every LINE_EVERY_S.
    """
    if not names or quiet():
        yield Shown()
        return
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ:
        yield _Counted(_Lines(), names, doing)
        return
    from rich.console import Console  # noqa: PLC0415 (slow to load, and only a terminal needs it)
    from rich.markup import escape  # noqa: PLC0415 (the same)

    with Console(stderr=True).status(progress(set(names), len(names), doing)) as status:
        yield _Counted(lambda text: status.update(escape(text)), names, doing)


class _Lines:
    """Lines of progress on stderr, the first after LINE_EVERY_S."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._printed + LINE_EVERY_S:
            self._printed = time.monotonic()
            click.echo(f"gpunode: {text}", err=True)


def progress(waiting: Collection[str], nodes: int, doing: str = "collecting") -> str:
    """Return the progress, with the names of the last few, so that a hanging node is known before its time is over."""
    line = f"{doing}: {nodes - len(waiting)} of {nodes} nodes"
    return f"{line}, waiting for {fold(waiting)}" if 0 < len(waiting) <= min(8, nodes - 1) else line


OF_ASKING = {
    "inventories": "-i",
    "limit": "--limit",
    "parallel": "--parallel",
    "timeout_s": "--timeout",
    "ask_become_pass": "-K",
}
"""Options that select nodes and the connection to them."""


def refuse_asking(why: str, but: Collection[str] = ()) -> None:
    """Raise UsageError if one of them was given, even with its default: it would be accepted and ignored.

    ``but``: parameters that have an effect nevertheless.
    """
    source = click.get_current_context().get_parameter_source
    names = {name: option for name, option in OF_ASKING.items() if name not in but}
    options = [option for name, option in names.items() if source(name) is ParameterSource.COMMANDLINE]
    if options:
        raise UsageError(f"{why}: {', '.join(options)} cannot be combined with it")


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that make up a Selection, and hand it to the command as ``selection``."""

    @functools.wraps(command)
    def with_selection(*context: Any, **values: Any) -> Any:
        chosen = Selection(**{field.name: values.pop(field.name) for field in fields(Selection)})
        return command(*context, selection=chosen, **values)

    decorated: Callable[..., Any] = with_selection
    for decorate in reversed(
        (
            click.argument("hosts", metavar="[HOST]...", nargs=-1),
            INVENTORY,
            LIMIT,
            PARALLEL,
            TIMEOUT,
            ASK_BECOME_PASS,
            QUIET,
        )
    ):
        decorated = decorate(decorated)
    return decorated


def ask_password() -> str:
    """Read the password of sudo from the terminal without echo; raise UsageError if there is no terminal."""
    try:
        with Path("/dev/tty").open("r+b", buffering=0):
            pass
    except OSError:
        raise UsageError("-K: no terminal to ask for the password: store it in a vault") from None
    return getpass.getpass("BECOME password: ", stream=sys.stderr if sys.stderr.isatty() else None)
