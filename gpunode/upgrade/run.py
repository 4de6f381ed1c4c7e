"""A command at work on a fleet: it continues its unfinished run, or plans a new one."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpunode.change.journal import FINAL, ChangeState, Journal, RunRecord, runs
from gpunode.change.run import ChangeRun, RunLimits
from gpunode.content import collection_root
from gpunode.errors import Exit, GpunodeError, UsageError
from gpunode.fleet import process
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.locks import refuse_inventory
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.policy import PolicyReader, today
from gpunode.judging.request import JudgingRequest
from gpunode.names import expand, fold
from gpunode.text import last_line
from gpunode.upgrade.command import ABORT, PAUSE, ChangeCommand
from gpunode.upgrade.looks import EXTRACTS, Connections, Progress, copy_before, look_at, write_before
from gpunode.upgrade.nodes import AnsibleNodes
from gpunode.upgrade.plan import AS_THEY_SHOULD_BE, PlannedRun, held_nodes, image_of_run, planned
from gpunode.upgrade.runs import one_at_a_time, owner
from gpunode.whole import make_private_folder
from gpunode.workload.options import WorkloadOptions
from gpunode.workload.run import read_request

POWER_S = 300.0
"""Limit of one call of ``--power-cycle``."""


@dataclass(frozen=True)
class ChangeOutcome:
    """What became of a run."""

    record: RunRecord
    stopped: str
    """Why it stopped before its last wave; empty: it did not."""
    not_measured: Collection[str]
    """Nodes that were compared without figures, although figures were requested."""


@contextmanager
def change_fleet(
    command: ChangeCommand,
    progress: Callable[[Sequence[str]], AbstractContextManager[Progress]],
    ask_password: Callable[[], str] | None = None,
) -> Iterator["FleetChange"]:
    """Yield the change that the command makes: a run, planned or to be continued, on which nothing was done yet.

    The lease of the controller is held meanwhile. ``progress`` shows looks at nodes; ``ask_password`` asks for the
    password of sudo, where one is needed. Raises UsageError.
    """
    options = command.options
    inventory, config = read_with_settings(options.inventories, options.limit, SETTINGS, options.vault)
    refuse_inventory(collection_root(), inventory)
    connections = Connections(
        targets={target.name: target for target in targets(inventory, config)},
        inventories=options.inventories,
        parallel=options.parallel,
        timeout_s=options.timeout_s,
        password=ask_password() if ask_password is not None else None,
        arguments=options.playbook_arguments,
        progress=progress,
    )
    policies = PolicyReader(None, today())
    for target in connections.targets.values():
        policies.add(target.name, target.policy)
    # A look is judged as quick, and one with measurements as standard: by what was collected.
    judging = JudgingRequest(policies=policies.by_host, extracts=EXTRACTS)
    with one_at_a_time(command.folder), Evaluator(judging) as evaluator:
        if options.measure:
            read_request(WorkloadOptions(image=options.image))  # raises UsageError before anything is done
        yield FleetChange(command, inventory, connections, evaluator)


class FleetChange:
    """One run of a command."""

    def __init__(
        self, command: ChangeCommand, inventory: Inventory, connections: Connections, evaluator: Evaluator
    ) -> None:
        self._command, self._connections, self._evaluator = command, connections, evaluator
        journals = list(runs(command.folder))
        self.earlier = [journal.record for journal in journals]
        """The runs so far."""
        self.planned: PlannedRun | None = None
        """The plan of a new run; None: a run continues."""
        unfinished = next(filter(command.continues, journals), None)
        if unfinished is not None:
            for word in (PAUSE, ABORT):
                (unfinished.folder / word).unlink(missing_ok=True)
            self._journal = unfinished
            return
        looks = look_at(connections, evaluator, connections.targets)
        self.planned = planned(command, inventory, looks, held_nodes(journals))
        self._journal = Journal(command.folder / self.planned.record.run, self.planned.record)

    @property
    def record(self) -> RunRecord:
        """Return the record of the run."""
        return self._journal.record

    def run(self, say: Callable[[str, RunRecord], None]) -> ChangeOutcome:
        """Do what is left of the run. ``say`` gets each step with the record. Raises UsageError."""
        journal, options = self._journal, self._command.options
        if self.planned is not None:
            _begin(journal, self.planned, self._command.goal.kept)
        missing = sorted(set(journal.record.nodes) - set(self._connections.targets))
        if missing:
            raise UsageError(f"run {journal.record.run} has {missing[0]}, which the inventory no longer has")
        if self.planned is None and options.measure:
            look = partial(look_at, self._connections, self._evaluator, list(journal.record.nodes))
            journal.measure_in(image_of_run(options.image, journal.record, look))
        if options.accept is not None:
            self._accept(expand(options.accept))
        nodes = self._nodes()
        limits = RunLimits(
            drain_s=options.drain_s,
            validate_s=options.validate_s,
            most_failed=options.max_failed,
            rollback=options.rollback,
        )
        run = ChangeRun(
            journal,
            nodes,
            self._command.scheduler,
            limits,
            stops=self._stops,
            power_cycle=partial(power_cycled, options.power_cycle) if options.power_cycle else None,
            say=lambda text: say(text, journal.record),
        )
        try:
            stopped = run.run()
        except KeyboardInterrupt:
            say("interrupted: drained nodes stay drained; the same command continues", journal.record)
            raise
        if not journal.record.open_nodes and not stopped.startswith("paused"):
            journal.finish()
        return ChangeOutcome(journal.record, stopped, nodes.not_measured)

    def _nodes(self) -> AnsibleNodes:
        options, goal = self._command.options, self._command.goal
        return AnsibleNodes(
            self._connections,
            self._evaluator,
            self._journal.folder,
            owner(),
            way_back=options.rollback,
            kept=goal.kept.name if goal.kept is not None else "",
            image=(self.record.image or "") if options.measure else "",
            scheduler=options.scheduler,
        )

    def _stops(self) -> str:
        """Return why no further wave begins."""
        if (self._journal.folder / ABORT).exists():
            return "aborted"
        return "paused" if (self._journal.folder / PAUSE).exists() else ""

    def _accept(self, names: Sequence[str]) -> None:
        """Take what held nodes are now for what they were before the change. Raises UsageError."""
        held = [name for name, node in self.record.nodes.items() if node.state is ChangeState.HELD]
        wrong = sorted(set(names) - set(held))
        if wrong:
            raise UsageError(f"--accept {wrong[0]}: not held by this run; it holds {fold(held) or 'no node'}")
        looks = look_at(self._connections, self._evaluator, names)
        for name in names:
            if looks[name].snapshot is None:
                raise UsageError(f"--accept {name}: {looks[name].reason}")
        write_before(self._journal.folder, looks)


def _begin(journal: Journal, planned: PlannedRun, kept: Path | None) -> None:
    """Write the journal of a new run, with the state of each node before; take over nodes that earlier runs hold.

    ``kept``: the folder of the run to which nodes go back.
    """
    nodes, held = planned.record.nodes, planned.held
    make_private_folder(journal.folder)
    write_before(journal.folder, {name: planned.looks[name] for name in nodes})
    for name in nodes:
        # Compared with the state before the first change, not with what is left of it.
        origin = kept or (held[name][0].folder if name in held else None)
        if origin is not None:
            copy_before(origin, journal.folder, name)
    journal.write()
    for earlier in {holder.folder: holder for holder, _ in held.values()}.values():
        earlier.give(set(earlier.record.nodes) & set(nodes))


def power_cycled(program: str, name: str) -> str:
    """Run the site's program for one node; return why it failed."""
    try:
        done = process.run([program, name], timeout_s=POWER_S)
    except GpunodeError as err:
        return str(err)
    return "" if done.rc == 0 else f"{program} {name}: {last_line(done.stderr or done.stdout) or done.rc}"


def exit_code_of(record: RunRecord, stopped: str = "") -> Exit:
    """Return the exit code of a run, or of a plan; ``stopped``: why the run stopped before its last wave."""
    nodes = record.nodes.values()
    if stopped:
        return Exit.FAILED
    if any(node.state is ChangeState.ROLLED_BACK or (node.reason and node.state not in FINAL) for node in nodes):
        return Exit.FAILED
    if record.finished_at and any(node.state not in FINAL for node in nodes):
        return Exit.FAILED
    lost = any(not reason.startswith(AS_THEY_SHOULD_BE) for reason in record.left_out.values())
    return Exit.UNDETERMINED if lost else Exit.GOOD
