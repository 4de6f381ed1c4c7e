"""The runs that a comparison is about: of the history, in files, and the one that is kept."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpunode.catalog import load
from gpunode.checks import EarlierGpus
from gpunode.errors import UsageError
from gpunode.history.compare import Comparison, RunComparison, RunOrigin
from gpunode.history.outliers import LEAST_NODES, FleetProfile
from gpunode.history.recording import Recorder, of_report
from gpunode.history.snapshot import Snapshot, snapshot_of
from gpunode.history.store import History, history_folder
from gpunode.judging.baseline import report_of
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.report import Fleet, Report
from gpunode.judging.request import EvaluatedNode, Json, JudgingRequest
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.whole import exists

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
