"""``gpunode validate``: judge nodes."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunode import __version__
from gpunode.catalog import load
from gpunode.checks import LEVELS, Baseline, Expectation, Level, Status, registry
from gpunode.checks.declared import load_packages
from gpunode.cli import selection as selection_
from gpunode.cli.options import (
    BASELINE,
    EXPECT,
    REPLAY,
    SAVE,
    SELECT,
    SKIP,
    STRICT,
    CommandWithOutputs,
    ReportOutput,
    history_option,
    output_options,
    outputs,
    policy_option,
    quiet,
    verbose_option,
    workload_options,
)
from gpunode.cli.selection import NodeProgress, Selection, refuse_asking, shown_progress
from gpunode.errors import Exit, UsageError
from gpunode.history.runs import SNAPSHOT, EarlierRun, KeptRun, Recorder, extract_snapshot
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.expectation import (
    SETTINGS,
    must_be_writable,
    read_baselines,
    read_expectation,
    settings_of,
    without_figures,
    write_expectation,
)
from gpunode.judging.policy import PolicyReader, today
from gpunode.judging.report import CompactReports, NodeReport, Report, count, exit_code, in_words, report, worst
from gpunode.judging.request import (
    JudgingRequest,
    level_must_have_one,
    must_be_judged,
    read_logs,
    reads_records,
    selected_checks,
)
from gpunode.judging.saved import bundle_files, folder_for_bundles, save_bundle, saved_answers
from gpunode.report import formats
from gpunode.report.fleet import compared
from gpunode.report.summary import Origin, of_run
from gpunode.text import now, printable
from gpunode.whole import write_whole
from gpunode.workload.options import DEEP_ONLY, WorkloadOptions

if TYPE_CHECKING:
    from gpunode.workload.run import Workload

MANY_FILES = 100
"""Saved bundles from which on results are printed before the report."""
COUNT_EVERY_S = 10.0


@click.command("validate", cls=CommandWithOutputs)
@selection_.options
@REPLAY
@click.option(
    "--on-node",
    is_flag=True,
    help="Validate this machine within a time budget, without Ansible: gpunode validate --on-node --help.",
)
@click.option(
    "--fabric",
    is_flag=True,
    help="Validate the nodes together: NCCL and training over all of them: gpunode validate --fabric --help.",
)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="Depth of the validation.  [default: standard; with --replay, the level that was collected]",
)
@EXPECT
@policy_option("  [default: gpunode_policy of -i]")
@BASELINE
@click.option(
    "--write-expect",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the figures, less 10 %, and what all nodes have in common to a file for --expect.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="KIND=FILE",
    help="With --replay of one bundle: also evaluate saved output of nvbandwidth, nccl-tests or dcgm-diag.",
)
@SELECT
@SKIP
@SAVE
@click.option(
    "--since",
    metavar="RUN",
    help="Also report what changed since a run: last, its number, a date, or a FILE (report, bundle, folder).",
)
@history_option("yes, with --replay no")
@workload_options
@output_options
@STRICT
@verbose_option("Also show notes, passed and skipped checks.")
@click.pass_context
def validate_command(  # noqa: PLR0913
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
    since: str | None,
    history: bool | None,
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
      gpunode validate -i inventory/hosts.yml --since last
      gpunode validate --replay bundles/ --format console --format json --output report.json
    """
    load_packages(registry)
    policies = PolicyReader(policy_file, today())
    checks = selected_checks(selected, skipped)
    if level is not None or not replay:
        level_must_have_one(level or "standard", checks)
    expectation = read_expectation(expect) if expect else Expectation()
    baselines = read_baselines(baseline) if baseline else {}
    records = read_records(logs, checks, replay=replay)
    places = outputs(ctx)
    runs = level != "quick" and reads_records(checks)
    workload = at_level(workload, level, runs=runs, replay=replay)
    if write_expect is not None:
        must_be_writable(write_expect, measures=runs or replay)
    if replay:
        refuse_asking("--replay contacts no node")
        if save is not None:
            raise UsageError("--save cannot be combined with --replay: the bundles are saved already")
    folder = folder_for_bundles(save) if save else None
    started = now()
    files = files_of(selection, records) if replay else []
    targets = [] if replay else selection.targets()
    for target in targets:
        policies.add(target.name, target.policy)
    if not selected:
        # Checks that policies of the inventory declare were not known before.
        checks = selected_checks(selected, skipped)
    earlier = None if since is None else EarlierRun(since)
    recorder = Recorder("validate", level or "standard", started, wanted=not replay if history is None else history)
    kept = KeptRun(recorder, earlier, started, {target.name: target.rack for target in targets if target.rack})
    request = JudgingRequest(
        expectation=expectation,
        level=level if replay else level or "standard",
        checks=checks,
        policy=policies.policy,
        policies=policies.by_host,
        baselines=baselines,
        # Bundles that collect saved are named by their hosts.
        earlier_gpus=kept.earlier_gpus([file.stem for file in files] or [target.name for target in targets]),
        logs=records,
        extracts={SNAPSHOT: extract_snapshot, **({SETTINGS: settings_of} if write_expect is not None else {})},
        documents=folder is not None or recorder.history is not None,
    )
    if len(files) + len(targets) > 1:
        load().prepare()
    with recorder, Evaluator(request) as evaluator:
        then = following(workload, evaluator) if runs and not replay else None
        answers = saved_answers(files) if replay else selection.collect(then=then, targets=targets)
        # Only the text for people does without the findings that passed.
        whole = verbose or write_expect is not None or any(output.format != "console" for output in places)
        progress = ReplayProgress(len(files)) if len(files) >= MANY_FILES and not quiet() else None
        results = Results(request.level or "quick", CompactReports(findings=whole), progress)
        for node in counted(evaluator.judge_fleet(answers, strict=len(files) == 1), files):
            results.add(node, folder)
            kept.add(node)
        recorder.finish(worst(node.status for node in results.nodes), now(), results.deepest)
    nodes = results.nodes if replay else sorted(results.nodes, key=lambda node: node.host)
    if baseline:
        print_without_figures(baseline, nodes, baselines)
    nodes = compared(nodes)
    fleet = kept.fleet()
    document = report(
        nodes, level=results.deepest, version=__version__, started_at=started, finished_at=now(), fleet=fleet
    )
    with of_run(Origin(selection.inventories)):
        for output in places:
            write(document, output, verbose=verbose)
    if write_expect is not None:
        write_expectation(write_expect, nodes, results.settings)
    return code_of(document, results, kept, strict=strict)


def code_of(document: Report, results: "Results", kept: KeptRun, *, strict: bool) -> Exit:
    """Return the exit code: of the report, of bundles that were not saved, and of changes for the worse."""
    code = exit_code(document, strict=strict)
    if code is not Exit.GOOD:
        return code
    if results.unsaved:
        return Exit.UNDETERMINED
    comparison = kept.compared()
    return Exit.FAILED if comparison is not None and (comparison.worse or comparison.not_reached) else code


def read_records(logs: Sequence[str], checks: Collection[str], *, replay: bool) -> list[dict[str, Any]]:
    """Return saved outputs as records. Raises UsageError for one that cannot be judged."""
    if not logs:
        return []
    records = read_logs(logs, replay=replay)
    must_be_judged(records, checks)
    return records


def files_of(selection: Selection, records: Sequence[object]) -> list[Path]:
    """Return the saved bundles. Raises UsageError if logs would have to be judged with several nodes."""
    files = bundle_files(selection.hosts)
    if records and len(files) != 1:
        raise UsageError(f"--log: the output belongs to one node, found {len(files)} bundles")
    return files


def counted(nodes: Iterable[JudgedNode], files: Sequence[Path]) -> Iterator[JudgedNode]:
    """Yield the nodes, and show how many of the files are evaluated, unless ReplayProgress does."""
    if not files or len(files) >= MANY_FILES:
        yield from nodes
        return
    with shown_progress([str(file) for file in files], "evaluating") as shown:
        for file, node in zip(files, nodes, strict=False):
            shown(str(file))
            yield node


class ReplayProgress:
    """Lines on stderr while many saved bundles are judged: the first result, failures at once, and counts."""

    def __init__(self, of: int) -> None:
        self._of = of
        self._statuses: Counter[str] = Counter()
        self._printed = -COUNT_EVERY_S

    def add(self, node: NodeReport) -> None:
        """Add a result; print its line if it failed or could not be determined, and the counts every few seconds."""
        self._statuses[node.status.value] += 1
        if node.status in (Status.FAIL, Status.ERROR):
            line = f"gpunode: {node.host}: {node.status.value}: {in_words(count(node.findings))}"
            click.echo(printable(line), err=True)
        if time.monotonic() >= self._printed + COUNT_EVERY_S:
            self._printed = time.monotonic()
            counts = ", ".join(f"{number} {status}" for status, number in sorted(self._statuses.items()))
            click.echo(f"gpunode: {self._statuses.total()} of {self._of} bundles evaluated: {counts}", err=True)


@dataclass
class Results:
    """The reports on the nodes so far."""

    deepest: Level
    """The deepest level at which one was judged."""
    compact: CompactReports
    progress: "ReplayProgress | None" = None
    nodes: list[NodeReport] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of each host, for ``--write-expect``."""
    unsaved: bool = False
    """True if a bundle could not be saved."""

    def add(self, node: JudgedNode, folder: Path | None) -> None:
        """Add a node; save its bundle if there is a folder for it, and print a line if that fails."""
        self.nodes.append(self.compact.compact(node.report))
        if self.progress is not None:
            self.progress.add(node.report)
        if node.extracted is not None and SETTINGS in node.extracted:
            self.settings[node.report.host] = node.extracted[SETTINGS]
        self.deepest = max(self.deepest, node.level, key=LEVELS.index)
        if folder is None or node.document is None:
            return
        reason = save_bundle(folder, node.report.host, node.document)
        if reason is not None:
            self.unsaved = True
            click.echo(printable(f"gpunode: {node.report.host}: bundle not saved: {reason}"), err=True)


def print_without_figures(path: Path, nodes: Iterable[NodeReport], baselines: Mapping[str, Baseline]) -> None:
    """Print a line on the nodes that could not be compared with the report of --baseline."""
    line = without_figures(path, nodes, baselines)
    if line is not None:
        click.echo(printable(f"gpunode: {line}"), err=True)


def at_level(workload: WorkloadOptions, level: Level | None, *, runs: bool, replay: bool) -> WorkloadOptions:
    """Return the workload's options at the level. Raises UsageError for options that would have no effect there."""
    if workload.set_by_user and (replay or not runs):
        reason = "--level quick runs no workload" if level == "quick" else "no selected check uses a workload"
        reason = "--replay contacts no node" if replay else reason
        raise UsageError(f"{reason}: {', '.join(workload.set_by_user)} cannot be combined with it")
    if level == "deep":
        return dataclasses.replace(workload, level="deep")
    if any(name in DEEP_ONLY for name in workload.set_by_user):
        raise UsageError(f"{', '.join(DEEP_ONLY)} are measured only at --level deep")
    return workload


def following(workload: WorkloadOptions, evaluator: Evaluator) -> "Callable[[NodeProgress], Workload]":
    """Return what is run on each node after its probe. Raises UsageError."""
    from gpunode.workload import run  # noqa: PLC0415 (it loads the engine's library; --level quick does without)

    return run.following(workload, evaluator.facts)


def write(document: Report, output: ReportOutput, *, verbose: bool) -> None:
    """Write one rendering to its file or to stdout."""
    if output.path is None:
        formats.show(output.format, document, verbose=verbose)
    else:
        write_whole(output.path, formats.parts(output.format, document, verbose=verbose))
