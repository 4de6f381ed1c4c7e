"""What was saved: ``gpunode history`` (runs), ``compare`` (two of them) and ``evidence`` (bundles, to be sent)."""

import gzip
import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import Field

from gpunode import __version__
from gpunode.cli.options import QUIET, VERBOSE_ACCEPTED, format_option, output_option, quiet, verbose_option
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.frozen import FrozenByName
from gpunode.history.compare import compare, compare_runs
from gpunode.history.runs import side_of
from gpunode.history.snapshot import Snapshot
from gpunode.history.store import History, HistoryLimits, SavedRun, history_folder
from gpunode.history.trends import Trend, trends
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.request import JudgingRequest
from gpunode.judging.saved import bundle_files, folder_for_bundles, read_file, write_bundle
from gpunode.judging.scrubbing import Scrubber
from gpunode.names import fold
from gpunode.probe import Answer, Collected
from gpunode.probe.bundle import Bundle
from gpunode.report.comparison import as_lines, as_markdown, as_text
from gpunode.text import counted, printable, printable_json
from gpunode.whole import must_not_be_redirected, write_whole

VERBOSE = verbose_option("Print the folder of the history too.")
LIMITS = HistoryLimits()


class RunExport(FrozenByName):
    """The document ``gpunode.run/1``: a run with its nodes."""

    schema_name: Literal["gpunode.run/1"] = Field("gpunode.run/1", alias="schema")
    id: int
    verb: str
    level: str
    started_at: str
    finished_at: str | None
    status: str | None
    gpunode_version: str
    nodes: tuple[Snapshot, ...]


@click.group("history")
@VERBOSE_ACCEPTED
def history_command() -> None:
    """Show the runs that validate and collect saved, what changed on a node since, and its trends.

    The history is below the user's state directory, root's in /var/lib/gpunode/history; GPUNODE_HISTORY=DIR is another
    folder, GPUNODE_HISTORY=off saves nothing.
    """


@contextmanager
def opened(*, verbose: bool, write: bool = False) -> Iterator[History]:
    """Yield the history. Raises UsageError, and HistoryError if it cannot be read."""
    folder = history_folder()
    if verbose:
        click.echo(printable(f"gpunode: history: {folder}"), err=True)
    with History(folder, write=write) as history:
        yield history


@history_command.command("list")
@VERBOSE
def list_(*, verbose: bool) -> int:
    """List the runs, the latest last.

    \b
    Example:
      gpunode history list
    """
    with opened(verbose=verbose) as history:
        runs = history.runs()
    for run in runs:
        click.echo(printable(_line(run)))
    if not runs:
        raise UndeterminedError("the history has no run")
    return Exit.GOOD


def _line(run: SavedRun) -> str:
    status = run.status if run.finished_at is not None else "interrupted"
    return (
        f"{run.id:>5}  {run.started_at:<20}  {run.verb:<8}  {run.level:<8}  {status:<11}  {counted(run.nodes, 'node')}"
    )


@history_command.command("show")
@click.argument("name", metavar="RUN|HOST")
@VERBOSE
def show(*, name: str, verbose: bool) -> int:
    """Show the findings of a run, or what changed on a node from run to run, and its trends.

    RUN is last, a number, or a date. HOST is a node's name.

    \b
    Examples:
      gpunode history show last
      gpunode history show gpu-07
    """
    with opened(verbose=verbose) as history:
        lines = _of_host(history, name) if name in history.hosts() else _of_run(history, name)
        for line in lines:
            click.echo(printable(line))
    return Exit.GOOD


def _of_run(history: History, name: str) -> list[str]:
    run = history.find(name)
    findings = []
    for finding in history.findings(run.id):
        where = "" if finding.component == "node" else f"{finding.component}: "
        findings.append(f"{finding.status:<5}  {finding.host}: {where}{finding.check}: {finding.message}")
    return [_line(run).strip(), *(findings or ["no finding that failed, warned or could not be determined"])]


def _of_host(history: History, host: str) -> list[str]:
    """Return what changed from run to run, and the trends."""
    before: tuple[SavedRun, Snapshot] | None = None
    lines: list[str] = []
    number = 0
    for run, node in history.of_host(host):
        number += 1
        if before is None:
            gpus = ", ".join(gpu.title for gpu in node.gpus) or "no GPU"
            lines.append(f"{run.title}: first run, {gpus}")
        elif node.reached != before[1].reached:
            lines.append(f"{run.title}: {'reached again' if node.reached else 'not reached'}")
        elif node.reached:
            comparison = compare(before[1], node)
            lines += [f"{run.title}: {line}" for line in as_lines(comparison.changes)]
        before = (run, node)
    lines.append(f"{host}: {counted(number, 'complete run')}, {counted(max(0, len(lines) - 1), 'change')}")
    return [*lines, *(f"trend: {trend.text}" for trend in trends_of(history, host))]


def trends_of(history: History, host: str | None = None) -> list[Trend]:
    """Return the trends of one node, or of all."""
    all_trends: list[Trend] = []
    for name, rows in groupby(history.measured(host), key=lambda row: row[0]):
        all_trends += trends(name, ((time, node) for _, time, node in rows))
    return all_trends


@history_command.command("trends")
@click.argument("host", required=False)
@VERBOSE
def show_trends(*, host: str | None, verbose: bool) -> int:
    """List counters of errors that grew, GPUs that became warmer, and figures that fell, of HOST or of all nodes.

    \b
    Example:
      gpunode history trends
    """
    with opened(verbose=verbose) as history:
        if host is not None and host not in history.hosts():
            raise UsageError(f"{host}: the history has no such node")
        all_trends = trends_of(history, host)
    for trend in all_trends:
        click.echo(printable(f"{trend.host}: {trend.text}"))
    if not all_trends:
        click.echo("no trend")
    return Exit.GOOD


@history_command.command("export")
@click.argument("run")
@output_option("File to write.  [default: stdout]")
@click.option("--bundles", type=click.Path(path_type=Path), metavar="DIR", help="Write the run's bundles instead.")
@VERBOSE
def export(*, run: str, output: Path | None, bundles: Path | None, verbose: bool) -> int:
    """Write a run as JSON (gpunode schema run), or its bundles as DIR/HOST.json for --replay.

    \b
    Example:
      gpunode history export last --bundles last-run/
    """
    with opened(verbose=verbose) as history:
        saved = history.find(run)
        nodes = list(history.snapshots(saved.id))
        if bundles is not None:
            return _write_bundles(history, saved, [node.host for node in nodes], bundles)
    values = {key: value for key, value in asdict(saved).items() if key not in ("name", "version")}
    text = RunExport(**{**values, "gpunode_version": saved.version, "nodes": tuple(nodes)})
    document = printable_json(text.model_dump_json(by_alias=True, indent=1) + "\n")
    if output is None:
        click.echo(document, nl=False)
    else:
        write_whole(output, document, private=True)
    return Exit.GOOD


def _write_bundles(history: History, run: SavedRun, hosts: list[str], folder: Path) -> int:
    folder = folder_for_bundles(folder)
    absent, damaged = list[str](), list[str]()
    for host in hosts:
        path = history.bundle_path(run, host)
        try:
            text = gzip.decompress(path.read_bytes())
            document = Answer(text, where=str(path), host=host).bundle().to_json().encode()
        except FileNotFoundError:
            absent.append(host)
        except (OSError, EOFError, zlib.error, UsageError):
            damaged.append(host)
        else:
            write_bundle(folder, host, document)
    for problem, of in (("is kept", absent), ("can be read", damaged)):
        if of:
            click.echo(printable(f"gpunode: no bundle of {fold(of)} {problem}"), err=True)
    lost = len(absent) + len(damaged)
    click.echo(f"{counted(len(hosts) - lost, 'bundle')} written to {folder}", err=True)
    return Exit.UNDETERMINED if lost else Exit.GOOD


@history_command.command("prune")
@click.option("--days", type=click.FloatRange(0), default=LIMITS.days, show_default=True, help="Keep runs for DAYS.")
@click.option(
    "--mib", type=click.FloatRange(0), default=LIMITS.mib, show_default=True, help="Limit of the SQLite file."
)
@click.option(
    "--bundles-mib", type=click.FloatRange(0), default=LIMITS.bundles_mib, show_default=True, help="Limit of bundles."
)
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Remove everything about HOST.  [repeatable]")
@VERBOSE
def prune(*, days: float, mib: float, bundles_mib: float, hosts: tuple[str, ...], verbose: bool) -> int:
    """Remove what exceeds the limits, the oldest first; every saved run does the same with the default limits.

    \b
    Examples:
      gpunode history prune --days 90
      gpunode history prune --host gpu-07
    """
    with opened(verbose=verbose, write=True) as history:
        known = history.hosts()
        unknown = [host for host in hosts if host not in known and not history.bundles_of(host)]
        if unknown:
            raise UsageError(f"{fold(unknown)}: the history has no such node")
        runs, bundles = history.prune(HistoryLimits(days, mib, bundles_mib), hosts=hosts)
    click.echo(f"removed {counted(runs, 'entry', 'entries')} and the bundles of {counted(bundles, 'run')}", err=True)
    return Exit.GOOD


@click.command("compare")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@format_option("text", "json", "markdown")
@output_option("File to write.  [default: stdout]")
@VERBOSE_ACCEPTED
def compare_command(*, before: str, after: str, form: str, output: Path | None) -> int:
    """Compare two runs, node by node: GPUs, links, versions, settings, verdicts, figures beyond their noise.

    A and B are bundles, folders of bundles, reports (--format json), or runs of the history: last, a number, a date.
    Values that vary on an unchanged node are not compared. Exit codes: 0 nothing is worse, 1 something is worse, 2
    wrong usage, 3 no node could be compared.

    \b
    Examples:
      gpunode compare monday/ tuesday/
      gpunode compare 2026-11-01 last --format markdown
    """
    if output is not None:
        must_not_be_redirected(output, "--output")
    earlier, later = side_of(before), side_of(after)
    comparison = compare_runs(earlier.nodes, later.nodes, (earlier.origin, later.origin))
    if form == "json":
        text = printable_json(comparison.to_json())
    else:
        text = as_markdown(comparison) if form == "markdown" else as_text(comparison)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)
    if not comparison.nodes and not comparison.not_reached:
        raise UndeterminedError(f"{before} and {after} have no node in common: nothing was compared")
    return Exit.FAILED if comparison.worse or comparison.not_reached else Exit.GOOD


FORMAT = "gpunode.evidence/1"
MOST_SHOWN = 40
Document = dict[str, Any]


@click.command("evidence")
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True)
@output_option("Write the archive: evidence.tar.gz.")
@click.option("--word", "words", multiple=True, metavar="TEXT", help="Also replace this word: a customer, a project.")
@QUIET
@VERBOSE_ACCEPTED
def evidence_command(*, bundles: tuple[str, ...], output: Path | None, words: tuple[str, ...]) -> int:
    """Make an archive of saved bundles that can be sent to others; without --output, show what it would contain.

    Names of hosts, users and sites, addresses, MAC addresses, serial numbers, UUIDs, GUIDs, keys and process names are
    replaced, the same by the same in all bundles. Each bundle is judged before and after: the verdicts must be the
    same. Exit codes: 0 good, 2 wrong usage, or something could not be replaced, 3 a verdict changed or is unknown.

    \b
    Examples:
      gpunode collect -i site/hosts.yml --save bundles/
      gpunode evidence bundles/
      gpunode evidence bundles/ --word acme --output evidence.tar.gz
    """
    files = bundle_files(bundles)
    originals = [_document(path) for path in files]
    scrubber = Scrubber([str(document["host"]) for document in originals], words)
    scrubbed = [scrubber.bundle(document) for document in originals]
    for number, document in enumerate(scrubbed, start=1):
        document["host"] = f"node-{number}"
    texts = [json.dumps(document, indent=1, sort_keys=True) + "\n" for document in scrubbed]
    for path, text in zip(files, texts, strict=True):
        leftover = next(scrubber.left(text), None)
        if leftover is not None:
            raise UsageError(f"{path}: nothing was written: {leftover} could not be replaced everywhere")
    changed = _changed_verdicts(originals, scrubbed)
    members = {f"bundles/node-{number}.json": text for number, text in enumerate(texts, start=1)}
    if not quiet():
        for line in _preview(scrubber, scrubbed, members):
            click.echo(printable(line), err=output is not None)
    for line in changed[:MOST_SHOWN]:
        click.echo(printable(f"verdict changed: {line}"), err=True)
    if changed:
        raise UndeterminedError(f"nothing was written: {counted(len(changed), 'verdict')} changed by the replacement")
    if output is not None:
        archive = packed(members, dict(scrubber.replaced))
        write_whole(output, archive, private=True)
        click.echo(f"{hashlib.sha256(archive).hexdigest()}  {output}")
    return Exit.GOOD


def _document(path: Path) -> Document:
    content = read_file(path)
    return json.loads(Bundle.from_json(content, str(path)).to_json())  # type: ignore[no-any-return]


def _preview(scrubber: Scrubber, documents: Sequence[Document], members: Mapping[str, str]) -> Iterator[str]:
    """Yield what leaves: files, what each has, what was replaced."""
    for name, text in members.items():
        yield f"{name}: {len(text) / 1000:.0f} kB"
    names = sorted({name for document in documents for key in ("commands", "files") for name in document.get(key, ())})
    yield f"with {counted(len(names), 'command and file', 'commands and files')}: {' '.join(names[:MOST_SHOWN])} …"
    rows = sorted(scrubber.replaced.items())
    yield "replaced: " + (", ".join(f"{kind} {number}" for kind, number in rows) or "nothing")
    yield "read the archive before you send it; --word TEXT replaces what else must not leave"


def _changed_verdicts(before: Sequence[Document], after: Sequence[Document]) -> list[str]:
    """Return the findings that a node has only before or only after, without components that were renamed."""
    lines = []
    for number, (original, scrubbed) in enumerate(zip(_verdicts(before), _verdicts(after), strict=True), start=1):
        for check, status in sorted(original ^ scrubbed):
            lines.append(f"node-{number}: {check} {status}")
    return lines


def _verdicts(documents: Sequence[Document]) -> list[set[tuple[str, str]]]:
    answers = [
        Collected(f"node-{number}", Answer(json.dumps(document).encode(), where=f"node-{number}"), None, None)
        for number, document in enumerate(documents, start=1)
    ]
    with Evaluator(JudgingRequest()) as evaluator:
        reports = [node.report for node in evaluator.judge_fleet(answers)]
    return [{(finding.check, str(finding.status)) for finding in report.findings} for report in reports]


def packed(members: Mapping[str, str], replaced: Mapping[str, int]) -> bytes:
    """Return the archive: the bundles, and MANIFEST.json with the hash of each."""
    manifest = {
        "schema": FORMAT,
        "gpunode_version": __version__,
        "replaced": dict(sorted(replaced.items())),
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in members.items()},
    }
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for name, text in {"MANIFEST.json": json.dumps(manifest, indent=1) + "\n", **members}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()
