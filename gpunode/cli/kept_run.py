"""What a run of ``validate`` keeps and compares: the history, the earlier run of ``--since``, the fleet."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gpunode.checks import EarlierGpus
from gpunode.cli.recording import Recorder
from gpunode.cli.saved_runs import SNAPSHOT, of_path
from gpunode.errors import UndeterminedError
from gpunode.history.compare import Comparison, RunComparison, RunOrigin
from gpunode.history.outliers import LEAST_NODES, FleetProfile
from gpunode.history.snapshot import Snapshot
from gpunode.history.store import History, HistoryError, history_folder
from gpunode.judging.evaluator import JudgedNode
from gpunode.judging.report import Fleet


class EarlierRun:
    """The run that ``--since`` names. Raises UsageError, and UndeterminedError if the history cannot be read."""

    def __init__(self, text: str) -> None:
        path = Path(text)
        self._of: Callable[[str], Snapshot | None]
        if path.exists():
            side = of_path(path)
            nodes = {node.host: node for node in side.nodes}
            self.origin, self.hosts, self._of = side.origin, set(nodes), nodes.get
            return
        try:
            history = History(history_folder())
            run = history.find(text)
        except HistoryError as err:
            raise UndeterminedError(str(err)) from None
        self.origin = RunOrigin(name=f"run {run.id}", started_at=run.started_at)
        self.hosts = set(history.hosts_of(run.id))
        self._of = lambda host: next(history.snapshots(run.id, host), None)

    def of(self, host: str) -> Snapshot | None:
        """Return a node of the run; None: it has no such node."""
        try:
            return self._of(host) if host in self.hosts else None
        except HistoryError as err:
            raise UndeterminedError(str(err)) from None


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
        found = self._fleet.outliers() if len(self._hosts) >= LEAST_NODES else None
        comparison = self.compared()
        since = None if comparison is None else comparison.model_dump(mode="json", by_alias=True)
        if found is None:
            return Fleet(since=since)
        rows = [one.model_dump(mode="json") for one in found]
        return Fleet(
            outliers=tuple(row for row in rows if row["kind"] != "mixed"),
            inconsistencies=tuple(row for row in rows if row["kind"] == "mixed"),
            since=since,
        )
