"""The runs that a comparison is about: of the history, in files, and the one that is saved.

What goes wrong while a run is saved is one line on stderr and never changes a verdict."""

import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from gpunode import __version__
from gpunode.catalog import load
from gpunode.checks import EarlierGpus, Finding, Level
from gpunode.errors import UsageError
from gpunode.file_access import FileRefusedError
from gpunode.history.compare import Comparison, RunComparison, RunOrigin
from gpunode.history.outliers import LEAST_NODES, FleetProfile
from gpunode.history.snapshot import GpuRecord, Snapshot, figures_of, snapshot_of, verdicts_of
from gpunode.history.store import BATCH, FABRIC, History, HistoryError, HistoryLimits, default_folder, history_folder
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.expectation import report_of
from gpunode.judging.report import Fleet, NodeReport, Report, worst
from gpunode.judging.request import EvaluatedNode, Json, JudgingRequest
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.text import printable
from gpunode.whole import exists

FAILURES = (HistoryError, OSError, FileRefusedError, sqlite3.Error)
MOST_FAILURES = 3
Answer = TypeVar("Answer")


def _warn(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")


class Recorder(AbstractContextManager["Recorder"]):
    """One run that is being saved. Nothing here raises an error of the history; after one, nothing more is saved.

    A run that ends by an exception stays in the history as interrupted. ``bundle`` may be called from several threads.
    """

    def __init__(self, verb: str, level: str, started_at: str, *, wanted: bool = True) -> None:
        self._history: History | None = None
        self._run = 0
        self._name = ""
        self._level = level
        self._waiting: list[tuple[Snapshot, str, Sequence[Finding]]] = []
        self._unsaved = 0
        if wanted:
            self._try(lambda: self._begin(verb, started_at))

    def _begin(self, verb: str, started_at: str) -> None:
        folder = default_folder()
        if folder is None:
            return
        history = History(folder, write=True)
        if history.moved is not None:
            _warn(f"gpunode: history: damaged, moved to {history.moved}; a new one begins")
        try:
            self._run = history.begin(verb, self._level, started_at, __version__)
            self._name = history.name_of(self._run)
        except BaseException:
            history.close()
            raise
        self._history = history

    def _try(self, work: Callable[[], Answer]) -> Answer | None:
        try:
            return work()
        except FAILURES as err:
            reason = err.strerror or str(err) if isinstance(err, OSError) else str(err)
            _warn(f"gpunode: this run is not saved in the history: {reason}")
            self._end()
            return None

    def earlier_gpus(self, hosts: Iterable[str]) -> dict[str, EarlierGpus]:
        """Return the GPUs that the history has of each node; empty without a history."""
        history = self._history
        return (None if history is None else self._try(lambda: history.settled_gpus(hosts))) or {}

    @property
    def history(self) -> History | None:
        """Return the store; None if nothing is saved."""
        return self._history

    @property
    def run(self) -> int:
        """Return the number of the run."""
        return self._run

    def bundle(self, host: str, text: bytes) -> None:
        """Save a node's bundle beside the history."""
        if self._history is None:
            return
        try:
            self._history.save_bundle(self._name, host, text)
        except (OSError, FileRefusedError) as err:
            self._unsaved += 1
            if self._unsaved <= MOST_FAILURES:
                _warn(f"gpunode: history: bundle of {host} not saved: {err}")

    def node(self, snapshot: Snapshot, status: str, findings: Sequence[Finding] = ()) -> None:
        """Save a node."""
        if self._history is None:
            return
        self._waiting.append((snapshot, status, findings))
        if len(self._waiting) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        history, waiting = self._history, self._waiting
        self._waiting = []
        if history is not None and waiting:
            self._try(lambda: history.add(self._run, waiting))

    def finish(self, status: str, finished_at: str, level: str | None = None) -> None:
        """Mark the run as complete, and remove what exceeds the limits."""
        self._flush()
        history = self._history
        if history is not None:
            self._try(lambda: history.finish(self._run, status, finished_at, level or self._level))
        if self._history is not None:
            self._try(lambda: self._history and self._history.prune(HistoryLimits()))

    def _end(self) -> None:
        if self._history is not None:
            self._history.close()
        self._history = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._flush()
        self._end()


def of_report(node: NodeReport, level: Level, collected_at: str | None = None) -> Snapshot:
    """Return the snapshot of a node of a report: without facts."""
    return Snapshot(
        host=node.host,
        collected_at=collected_at,
        level=level,
        simulated=node.simulated,
        stack=node.stack,
        gpus=tuple(GpuRecord(index=gpu.index, name=gpu.name, uuid=gpu.uuid) for gpu in node.gpus),
        verdicts=verdicts_of(node.findings),
        figures=figures_of(node.findings),
    )


def record_fabric(nodes: Sequence[NodeReport], started: str, finished_at: str, *, wanted: bool) -> Fleet:
    """Save the run in the history, and return the nodes with figures that differ from most others'."""
    recorder = Recorder(FABRIC, "standard", started, wanted=wanted)
    fleet = FleetProfile()
    with recorder:
        for node in nodes:
            snapshot = of_report(node, "standard")
            fleet.add(snapshot)
            recorder.node(snapshot, node.status.value, node.findings)
        recorder.finish(worst(node.status for node in nodes), finished_at)
    figures = [outlier for outlier in fleet.outliers() if outlier.kind == "figure"]
    return Fleet(outliers=tuple(outlier.model_dump(mode="json") for outlier in figures) if figures else None)


SNAPSHOT = "snapshot"
"""The name of the snapshot among the extracts of a request."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    origin: RunOrigin
    nodes: list[Snapshot]
    """In the order of their names."""


def side_of(text: str) -> Side:
    """Return what an argument of a comparison names: a file or folder, else a run of the history.

    Raises UsageError, and HistoryError if the history cannot be read.
    """
    path = Path(text)
    if exists(path):
        return of_path(path)
    if "/" in text or text.endswith(".json"):
        raise UsageError(f"{text}: no such file or folder")
    with History(history_folder()) as history:
        run = history.find(text)
        return Side(RunOrigin(name=f"run {run.id}", started_at=run.started_at), list(history.snapshots(run.id)))


def of_path(path: Path) -> Side:
    """Return the nodes of a report, of a bundle, or of a folder of bundles. Raises UsageError."""
    if path.is_file() and (report := _report(path)) is not None:
        snapshots = (of_report(node, report.level, report.started_at) for node in report.nodes)
        nodes = sorted(snapshots, key=lambda node: node.host)
        return Side(RunOrigin(name=path.name, started_at=report.started_at), nodes)
    load().prepare()
    nodes = sorted(_of_bundles(bundle_files([str(path)])), key=lambda node: node.host)
    double = next((node.host for node, other in pairwise(nodes) if node.host == other.host), None)
    if double is not None:
        raise UsageError(f"{path}: two bundles of {double}: keep one of them")
    at = max((node.collected_at for node in nodes if node.collected_at), default=None)
    return Side(RunOrigin(name=str(path), started_at=at), nodes)


def _report(path: Path) -> Report | None:
    """Return a report; None for another file. Raises UsageError for a report that cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    return report_of(content, str(path)) if b"gpunode.report/" in content[:200] else None


def _of_bundles(files: Sequence[Path]) -> Iterator[Snapshot]:
    with Evaluator(JudgingRequest(extracts={SNAPSHOT: extract_snapshot})) as evaluator:
        for node in evaluator.judge_fleet(saved_answers(files), strict=True):
            if node.extracted is None:
                raise UsageError(f"{node.report.host}: {node.report.findings[0].message}")
            yield Snapshot.model_validate(node.extracted[SNAPSHOT])


def extract_snapshot(node: EvaluatedNode) -> Json:
    """Return the snapshot of an evaluated node, for ``JudgingRequest.extracts``."""
    snapshot = snapshot_of(node.facts).judged(node.facts.host, node.report.findings, node.level)
    return snapshot.model_dump(mode="json", exclude_defaults=True)


class EarlierRun:
    """The run that ``--since`` names. Raises UsageError, and HistoryError if the history cannot be read."""

    def __init__(self, text: str) -> None:
        path = Path(text)
        self._of: Callable[[str], Snapshot | None]
        if exists(path):
            side = of_path(path)
            nodes = {node.host: node for node in side.nodes}
            self.origin, self.hosts, self._of = side.origin, set(nodes), nodes.get
            return
        history = History(history_folder())
        run = history.find(text)
        self.origin = RunOrigin(name=f"run {run.id}", started_at=run.started_at)
        self.hosts = set(history.hosts_of(run.id))
        self._of = lambda host: next(history.snapshots(run.id, host), None)

    def of(self, host: str) -> Snapshot | None:
        """Return a node of the run; None: it has no such node."""
        return self._of(host) if host in self.hosts else None


class KeptRun:
    """The nodes of one run, each added once."""

    def __init__(self, recorder: Recorder, since: EarlierRun | None, started_at: str, racks: Mapping[str, str]) -> None:
        self._recorder = recorder
        self._since = since
        origin = RunOrigin(name=f"run {recorder.run}" if recorder.run else "this run", started_at=started_at)
        self._changes = None if since is None else RunComparison((since.origin, origin))
        self._fleet = FleetProfile(racks)
        self._hosts: set[str] = set()

    def earlier_gpus(self, hosts: Iterable[str]) -> dict[str, EarlierGpus]:
        """Return the GPUs that the history has of each node."""
        return self._recorder.earlier_gpus(hosts)

    def add(self, node: JudgedNode) -> None:
        """Add the result of a node."""
        report = node.report
        if node.extracted is None:
            snapshot = Snapshot(host=report.host, level=node.level)
        else:
            values: Any = node.extracted[SNAPSHOT]
            snapshot = Snapshot.model_validate({**values, "host": report.host})
        self._hosts.add(report.host)
        self._fleet.add(snapshot)
        if self._changes is not None and self._since is not None:
            self._changes.add(self._since.of(report.host), snapshot)
        if node.document is not None:
            self._recorder.bundle(report.host, node.document)
        self._recorder.node(snapshot, report.status.value, report.findings)

    def compared(self) -> Comparison | None:
        """Return the comparison with the earlier run; None without ``--since``."""
        return None if self._changes is None else self._changes.result()

    def fleet(self) -> Fleet:
        """Return the comparisons for the report."""
        outliers = self._fleet.outliers() if len(self._hosts) >= LEAST_NODES else None
        comparison = self.compared()
        since = None if comparison is None else comparison.model_dump(mode="json", by_alias=True)
        if outliers is None:
            return Fleet(since=since)
        rows = [outlier.model_dump(mode="json") for outlier in outliers]
        return Fleet(
            outliers=tuple(row for row in rows if row["kind"] != "mixed"),
            inconsistencies=tuple(row for row in rows if row["kind"] == "mixed"),
            since=since,
        )
