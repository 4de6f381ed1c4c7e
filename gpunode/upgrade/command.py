"""One command that changes a fleet: its options and its goal as plain values, and the runs that belong to it."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpunode.change.adapters import scheduler_of
from gpunode.change.journal import Journal, read, runs
from gpunode.change.scheduler import Scheduler
from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.fleet.playbook import option_words
from gpunode.names import fold
from gpunode.stack import Request
from gpunode.upgrade.runs import ROLLBACK, one_at_a_time, run_to_take_back, runs_folder
from gpunode.variables import refuse_extra_variables
from gpunode.whole import exists, write_whole

PAUSE, ABORT = "pause", "abort"
"""Files in a run's folder: the run stops before its next wave, and with the second one is finished then."""
AT_TARGET, NO_PART = "already at ", "no part of "
"""Begin of the reasons of nodes that have nothing to change."""
SHARE = re.compile(r"(\d{1,3})%")
"""The size of a wave as a share of all nodes."""


def wave_sizes(text: str) -> list[str]:
    """Return the sizes of waves: numbers, and shares of all nodes. Raises UsageError."""
    sizes = [size.strip() for size in text.split(",")]
    for size in sizes:
        share = SHARE.fullmatch(size)
        if not (size.isdigit() and int(size) > 0) and not (share and 0 < int(share[1]) <= 100):
            raise UsageError(f"--waves {text}: {size or 'nothing'} is not a number or a share (example: 10%,25%)")
    return sizes


@dataclass(frozen=True)
class ChangeOptions:
    """How nodes are reached, and how carefully they are changed."""

    inventories: tuple[str, ...]
    limit: str | None
    scheduler: str
    """As ``scheduler_of`` reads it."""
    canary: int
    """Nodes, or failure domains, of the first wave."""
    waves: Sequence[str]
    """Sizes of the next waves, as ``wave_sizes`` returns them."""
    max_failed: int
    """Failed nodes that stop no wave."""
    rollback: bool
    """A node that failed gets its earlier release."""
    drain_s: float
    validate_s: float
    measure: bool
    image: str | None
    """The image that nodes are measured in; None: one of the catalog."""
    accept: str | None
    """Held nodes that are taken for what they are now, folded."""
    power_cycle: str | None
    """The program that power-cycles a node."""
    extra_vars: tuple[str, ...]
    vault_files: tuple[str, ...]
    forks: int | None
    parallel: int
    timeout_s: float

    @property
    def vault(self) -> list[str]:
        """Return the arguments of Ansible's programs for the vaults."""
        return option_words({"--vault-password-file": self.vault_files})

    @property
    def playbook_arguments(self) -> list[str]:
        """Return the arguments of ansible-playbook for vaults, variables and forks."""
        forks = [self.forks] if self.forks is not None else []
        return [*self.vault, *option_words({"--extra-vars": self.extra_vars, "--forks": forks})]


@dataclass(frozen=True)
class ChangeGoal:
    """What the nodes are to get."""

    title: str
    """Of the command: what distinguishes it from others (``--to 595``)."""
    request: Request = field(default_factory=Request)
    of_host: Mapping[str, Request] | None = None
    """The requests by host; a host without one is left out. None: ``request`` for all."""
    kept: Path | None = None
    """Folder of the run to which nodes go back: they are compared with their state before it."""
    newly_driven: Collection[str] = ()
    """Hosts of that run that had no driver before it."""

    def request_of(self, name: str) -> Request | None:
        """Return the request for one node; None for a node that the change leaves out."""
        return self.request if self.of_host is None else self.of_host.get(name)

    def reason_of(self, name: str) -> str:
        """Return why a node without a request is left out."""
        return f"it had no driver before {self.title}" if name in self.newly_driven else f"{NO_PART}{self.title}"


def rollback_goal(run_id: str | None) -> ChangeGoal:
    """Return the goal to take a run back; ``run_id`` as of ``run_to_take_back``. Raises UsageError."""
    journal = run_to_take_back(runs_folder(), run_id)
    requests = {name: Request(driver=release) for name, release in journal.record.changed.items()}
    title, bare = f"{ROLLBACK}{journal.record.run}", journal.record.newly_driven
    return ChangeGoal(title, of_host=requests, kept=journal.folder, newly_driven=bare)


class ChangeCommand:
    """Options and goal together. Raises UsageError for a scheduler or a variable that does not exist."""

    def __init__(self, options: ChangeOptions, goal: ChangeGoal) -> None:
        self.options, self.goal = options, goal
        self.scheduler: Scheduler = scheduler_of(options.scheduler)
        refuse_extra_variables(collection_root(), options.extra_vars)
        self.folder = runs_folder()

    @property
    def identity(self) -> tuple[str, ...]:
        """Return what makes two commands the same."""
        options = self.options
        paths = map(Path, options.inventories)
        sources = [str(path.absolute()) if exists(path) else str(path) for path in paths]
        words = (f"--limit {options.limit}", self.goal.title, f"--scheduler {options.scheduler}")
        return (*sources, *words, *options.extra_vars)

    def continues(self, journal: Journal) -> bool:
        """Return whether this command continues a run."""
        return journal.record.finished_at is None and journal.record.command == self.identity

    def unfinished(self, option: str) -> Journal:
        """Return the journal of this command's unfinished run. Raises UsageError, which names the option."""
        journal = next(filter(self.continues, runs(self.folder)), None)
        if journal is None:
            raise UsageError(f"{option}: no unfinished run of this command; repeat its options")
        return journal

    def stop(self, *, abort: bool) -> str:
        """Let the unfinished run stop before its next wave; return what happens to it.

        ``abort``: it is finished then; one that is not in progress is finished here. Raises UsageError.
        """
        word = ABORT if abort else PAUSE
        journal = self.unfinished(f"--{word}")
        run = journal.record.run
        write_whole(journal.folder / word, "", private=True)
        if not abort:
            return f"run {run} stops before its next wave; the same command without --pause continues"
        try:
            with one_at_a_time(self.folder):
                return _finished(read(journal.folder))
        except UsageError:
            return f"run {run} stops before its next wave and ends there"


def _finished(journal: Journal) -> str:
    """Finish a run, unless it holds nodes; return what happened to it."""
    run, held = journal.record.run, journal.record.open_nodes
    if held:
        return f"run {run} holds {fold(held)}: the same command continues, gpunode rollback goes back"
    journal.finish()
    return f"run {run} is finished"
