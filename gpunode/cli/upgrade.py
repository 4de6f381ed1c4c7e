"""``gpunode upgrade``: a fleet's driver, by canary and waves."""

import fcntl
import getpass
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click

from gpunode.catalog import load
from gpunode.change.adapters import scheduler_of
from gpunode.change.journal import Journal, NodeRecord, RunRecord, new_token, now, runs
from gpunode.change.run import ChangeRun, RunLimits
from gpunode.change.scheduler import Availability, Scheduler, SchedulerError
from gpunode.change.states import FINAL, OUT_OF_SERVICE, ChangeState
from gpunode.cli.inventories import explained
from gpunode.cli.options import ASK_BECOME_PASS, LIMIT, PARALLEL, TIMEOUT, Seconds
from gpunode.cli.plan import driver_request
from gpunode.cli.plan_fleet import with_request
from gpunode.cli.provision import refuse_extra_variables, refuse_inventory
from gpunode.cli.selection import ask_password
from gpunode.cli.upgrade_nodes import EXTRACTS, AnsibleNodes, Connections, NodeLook, look_at, write_before
from gpunode.cli.upgrade_text import plan_lines, report_lines
from gpunode.cli.writing import write_whole
from gpunode.content import collection_root
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.history.store import HistoryError, state_folder
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.policy import PolicyReader, today
from gpunode.judging.request import JudgingRequest
from gpunode.stack import LOCK_NAME, Plan, PlanHost, Request, plan
from gpunode.text import printable
from gpunode.whole import make_private_folder

PAUSE = "pause"
"""File in a run's folder: the run stops before its next wave."""
AT_TARGET = "already at "
_SHARE = re.compile(r"(\d{1,3})%")


@click.command("upgrade")
@click.option("-i", "--inventory", "inventories", multiple=True, required=True, metavar="INVENTORY", help="Repeatable.")
@LIMIT
@click.option("--to", metavar="REQUEST", help="Driver, as in gpunode plan --driver.  [default: the inventory's]")
@click.option(
    "--scheduler",
    required=True,
    metavar="KIND",
    help="What hands out work to the nodes: none, slurm, kubernetes, or command:PROGRAM.",
)
@click.option("--canary", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the first wave.")
@click.option("--waves", default="10%,25%", show_default=True, help="Sizes of the next waves; the last one repeats.")
@click.option(
    "--max-failed", type=click.IntRange(min=0), default=0, show_default=True, help="Failed nodes that stop no wave."
)
@click.option(
    "--rollback/--no-rollback",
    default=True,
    help="Reinstall the earlier release on a node that failed.  [default: rollback]",
)
@click.option(
    "--drain-wait",
    "drain_s",
    type=Seconds(1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until a drained node is idle.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@click.option("--pause", is_flag=True, help="Let the run of the same command stop before its next wave.")
@click.option("-e", "--extra-vars", multiple=True, metavar="KEY=VALUE|@FILE", help="Variables of the roles.")
@click.option("--vault-password-file", "vault_files", multiple=True, metavar="FILE", help="As of gpunode provision.")
@click.option(
    "-f", "--forks", type=click.IntRange(min=1), metavar="N", help="Nodes that Ansible processes in parallel."
)
@PARALLEL
@TIMEOUT
@ASK_BECOME_PASS
@click.option("-v", "--verbose", is_flag=True, help="Also print the time line of each node.")
def command(**values: Any) -> int:
    """Install a driver on many nodes by canary and waves, and return only nodes that are as good as before.

    Prints the plan first. Each wave is prepared while its nodes work (packages are downloaded and verified), drained,
    changed by playbooks/site.yml, rebooted where that is due, compared with its state before, and returned. A node that
    is worse gets its earlier release again, or stays drained with the reason. After Ctrl-C or a crash the same command
    continues. Exit codes: 0 all nodes returned, 1 a node failed, 2 wrong usage, 3 a node could not be reached or
    planned.

    \b
    Examples:
      gpunode upgrade -i inventory/hosts.yml --to 595 --scheduler slurm --dry-run
      gpunode upgrade -i inventory/hosts.yml --to 595 --scheduler slurm --canary 1 --waves 10%,25%
    """
    options = UpgradeOptions(**values)
    waves_of(options.waves)
    scheduler = scheduler_of(options.scheduler)
    root = collection_root()
    refuse_extra_variables(root, options.extra_vars)
    request = Request(driver=driver_request(options.to, load(), "--to"))
    folder = runs_folder()
    if options.pause:
        return _pause(folder, options)
    vault = [word for file in options.vault_files for word in ("--vault-password-file", file)]
    with explained():
        inventory, config = read_with_settings(options.inventories, options.limit, SETTINGS, vault)
    refuse_inventory(root, inventory)
    connections = Connections(
        targets={target.name: target for target in targets(inventory, config)},
        inventories=options.inventories,
        parallel=options.parallel,
        timeout_s=options.timeout_s,
        password=ask_password() if options.ask_become_pass else None,
        arguments=(
            *vault,
            *(word for extra in options.extra_vars for word in ("--extra-vars", extra)),
            *(("--forks", str(options.forks)) if options.forks else ()),
        ),
    )
    policies = PolicyReader(None, today())
    for target in connections.targets.values():
        policies.add(target.name, target.policy)
    judging = JudgingRequest(level="quick", policies=policies.by_host, extracts=EXTRACTS)
    with _one_at_a_time(folder), Evaluator(judging) as evaluator:
        journals = list(runs(folder))
        journal = next((one for one in journals if _continues(one, options)), None)
        if journal is None:
            looks = look_at(connections, evaluator, connections.targets)
            held = _held(journals)
            record, document = planned(options, inventory, looks, held, scheduler=scheduler, request=request)
            for line in plan_lines(record, document, options.drain_s, options.scheduler):
                click.echo(printable(line))
            if options.dry_run or not record.nodes:
                return code_of(record)
            journal = Journal(folder / record.run, record)
            make_private_folder(journal.folder)
            write_before(journal.folder, {name: looks[name] for name in record.nodes}, _write_private)
            for name, (earlier, _) in held.items():
                if name in record.nodes:
                    # Compared with the state before the first change, not with what is left of it.
                    before = next(iter(earlier.folder.glob(f"before-{name}.json")), None)
                    if before is not None:
                        _write_private(journal.folder / before.name, before.read_text(encoding="utf-8"))
            journal.write()
            for earlier in {one.folder: one for one, _ in held.values()}.values():
                earlier.give(set(earlier.record.nodes) & set(record.nodes))
        else:
            click.echo(f"continuing run {journal.record.run} of {journal.record.started_at}")
            (journal.folder / PAUSE).unlink(missing_ok=True)
            if options.dry_run:
                click.echo("\n".join(map(printable, report_lines(journal.record, verbose=True))))
                return code_of(journal.record)
        return _run(options, journal, connections, evaluator, scheduler)


@dataclass(frozen=True)
class UpgradeOptions:
    """The command line."""

    inventories: tuple[str, ...]
    limit: str | None
    to: str | None
    scheduler: str
    canary: int
    waves: str
    max_failed: int
    rollback: bool
    drain_s: float
    dry_run: bool
    pause: bool
    extra_vars: tuple[str, ...]
    vault_files: tuple[str, ...]
    forks: int | None
    parallel: int
    timeout_s: float
    ask_become_pass: bool
    verbose: bool

    @property
    def same(self) -> tuple[str, ...]:
        """Return what makes two commands the same."""
        sources = [str(Path(source).absolute()) if Path(source).exists() else source for source in self.inventories]
        return (*sources, f"--limit {self.limit}", f"--to {self.to}", f"--scheduler {self.scheduler}", *self.extra_vars)


def runs_folder() -> Path:
    """Return the folder of the runs. Raises UsageError."""
    try:
        return state_folder() / "upgrades"
    except HistoryError as err:
        raise UsageError(str(err)) from None


def owner() -> str:
    """Return who runs this, for leases and messages."""
    return f"{getpass.getuser()}@{socket.gethostname()} (process {os.getpid()})"


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lease of the controller; the kernel ends it with the process."""
    make_private_folder(folder)
    number = os.open(folder / "lease", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(number, 1000).decode(errors="replace").strip()
            raise UsageError(
                f"another gpunode upgrade is in progress: {holder or 'unknown'}; wait until it ends"
            ) from None
        os.ftruncate(number, 0)
        os.write(number, f"{owner()} since {now()}\n".encode())
        yield
    finally:
        os.close(number)


def _pause(folder: Path, options: UpgradeOptions) -> int:
    journal = next((one for one in runs(folder) if _continues(one, options)), None)
    if journal is None:
        raise UsageError("--pause: no unfinished run of this command; repeat its options")
    write_whole(journal.folder / PAUSE, "", private=True)
    click.echo(f"run {journal.record.run} stops before its next wave; the same command without --pause continues")
    return Exit.GOOD


def _continues(journal: Journal, options: UpgradeOptions) -> bool:
    return journal.record.finished_at is None and journal.record.command == options.same


def _held(journals: Sequence[Journal]) -> dict[str, tuple[Journal, NodeRecord]]:
    """Return nodes that earlier runs hold, with the latest of these runs."""
    found: dict[str, tuple[Journal, NodeRecord]] = {}
    for journal in reversed(journals):
        found |= {name: (journal, node) for name, node in journal.record.open_nodes.items()}
    return found


def _write_private(path: Path, text: str) -> None:
    write_whole(path, text, private=True)


def waves_of(text: str) -> list[str]:
    """Return the sizes of waves: numbers, and shares of all nodes. Raises UsageError."""
    sizes = [size.strip() for size in text.split(",")]
    for size in sizes:
        share = _SHARE.fullmatch(size)
        if not (size.isdigit() and int(size) > 0) and not (share and 0 < int(share[1]) <= 100):
            raise UsageError(f"--waves {text}: {size or 'nothing'} is not a number or a share (example: 10%,25%)")
    return sizes


def wave_numbers(nodes: int, canary: int, sizes: Sequence[str]) -> list[int]:
    """Return the wave of each node, in their order."""
    found: list[int] = []
    for wave in range(nodes):
        left = nodes - len(found)
        if not left:
            break
        size = str(canary) if wave == 0 else sizes[min(wave, len(sizes)) - 1]
        share = _SHARE.fullmatch(size)
        number = max(1, nodes * int(share[1]) // 100) if share else int(size)
        found += [wave] * min(number, left)
    return found


def planned(  # noqa: PLR0913
    options: UpgradeOptions,
    inventory: Inventory,
    looks: Mapping[str, NodeLook],
    held: Mapping[str, tuple[Journal, NodeRecord]],
    *,
    scheduler: Scheduler,
    request: Request,
) -> tuple[RunRecord, Plan]:
    """Return the record of a new run, and the stacks of its nodes."""
    hosts = []
    for name, variables in inventory.hosts.items():
        look = looks[name]
        reason = look.reason or look.undetermined
        host = PlanHost(name, None if reason else look.picture, reason, variables.get(LOCK_NAME))
        hosts.append(with_request(host, variables, request))
    document = plan(hosts, request, load(), date.today())
    chosen: dict[str, NodeRecord] = {}
    left_out: dict[str, str] = {}
    groups = {name: group for group in document.groups for name in group.hosts}
    for name in inventory.hosts:
        group, look = groups[name], looks[name]
        record = held[name][1] if name in held else None
        target = group.stack.driver.version if group.stack is not None else None
        if group.undetermined is not None:
            left_out[name] = group.undetermined
        elif group.stack is None or target is None:
            left_out[name] = (
                "no stack matches: gpunode plan explains it"
                if group.stack is None
                else (f"only the repository decides the release of {group.stack.driver.constraint}: name it with --to")
            )
        elif record is None and look.release == look.loaded == target:
            left_out[name] = f"{AT_TARGET}{target}"
        else:
            node = _begun(record, look, target)
            reason = _others(scheduler, name, node)
            if reason:
                left_out[name] = reason
            else:
                chosen[name] = node
    # Nodes of earlier runs come first: they are out of service already.
    names = sorted(chosen, key=lambda name: chosen[name].state is ChangeState.PLANNED)
    numbers = wave_numbers(len(names), options.canary, waves_of(options.waves))
    nodes = {name: chosen[name].model_copy(update={"wave": wave}) for name, wave in zip(names, numbers, strict=True)}
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return (
        RunRecord(
            run=f"{stamp}-{secrets.token_hex(2)}",
            command=options.same,
            owner=owner(),
            started_at=now(),
            left_out=left_out,
            nodes=nodes,
        ),
        document,
    )


def _begun(record: NodeRecord | None, look: NodeLook, target: str) -> NodeRecord:
    """Return the record of a node: new, or as an earlier run left it, with its token and its release before."""
    if record is None:
        return NodeRecord(token=new_token(), before=look.release, target=target)
    out = record.state in OUT_OF_SERVICE or record.intent == "drain"
    state = (
        record.state if record.state is ChangeState.NOT_RETURNED else ChangeState.HELD if out else ChangeState.PLANNED
    )
    return record.model_copy(update={"state": state, "intent": "", "target": target, "back": False})


def _others(scheduler: Scheduler, name: str, node: NodeRecord) -> str:
    """Return why a node is not at the run's disposal."""
    try:
        state = scheduler.state(name, node.token)
    except SchedulerError as err:
        return str(err)
    return "" if state.service in (Availability.IN_SERVICE, Availability.OURS) else state.text


def _run(
    options: UpgradeOptions, journal: Journal, connections: Connections, evaluator: Evaluator, scheduler: Scheduler
) -> int:
    missing = sorted(set(journal.record.nodes) - set(connections.targets))
    if missing:
        raise UsageError(f"run {journal.record.run} has {missing[0]}, which the inventory no longer has")
    nodes = AnsibleNodes(connections, evaluator, journal.folder, owner(), options.rollback)
    limits = RunLimits(drain_s=options.drain_s, most_failed=options.max_failed, rollback=options.rollback)
    pause = journal.folder / PAUSE

    def say(text: str) -> None:
        click.echo(printable(f"gpunode: {time.strftime('%H:%M:%S')} {text}"), err=True)

    run = ChangeRun(journal, nodes, scheduler, limits, paused=pause.exists, say=say)
    try:
        stopped = run.run()
    except KeyboardInterrupt:
        say("interrupted: drained nodes stay drained; the same command continues")
        raise
    if not journal.record.open_nodes and not stopped.startswith("paused"):
        journal.finish()
    for line in report_lines(journal.record, verbose=options.verbose):
        click.echo(printable(line))
    if stopped:
        say(f"stopped: {stopped}")
    return code_of(journal.record)


def code_of(record: RunRecord) -> int:
    """Return the exit code of a run, or of a plan."""
    nodes = record.nodes.values()
    if any(node.state is ChangeState.ROLLED_BACK or (node.reason and node.state not in FINAL) for node in nodes):
        return Exit.FAILED
    if record.finished_at and any(node.state not in FINAL for node in nodes):
        return Exit.FAILED
    lost = [why for why in record.left_out.values() if not why.startswith((AT_TARGET, Availability.FOREIGN.value))]
    return Exit.UNDETERMINED if lost else Exit.GOOD


__all__ = ["UndeterminedError", "command"]
