"""``gpunode validate``: judge nodes."""

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from pydantic import BaseModel

from gpunode import __version__
from gpunode.catalog import load
from gpunode.checks import LEVELS, Baseline, Expectation, Level, identify, judge, registry
from gpunode.checks.own import load_packages
from gpunode.cli import outputs as outputs_
from gpunode.cli import selection as selection_
from gpunode.cli import workloads
from gpunode.cli.apart import ANSWER, Apart
from gpunode.cli.baseline import print_without_figures, read_baselines
from gpunode.cli.chosen import selected_checks
from gpunode.cli.expectation import read_expectation
from gpunode.cli.measured_logs import checks_of, must_be_judged, must_be_of_one, read_logs
from gpunode.cli.outputs import CommandWithOutputs, ReportOutput
from gpunode.cli.policy import Policies, today
from gpunode.cli.replay import bundle_files, read_file, reason_of
from gpunode.cli.selection import NodeProgress, Selection, refuse_asking
from gpunode.cli.workloads import WorkloadOptions
from gpunode.cli.write_expect import must_be_writable, write_expectation
from gpunode.cli.writing import folder_for_bundles, write_whole
from gpunode.errors import Exit, UsageError
from gpunode.facts import facts_from_bundle
from gpunode.isolation import Exceeded
from gpunode.probe.bundle import Bundle
from gpunode.report import NodeReport, Report, exit_code, judged, report, unchecked, unreachable
from gpunode.report.fleet import compared
from gpunode.text import printable, printable_json

if TYPE_CHECKING:
    from gpunode.cli.workload_run import Workload
    from gpunode.fleet import Collected

Item = TypeVar("Item")


@click.command("validate", cls=CommandWithOutputs)
@selection_.options
@click.option(
    "--replay", is_flag=True, help="The arguments are saved bundles or directories of bundles; no node is contacted."
)
@click.option(
    "--on-node",
    is_flag=True,
    help="Validate this machine within a time budget, without Ansible: gpunode validate --on-node --help.",
)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="Depth of the validation.  [default: standard; with --replay, the level that was collected]",
)
@click.option(
    "--expect",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file with the expected properties of the nodes.",
)
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file with limits, checks to mute or observe, and site checks.  [default: gpunode_policy of -i]",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Report of --format json; measured figures are compared with those of the same node.",
)
@click.option(
    "--write-expect",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the measured figures, reduced by 10 %, to a file for --expect.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="KIND=FILE",
    help="With --replay of one bundle: also evaluate saved output of nvbandwidth, nccl-tests or dcgm-diag.",
)
@click.option("--select", "selected", multiple=True, metavar="ID[,ID]", help="Run only these checks.")
@click.option("--skip", "skipped", multiple=True, metavar="ID[,ID]", help="Skip these checks.")
@click.option("--save", type=click.Path(path_type=Path), metavar="DIR", help="Save the bundles as DIR/HOST.json.")
@workloads.options
@outputs_.options
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
@click.option("-v", "--verbose", is_flag=True, help="Also show notes, passed and skipped checks.")
@click.pass_context
def command(  # noqa: PLR0913
    ctx: click.Context,
    /,
    *,
    selection: Selection,
    workload: WorkloadOptions,
    replay: bool,
    level: Level | None,
    expect: Path | None,
    policy_file: Path | None,
    baseline: Path | None,
    write_expect: Path | None,
    logs: tuple[str, ...],
    selected: tuple[str, ...],
    skipped: tuple[str, ...],
    save: Path | None,
    strict: bool,
    verbose: bool,
    **_: object,
) -> int:
    """Validate nodes: HOSTs, hosts of an inventory (-i), saved bundles (--replay), or this machine.

    No setting of a node is changed. Level quick only reads; level standard also runs a workload in a container on
    idle GPUs and removes the container afterwards; its image remains on the node. Level deep measures for up to half an
    hour: every number format, all collectives, training, storage, a sustained load. Exit codes: 0 no check failed, 1
    a check
    failed, 2 wrong usage, 3 could not be determined (unreachable, no GPU, missing data).

    \b
    Examples:
      gpunode validate -i inventory/hosts.yml --limit gpu --save bundles/
      gpunode validate --level quick gpu-01
      gpunode validate --replay bundles/ --format console --format json --output report.json
    """
    load_packages(registry)
    policies = Policies(policy_file, today())
    chosen = selected_checks(selected, skipped)
    if level is not None or not replay:
        level_must_have_one(level or "standard", chosen)
    expectation = read_expectation(expect) if expect else Expectation()
    baselines = read_baselines(baseline) if baseline else {}
    printed = read_logs(logs, replay=replay)
    must_be_judged(printed, chosen)
    places = outputs_.outputs(ctx)
    runs = level != "quick" and reads_records(chosen)
    workload = at_level(workload, level, runs=runs, replay=replay)
    if write_expect is not None:
        must_be_writable(write_expect, measures=runs or replay)
    if replay:
        refuse_asking("--replay contacts no node")
        if save is not None:
            raise UsageError("--save cannot be combined with --replay: the bundles are saved already")
    folder = folder_for_bundles(save) if save else None
    started = now()
    files = bundle_files(selection.hosts) if replay else []
    must_be_of_one(printed, files)
    targets = [] if replay else selection.targets()
    for target in targets:
        policies.add(target.name, target.policy)
    if not selected:
        # Checks that policies of the inventory declare were not known before.
        chosen = selected_checks(selected, skipped)
    judging = FleetJudging(expectation, level if replay else level or "standard", chosen, policies, baselines, printed)
    if len(files) + len(targets) > 1:
        load().prepare()
    unsaved: list[str] = []
    with Apart(judge=judging.work) as apart:
        if replay:
            nodes = distinguished(files, judging.files(files, apart))
        else:
            then = following(workload, apart) if runs else None
            answers = shown_unsaved(selection.collect(apart, save=folder, then=then, targets=targets), unsaved)
            nodes = sorted(judging.answers(answers, apart), key=lambda node: node.host)
    if baseline:
        print_without_figures(baseline, nodes, baselines)
    nodes = compared(nodes)
    document = report(nodes, level=judging.deepest, version=__version__, started_at=started, finished_at=now())
    for place in places:
        write(document, place, verbose=verbose)
    if write_expect is not None:
        write_expectation(write_expect, nodes)
    code = exit_code(document, strict=strict)
    return Exit.UNDETERMINED if unsaved and code is Exit.GOOD else code


def shown_unsaved(answers: "Iterable[Collected]", unsaved: list[str]) -> "Iterator[Collected]":
    """Yield the answers; print a line for each bundle that was not saved, and add its node to the list."""
    for answer in answers:
        if answer.unsaved is not None:
            unsaved.append(answer.host)
            click.echo(printable(f"gpunode: {answer.host}: bundle not saved: {answer.unsaved}"), err=True)
        yield answer


def at_level(workload: WorkloadOptions, level: Level | None, *, runs: bool, replay: bool) -> WorkloadOptions:
    """Return the workload's options at the level. Raises UsageError for options that would have no effect there."""
    if workload.given and (replay or not runs):
        reason = "--level quick runs no workload" if level == "quick" else "no selected check uses a workload"
        reason = "--replay contacts no node" if replay else reason
        raise UsageError(f"{reason}: {', '.join(workload.given)} cannot be combined with it")
    if level == "deep":
        return dataclasses.replace(workload, level="deep")
    if any(name in workloads.DEEP_ONLY for name in workload.given):
        raise UsageError(f"{' and '.join(workloads.DEEP_ONLY)} are measured only at --level deep")
    return workload


def level_must_have_one(level: Level, chosen: Iterable[str]) -> None:
    """Raise UsageError if all selected checks belong to a deeper level: nothing would be judged."""
    least = min((registry[name].level for name in chosen), key=LEVELS.index)
    if LEVELS.index(least) > LEVELS.index(level):
        raise UsageError(f"--level {level}: no selected check runs at this level; use --level {least}")


def reads_records(chosen: Iterable[str]) -> bool:
    """Return True if one of the checks needs a workload's records."""
    return any(registry[name].level != "quick" for name in chosen)


def distinguished(files: Iterable[Path], nodes: Iterable[NodeReport]) -> list[NodeReport]:
    """Return the nodes; for a second file of the same host, the host's name is followed by the file."""
    found: dict[str, NodeReport] = {}
    for path, node in zip(files, nodes, strict=True):
        host = f"{node.host} ({path})" if node.host in found else node.host
        found[host] = node.model_copy(update={"host": host})
    return list(found.values())


def following(workload: WorkloadOptions, apart: Apart) -> "Callable[[NodeProgress], Workload]":
    """Return what is run on each node after its probe. Raises UsageError."""
    from gpunode.cli import workload_run  # noqa: PLC0415 (it loads the engine's library; --level quick does without)

    request, limit_s = workload_run.read_request(workload), workload.limit_s

    def then(progress: NodeProgress) -> "Workload":
        return workload_run.Workload(request, limit_s, apart.facts, progress)

    return then


def now() -> str:
    """Return the time in UTC, as in reports."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class FleetJudging:
    """The criteria for nodes."""

    expectation: Expectation
    level: Level | None
    """None: each at the level at which it was collected."""
    chosen: set[str]
    policies: Policies
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """By host."""
    logs: Sequence[Mapping[str, Any]] = ()
    """Saved outputs as records."""
    deepest: Level = "quick"
    """The deepest level of all that were judged."""

    def __post_init__(self) -> None:
        self.deepest = self.level or "quick"

    def files(self, files: Sequence[Path], apart: Apart) -> Iterator[NodeReport]:
        """Yield the reports on saved bundles, in their order: one that is invalid costs no other its report.

        Raises UsageError if the only one is invalid.
        """

        def one(path: Path) -> NodeReport:
            try:
                return self._apart(apart, str(path), read_file(path), str(path), None)
            except UsageError as err:
                if len(files) == 1:
                    raise
                return unreachable(str(path), reason_of(path, err), None)

        return in_order(one, files, apart.most)

    def answers(self, answers: "Iterable[Collected]", apart: Apart) -> Iterator[NodeReport]:
        """Yield the reports on nodes that were queried."""

        def one(answer: "Collected") -> NodeReport:
            if answer.bundle is None:
                return unreachable(answer.host, answer.reason or "no answer", answer.seconds)
            text = answer.bundle.model_copy(update={"host": answer.host}).to_json().encode()
            try:
                node = self._apart(apart, answer.host, text, ANSWER, answer.seconds)
            except UsageError as err:
                # The document can be larger than what the node sent: the limits may refuse it only now.
                return unreachable(answer.host, str(err), answer.seconds)
            return node if answer.unchecked is None else unchecked(node, answer.unchecked)

        return in_order(one, answers, apart.most)

    def _apart(self, apart: Apart, name: str, text: bytes, where: str, seconds: float | None) -> NodeReport:
        try:
            found = JudgedBundle.model_validate_json(apart.call("judge", text, where, seconds, name))
        except Exceeded as err:
            return unreachable(name, str(err), seconds)
        self.deepest = max(self.deepest, found.level, key=LEVELS.index)
        return found.node

    def work(self, text: bytes, where: str, seconds: float | None, name: str) -> bytes:
        """Return the report on one bundle, as a document of ``JudgedBundle``. Raises UsageError if it is invalid.

        ``name`` is the node's, by which the inventory may have a policy for it.
        """
        bundle = Bundle.from_json(text, where)
        node = facts_from_bundle(bundle)
        level = self.level or level_of(bundle)
        policy = self.policies.of(name)
        expectation = self.expectation.with_baseline(self.baselines.get(bundle.host))
        findings = judge(node, expectation, level, self.chosen, policy=policy)
        if self.logs:
            # Only at the level of their own checks: other measurements were not to be collected.
            ids = self.chosen & checks_of(self.logs)
            read = facts_from_bundle(bundle.model_copy(update={"results": [*bundle.results, *self.logs]}))
            findings = [one for one in findings if one.check not in ids]
            findings += judge(read, expectation, "deep", ids, policy=policy)
        report = judged(bundle.host, identify(node), findings, seconds, policy)
        return JudgedBundle(level=level, node=report).model_dump_json(by_alias=True).encode()


def level_of(bundle: Bundle) -> Level:
    """Return the level at which a bundle was collected: in the launcher's record, since the release with two levels."""
    if not bundle.results:
        return "quick"
    levels = (one["values"].get("level") for one in bundle.results if isinstance(one.get("values"), dict))
    return "deep" if "deep" in levels else "standard"


class JudgedBundle(BaseModel):
    """The result of one bundle."""

    level: Level
    node: NodeReport


def in_order(work: Callable[[Item], NodeReport], items: Iterable[Item], most: int) -> Iterator[NodeReport]:
    """Yield the result of ``work`` for each item, ``most`` at a time; items are fetched only when there is room."""
    waiting: deque[Future[NodeReport]] = deque()
    with ThreadPoolExecutor(max_workers=most) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            while len(waiting) > 2 * most or (waiting and waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def write(document: Report, place: ReportOutput, *, verbose: bool) -> None:
    """Write one rendering to its file or to stdout."""
    if place.format == "json":
        text = printable_json(document.to_json())
        if place.path is None:
            click.echo(text, nl=False)
        else:
            write_whole(place.path, text)
        return
    from gpunode.report import console  # noqa: PLC0415 (rich is slow to load; JSON does without)

    if place.path is None:
        console.write(document, sys.stdout, verbose=verbose)
    else:
        write_whole(place.path, console.as_text(document, verbose=verbose))
