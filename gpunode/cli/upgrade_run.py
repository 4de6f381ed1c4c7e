"""A fleet through a change, for ``gpunode upgrade`` and ``gpunode rollback``: plan, waves, continuation."""

import fcntl
import getpass
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path

import click
from packaging.version import Version

from gpunode.catalog import load
from gpunode.change.adapters import scheduler_of
from gpunode.change.journal import Journal, NodeRecord, RunRecord, new_token, now, read, runs
from gpunode.change.run import ChangeRun, RunLimits
from gpunode.change.scheduler import Availability, Scheduler, SchedulerError
from gpunode.change.states import FINAL, OUT_OF_SERVICE, ChangeState
from gpunode.cli.options import ASK_BECOME_PASS, FORMAT, LIMIT, PARALLEL, TIMEOUT, Command, Seconds, inventory_option
from gpunode.cli.selection import NodeProgress, ask_password
from gpunode.cli.upgrade_nodes import EXTRACTS, AnsibleNodes, Connections, NodeLook, before_file, look_at, write_before
from gpunode.cli.upgrade_text import counted_states, plan_lines, printable_lines, report_lines, watch
from gpunode.cli.validate import following
from gpunode.cli.workloads import WorkloadOptions
from gpunode.content import collection_root
from gpunode.errors import Exit, GpunodeError, UsageError
from gpunode.fleet import Then, process
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.locks import refuse_inventory
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.history.store import HistoryError, state_folder
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.policy import PolicyReader, today
from gpunode.judging.request import JudgingRequest
from gpunode.names import expand, fold
from gpunode.provisioning.node_stack import with_request
from gpunode.stack import LOCK_NAME, Plan, PlanHost, Request, plan
from gpunode.text import last_line, listed, printable, printable_json
from gpunode.variables import refuse_extra_variables
from gpunode.whole import make_private_folder, write_whole

PAUSE, ABORT = "pause", "abort"
"""Files in a run's folder: the run stops before its next wave, and with the second one is finished then."""
DOMAIN = "gpunode_failure_domain"
"""Variable of the inventory: nodes with the same value change together (a rack, an NVLink partition)."""
AT_TARGET, NO_PART = "already at ", "no part of "
"""Begin of the reasons of nodes that are left out as they should be."""
POWER_S = 300.0
"""Limit of one call of ``--power-cycle``."""
_SHARE = re.compile(r"(\d{1,3})%")


OPTIONS = (
    inventory_option(required=True),
    LIMIT,
    click.option(
        "--scheduler",
        required=True,
        metavar="KIND",
        help="What hands out work to the nodes: none, slurm, kubernetes, or command:PROGRAM.",
    ),
    click.option(
        "--canary",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Nodes, or failure domains, of the first wave.",
    ),
    click.option(
        "--waves", default="10%,25%", show_default=True, help="Sizes of the next waves; the last one repeats."
    ),
    click.option(
        "--max-failed", type=click.IntRange(min=0), default=0, show_default=True, help="Failed nodes that stop no wave."
    ),
    click.option(
        "--drain-wait",
        "drain_s",
        type=Seconds(1),
        default=3600,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait until a drained node is idle.",
    ),
    click.option(
        "--validate-wait",
        "validate_s",
        type=Seconds(0),
        default=600,
        show_default=True,
        metavar="SECONDS",
        help="How long a node may take after its reboot until it is as good as before: services still start.",
    ),
    click.option(
        "--measure",
        is_flag=True,
        help="Measure each node before and after, as validate at level standard: a slower one is not returned.",
    ),
    click.option(
        "--image",
        metavar="IMAGE",
        help="Container image for --measure.  [default: one of the catalog that both releases support]",
    ),
    click.option(
        "--accept",
        metavar="NODES",
        help="Held nodes with hardware that was changed on purpose: what they are now is what they were before.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and change nothing."),
    click.option(
        "--power-cycle",
        metavar="PROGRAM",
        help="Power-cycle a node that does not come back, by PROGRAM NODE (a call of its BMC).  [default: never]",
    ),
    click.option("--pause", is_flag=True, help="Let the run of the same command stop before its next wave."),
    click.option("--abort", is_flag=True, help="As --pause, and finish the run: the nodes left keep their release."),
    click.option("--watch", is_flag=True, help="Show the nodes of the run of the same command by state until it ends."),
    click.option("-e", "--extra-vars", multiple=True, metavar="KEY=VALUE|@FILE", help="Variables of the roles."),
    click.option(
        "--vault-password-file", "vault_files", multiple=True, metavar="FILE", help="As of gpunode provision."
    ),
    click.option(
        "-f", "--forks", type=click.IntRange(min=1), metavar="N", help="Nodes that Ansible processes in parallel."
    ),
    PARALLEL,
    TIMEOUT,
    ASK_BECOME_PASS,
    click.option("-v", "--verbose", is_flag=True, help="Also print the time line of each node."),
    FORMAT,
)


def change_options(command: Command) -> Command:
    """Add the options of every change of a fleet."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class ChangeOptions:
    """The command line."""

    inventories: tuple[str, ...]
    limit: str | None
    scheduler: str
    canary: int
    waves: str
    max_failed: int
    rollback: bool
    drain_s: float
    validate_s: float
    measure: bool
    image: str | None
    accept: str | None
    dry_run: bool
    power_cycle: str | None
    pause: bool
    abort: bool
    watch: bool
    extra_vars: tuple[str, ...]
    vault_files: tuple[str, ...]
    forks: int | None
    parallel: int
    timeout_s: float
    ask_become_pass: bool
    verbose: bool
    form: str = "console"

    def refuse_pairs(self) -> None:
        """Raise UsageError for options that have no effect together."""
        if self.image is not None and not self.measure:
            raise UsageError("--image is the image of --measure: add --measure")
        if self.form == "json" and (self.pause or self.abort or self.watch):
            raise UsageError("--format json is the document of a run: not together with --pause, --abort and --watch")

    def print(self, text: str) -> None:
        """Print lines of the plan or the report: on stderr if stdout is for a document."""
        click.echo(text, err=self.form == "json")

    def shown(self, record: RunRecord) -> int:
        """Print the document if it was requested; return the exit code."""
        if self.form == "json":
            click.echo(printable_json(record.model_dump_json(by_alias=True, indent=1)))
        return code_of(record)

    def same(self, goal: str) -> tuple[str, ...]:
        """Return what makes two commands the same."""
        sources = [str(Path(source).absolute()) if Path(source).exists() else source for source in self.inventories]
        return (*sources, f"--limit {self.limit}", goal, f"--scheduler {self.scheduler}", *self.extra_vars)


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

    def request_of(self, name: str) -> Request | None:
        """Return the request for one node; None for a node that the change leaves out."""
        return self.request if self.of_host is None else self.of_host.get(name)


def change_fleet(options: ChangeOptions, goal: ChangeGoal) -> int:
    """Return the exit code of a change by canary and waves, begun here or continued."""
    waves_of(options.waves)
    options.refuse_pairs()
    scheduler = scheduler_of(options.scheduler)
    root = collection_root()
    refuse_extra_variables(root, options.extra_vars)
    folder = runs_folder()
    if options.pause or options.abort:
        return _stop(folder, options, goal)
    if options.watch:
        return watch(_unfinished(folder, options, goal, "--watch").folder)
    vault = [word for file in options.vault_files for word in ("--vault-password-file", file)]
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
    # A look is judged as quick, and one with measurements as standard: by what was collected.
    judging = JudgingRequest(policies=policies.by_host, extracts=EXTRACTS)
    with one_at_a_time(folder), Evaluator(judging) as evaluator:
        if options.measure:
            measuring = partial(_measuring, evaluator)
            measuring(options.image)
            connections = replace(connections, measuring=measuring)
        journals = list(runs(folder))
        journal = next((one for one in journals if _continues(one, options, goal)), None)
        if journal is not None:
            options.print(f"continuing run {journal.record.run} of {journal.record.started_at}")
            for word in (PAUSE, ABORT):
                (journal.folder / word).unlink(missing_ok=True)
            if options.dry_run:
                options.print(printable_lines(report_lines(journal.record, verbose=True)))
                return options.shown(journal.record)
            if options.measure:
                look = partial(look_at, connections, evaluator, list(journal.record.nodes))
                journal.measure_in(image_of_run(options, journal.record, look))
        else:
            looks = look_at(connections, evaluator, connections.targets)
            held = _held(journals)
            record, document = planned(options, goal, inventory, looks, held, scheduler=scheduler)
            if options.measure and record.nodes:
                record = record.model_copy(update={"image": image_of_run(options, record, lambda: looks)})
            earlier = [one.record for one in journals]
            options.print(printable_lines(plan_lines(record, document, options.drain_s, options.scheduler, earlier)))
            if options.dry_run or not record.nodes:
                return options.shown(record)
            journal = _begin(folder, record, looks, held, goal)
        return _run(options, goal, journal, connections, evaluator=evaluator, scheduler=scheduler)


def _accept(names: Sequence[str], journal: Journal, look: Callable[[Sequence[str]], Mapping[str, NodeLook]]) -> None:
    """Take what held nodes are now for what they were before the change. Raises UsageError."""
    held = [name for name, node in journal.record.nodes.items() if node.state is ChangeState.HELD]
    wrong = sorted(set(names) - set(held))
    if wrong:
        raise UsageError(f"--accept {wrong[0]}: not held by this run; it holds {fold(held) or 'no node'}")
    looks = look(names)
    for name in names:
        if looks[name].snapshot is None:
            raise UsageError(f"--accept {name}: {looks[name].reason}")
    write_before(journal.folder, looks, _write_private)


def _measuring(evaluator: Evaluator, image: str | None) -> Callable[[NodeProgress], Then]:
    """Return what measures a node in an image. Raises UsageError."""
    return following(WorkloadOptions(image=image), evaluator)


def image_of_run(options: ChangeOptions, record: RunRecord, look: Callable[[], Mapping[str, NodeLook]]) -> str:
    """Return the image that a run measures nodes in: one for all of them, before and after. Raises UsageError."""
    if options.image is not None:
        return options.image
    if record.image is not None:
        return record.image
    looks = look()
    pictures = [picture for name in record.nodes if (picture := looks[name].picture) is not None]
    return image_for_releases(
        {release for node in record.nodes.values() for release in (node.before, node.target) if release},
        {picture.arch for picture in pictures if picture.arch},
        {model for picture in pictures for group in picture.gpus for model in group.models},
    )


def image_for_releases(releases: Collection[str], architectures: Collection[str], models: Collection[str]) -> str:
    """Return the newest image of the catalog that all releases of the driver support. Raises UsageError.

    A driver runs images of an older CUDA: the release with the oldest one decides.
    """
    from gpunode.workload.run import image_for, no_image  # noqa: PLC0415 (it loads the engine's library)

    catalog = load()
    ask = "name one that all of them support with --image"
    cudas = {release: catalog.branch_of(release).native_cuda for release in releases}
    unknown = sorted(release for release, cuda in cudas.items() if cuda is None)
    if unknown:
        raise UsageError(f"--measure: the catalog has no CUDA for driver {listed(unknown)}: {ask}")
    by_release = {release: Version(cuda) for release, cuda in cudas.items() if cuda is not None}
    oldest = min(by_release, key=by_release.__getitem__)
    capabilities = {str(catalog.gpu(model).compute_capability) for model in models}
    found = image_for(by_release[oldest], architectures, capabilities)
    if found is None:
        why = no_image(str(by_release[oldest]), architectures, capabilities)
        raise UsageError(f"--measure: {why} (drivers {listed(sorted(releases))}): {ask}")
    return found


def _begin(
    folder: Path,
    record: RunRecord,
    looks: Mapping[str, NodeLook],
    held: Mapping[str, tuple[Journal, NodeRecord]],
    goal: ChangeGoal,
) -> Journal:
    """Write the journal of a new run, with the state of each node before; take over nodes that earlier runs hold."""
    journal = Journal(folder / record.run, record)
    make_private_folder(journal.folder)
    write_before(journal.folder, {name: looks[name] for name in record.nodes}, _write_private)
    for name in record.nodes:
        # Compared with the state before the first change, not with what is left of it.
        origin = goal.kept or (held[name][0].folder if name in held else None)
        if origin is not None and (before := before_file(origin, name)).exists():
            _write_private(before_file(journal.folder, name), before.read_text(encoding="utf-8"))
    journal.write()
    for earlier in {one.folder: one for one, _ in held.values()}.values():
        earlier.give(set(earlier.record.nodes) & set(record.nodes))
    return journal


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
def one_at_a_time(folder: Path) -> Iterator[None]:
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


def _unfinished(folder: Path, options: ChangeOptions, goal: ChangeGoal, word: str) -> Journal:
    """Return the journal of the unfinished run of this command. Raises UsageError."""
    journal = next((one for one in runs(folder) if _continues(one, options, goal)), None)
    if journal is None:
        raise UsageError(f"{word}: no unfinished run of this command; repeat its options")
    return journal


def _stop(folder: Path, options: ChangeOptions, goal: ChangeGoal) -> int:
    """Let a run stop before its next wave; finish one that does not run."""
    word = ABORT if options.abort else PAUSE
    journal = _unfinished(folder, options, goal, f"--{word}")
    write_whole(journal.folder / word, "", private=True)
    if not options.abort:
        click.echo(f"run {journal.record.run} stops before its next wave; the same command without --pause continues")
        return Exit.GOOD
    try:
        with one_at_a_time(folder):
            _aborted(read(journal.folder))
    except UsageError:
        click.echo(f"run {journal.record.run} stops before its next wave and ends there")
    return Exit.GOOD


def _aborted(journal: Journal) -> None:
    """Finish a run, unless it holds nodes."""
    held = journal.record.open_nodes
    if held:
        click.echo(
            f"run {journal.record.run} holds {fold(held)}: the same command continues, gpunode rollback goes back"
        )
        return
    journal.finish()
    click.echo(f"run {journal.record.run} is finished")


def _continues(journal: Journal, options: ChangeOptions, goal: ChangeGoal) -> bool:
    return journal.record.finished_at is None and journal.record.command == options.same(goal.title)


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


def incomplete(chosen: Iterable[str], left_out: Mapping[str, str], domains: Mapping[str, str]) -> dict[str, str]:
    """Return the chosen nodes with a failure domain of which another node is left out, with the reason."""
    out = {
        domains[name]: name
        for name, why in left_out.items()
        if domains[name] and not why.startswith((AT_TARGET, NO_PART))
    }
    return {name: f"{domains[name]}: {out[domains[name]]} is left out" for name in chosen if domains[name] in out}


def in_waves(
    chosen: Mapping[str, NodeRecord], domains: Mapping[str, str], canary: int, sizes: Sequence[str]
) -> dict[str, NodeRecord]:
    """Return the nodes with their waves: a failure domain is in one wave, and counts as one node.

    Nodes of earlier runs come first: they are out of service already.
    """
    units: dict[str, list[str]] = {}
    for name in sorted(chosen, key=lambda name: chosen[name].state is ChangeState.PLANNED):
        units.setdefault(domains[name] or f"node {name}", []).append(name)
    waves = zip(units.values(), wave_numbers(len(units), canary, sizes), strict=True)
    return {
        name: chosen[name].model_copy(update={"wave": wave, "domain": domains[name]})
        for names, wave in waves
        for name in names
    }


def planned(  # noqa: PLR0913
    options: ChangeOptions,
    goal: ChangeGoal,
    inventory: Inventory,
    looks: Mapping[str, NodeLook],
    held: Mapping[str, tuple[Journal, NodeRecord]],
    *,
    scheduler: Scheduler,
) -> tuple[RunRecord, Plan]:
    """Return the record of a new run, and the stacks of its nodes."""
    hosts = []
    for name, variables in inventory.hosts.items():
        look = looks[name]
        request = goal.request_of(name)
        reason = look.reason or look.undetermined or ("" if request else f"{NO_PART}{goal.title}")
        host = PlanHost(name, None if reason else look.picture, reason, variables.get(LOCK_NAME))
        hosts.append(with_request(host, variables, request or goal.request))
    document = plan(hosts, goal.request, load(), date.today())
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
    domains = {name: str(variables.get(DOMAIN) or "") for name, variables in inventory.hosts.items()}
    for name, why in incomplete(chosen, left_out, domains).items():
        del chosen[name]
        left_out[name] = why
    nodes = in_waves(chosen, domains, options.canary, waves_of(options.waves))
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return (
        RunRecord(
            run=f"{stamp}-{secrets.token_hex(2)}",
            command=options.same(goal.title),
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
    return record.model_copy(update={"state": state, "intent": "", "target": target, "back": False, "cause": ""})


def _others(scheduler: Scheduler, name: str, node: NodeRecord) -> str:
    """Return why a node is not at the run's disposal."""
    try:
        state = scheduler.state(name, node.token)
    except SchedulerError as err:
        return str(err)
    return "" if state.service in (Availability.IN_SERVICE, Availability.OURS) else state.text


def _run(  # noqa: PLR0913
    options: ChangeOptions,
    goal: ChangeGoal,
    journal: Journal,
    connections: Connections,
    *,
    evaluator: Evaluator,
    scheduler: Scheduler,
) -> int:
    missing = sorted(set(journal.record.nodes) - set(connections.targets))
    if missing:
        raise UsageError(f"run {journal.record.run} has {missing[0]}, which the inventory no longer has")
    if options.accept is not None:
        _accept(expand(options.accept), journal, partial(look_at, connections, evaluator))
    nodes = AnsibleNodes(
        connections,
        evaluator,
        journal.folder,
        owner(),
        way_back=options.rollback,
        kept=goal.kept.name if goal.kept is not None else "",
        image=journal.record.image or "",
        scheduler=options.scheduler,
    )
    limits = RunLimits(
        drain_s=options.drain_s,
        validate_s=options.validate_s,
        most_failed=options.max_failed,
        rollback=options.rollback,
    )

    def stops() -> str:
        if (journal.folder / ABORT).exists():
            return "aborted"
        return "paused" if (journal.folder / PAUSE).exists() else ""

    def say(text: str) -> None:
        counts = " ".join(f"{number} {state}" for state, number in counted_states(journal.record))
        click.echo(printable(f"gpunode: {time.strftime('%H:%M:%S')} {text} [{counts}]"), err=True)

    power_cycle = partial(power_cycled, options.power_cycle) if options.power_cycle else None
    run = ChangeRun(journal, nodes, scheduler, limits, stops=stops, power_cycle=power_cycle, say=say)
    try:
        stopped = run.run()
    except KeyboardInterrupt:
        say("interrupted: drained nodes stay drained; the same command continues")
        raise
    if not journal.record.open_nodes and not stopped.startswith("paused"):
        journal.finish()
    for line in report_lines(journal.record, verbose=options.verbose):
        options.print(printable(line))
    if nodes.not_measured:
        options.print(
            printable(f"compared without figures, because their change had begun: {fold(nodes.not_measured)}")
        )
    if stopped:
        say(f"stopped: {stopped}")
    return options.shown(journal.record)


def power_cycled(program: str, name: str) -> str:
    """Run the site's program for one node; return why it failed."""
    try:
        done = process.run([program, name], timeout_s=POWER_S)
    except GpunodeError as err:
        return str(err)
    return "" if done.rc == 0 else f"{program} {name}: {last_line(done.stderr or done.stdout) or done.rc}"


def code_of(record: RunRecord) -> int:
    """Return the exit code of a run, or of a plan."""
    nodes = record.nodes.values()
    if any(node.state is ChangeState.ROLLED_BACK or (node.reason and node.state not in FINAL) for node in nodes):
        return Exit.FAILED
    if record.finished_at and any(node.state not in FINAL for node in nodes):
        return Exit.FAILED
    lost = [
        why for why in record.left_out.values() if not why.startswith((AT_TARGET, NO_PART, Availability.FOREIGN.value))
    ]
    return Exit.UNDETERMINED if lost else Exit.GOOD
