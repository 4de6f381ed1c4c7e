"""``gpunode validate``: judge nodes."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunode import __version__
from gpunode.checks import LEVELS, Expectation, Level, identify, judge, registry
from gpunode.cli import outputs as outputs_
from gpunode.cli import selection as selection_
from gpunode.cli import workloads
from gpunode.cli.expectation import read_expectation
from gpunode.cli.nearest import unknown
from gpunode.cli.outputs import CommandWithOutputs, Output
from gpunode.cli.replay import read_bundles
from gpunode.cli.selection import Say, Selection, refuse_asking
from gpunode.cli.workloads import Options, Workload
from gpunode.cli.writing import folder_for_bundles, write_whole
from gpunode.errors import UsageError
from gpunode.facts import facts_from_bundle
from gpunode.probe.bundle import Bundle
from gpunode.report import NodeReport, Report, console, exit_code, judged, report, unchecked, unreachable

if TYPE_CHECKING:
    from gpunode.fleet import Collected


@click.command("validate", cls=CommandWithOutputs)
@selection_.options
@click.option("--replay", is_flag=True, help="The arguments are saved bundles, or folders of them: no node is asked.")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="How deep to look.  [default: standard; with --replay, what was collected]",
)
@click.option(
    "--expect", type=click.Path(path_type=Path), metavar="FILE", help="What the site says of its nodes, in YAML."
)
@click.option("--select", "selected", multiple=True, metavar="ID[,ID]", help="Run these checks alone.")
@click.option("--skip", "skipped", multiple=True, metavar="ID[,ID]", help="Leave these checks out.")
@click.option("--save", type=click.Path(path_type=Path), metavar="DIR", help="Keep the bundles, as DIR/HOST.json.")
@workloads.options
@outputs_.options
@click.option("--strict", is_flag=True, help="Exit 1 on a warning too.")
@click.option("-v", "--verbose", is_flag=True, help="Show what passed and what was skipped as well.")
@click.pass_context
def command(  # noqa: PLR0913
    ctx: click.Context,
    /,
    *,
    selection: Selection,
    workload: Options,
    replay: bool,
    level: Level | None,
    expect: Path | None,
    selected: tuple[str, ...],
    skipped: tuple[str, ...],
    save: Path | None,
    strict: bool,
    verbose: bool,
    **_: object,
) -> int:
    """Judge nodes: HOSTs, those of an inventory (-i), saved bundles (--replay), or this machine.

    No setting of a node is changed. Level quick looks; level standard also runs a workload in a container, on GPUs
    that nobody uses, and removes it again; the image that it needs stays there. Exit codes: 0 all good, 1 a check
    failed, 2 wrong usage, 3 could not be determined (unreachable, no GPU, missing data).

    \b
    Examples:
      gpunode validate -i inventory/hosts.yml --limit gpu --save bundles/
      gpunode validate --level quick gpu-01
      gpunode validate --replay bundles/ --format console --format json --output report.json
    """
    wanted = wanted_checks(selected, skipped)
    if level is not None:
        level_must_exist(level)
        level_must_have_one(level, wanted)
    expectation = read_expectation(expect) if expect else Expectation()
    places = outputs_.outputs(ctx)
    runs = level != "quick" and reads_records(wanted)
    if workload.given and (replay or not runs):
        reason = "--level quick runs no workload" if level == "quick" else "no check that is selected reads a workload"
        reason = "--replay asks no node" if replay else reason
        raise UsageError(f"{reason}: {', '.join(workload.given)} cannot be combined with it")
    if replay:
        refuse_asking("--replay asks no node")
        if save is not None:
            raise UsageError("--save cannot be combined with --replay: the bundles are saved already")
    folder = folder_for_bundles(save) if save else None
    started = now()
    if replay:
        judging = Judging(expectation, level, wanted)
        nodes = [judging.bundle(bundle.host, bundle, None) for bundle in read_bundles(selection.hosts)]
    else:
        judging = Judging(expectation, level or "standard", wanted)
        then = following(workload) if runs else None
        nodes = [judging.answer(answer) for answer in selection.collect(save=folder, then=then)]
        nodes.sort(key=lambda node: node.host)
    document = report(nodes, level=judging.deepest, version=__version__, started_at=started, finished_at=now())
    for place in places:
        write(document, place, verbose=verbose)
    return exit_code(document, strict=strict)


def wanted_checks(selected: Iterable[str], skipped: Iterable[str]) -> set[str]:
    """Ids after ``--select`` and ``--skip``; raises UsageError for one that is none, and where none is left."""
    if not all(_ids([value]) for value in selected):
        # An empty variable of a script must not stand for all of them.
        raise UsageError("--select: no check is named; gpunode checks lists them")
    names = {"--select": _ids(selected), "--skip": _ids(skipped)}
    known = [check.id for check in registry]
    for option, ids in names.items():
        for name in ids:
            if name not in registry:
                raise UsageError(f"{option}: {unknown('check', name, known)}")
    wanted = set(names["--select"] or known) - set(names["--skip"])
    if not wanted:
        raise UsageError("--skip leaves out every check that is selected: nothing would be judged")
    return wanted


def _ids(values: Iterable[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def level_must_exist(level: Level) -> None:
    """Raise UsageError for a level that has no check of its own: it would promise what is not done."""
    levels = {check.level for check in registry}
    if level not in levels:
        deepest = max(levels, key=LEVELS.index)
        raise UsageError(f"--level {level}: there is no check of this level yet; --level {deepest} has them all")


def level_must_have_one(level: Level, wanted: Iterable[str]) -> None:
    """Raise UsageError where all that was selected lies deeper: nothing would be judged."""
    least = min((registry[name].level for name in wanted), key=LEVELS.index)
    if LEVELS.index(least) > LEVELS.index(level):
        raise UsageError(f"--level {level}: no check that is selected runs at it; --level {least} has the first")


def reads_records(wanted: Iterable[str]) -> bool:
    """True where one of the checks needs what a workload records."""
    return any(registry[name].level != "quick" for name in wanted)


def following(workload: Options) -> Callable[[Say], Workload]:
    """What is run on each node after its probe. Raises UsageError."""
    wish, limit_s = workloads.read_wish(workload), workload.limit_s

    def then(say: Say) -> Workload:
        return Workload(wish, limit_s, say)

    return then


def now() -> str:
    """The time in UTC, as reports write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Judging:
    """By what nodes are judged."""

    expectation: Expectation
    level: Level | None
    """None: each as deep as it was looked at."""
    wanted: set[str]
    deepest: Level = "quick"
    """Of all that were judged."""

    def __post_init__(self) -> None:
        self.deepest = self.level or "quick"

    def bundle(self, host: str, bundle: Bundle, seconds: float | None) -> NodeReport:
        """The report on one bundle."""
        node = facts_from_bundle(bundle)
        level = self.level or ("standard" if bundle.results else "quick")
        self.deepest = max(self.deepest, level, key=LEVELS.index)
        return judged(host, identify(node), judge(node, self.expectation, level, self.wanted), seconds)

    def answer(self, answer: "Collected") -> NodeReport:
        """The report on one node that was asked."""
        if answer.bundle is None:
            return unreachable(answer.host, answer.reason or "no answer", answer.seconds)
        node = self.bundle(answer.host, answer.bundle, answer.seconds)
        return node if answer.unchecked is None else unchecked(node, answer.unchecked)


def write(document: Report, place: Output, *, verbose: bool) -> None:
    """Write one rendering to its place."""
    if place.path is None:
        if place.format == "json":
            click.echo(document.to_json(), nl=False)
        else:
            console.write(document, sys.stdout, verbose=verbose)
        return
    write_whole(
        place.path, document.to_json() if place.format == "json" else console.as_text(document, verbose=verbose)
    )
