"""Saving of a run in the history: what goes wrong there is one line on stderr and never changes a verdict."""

import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

from gpunode import __version__
from gpunode.checks import EarlierGpus, Finding, Level
from gpunode.file_access import FileRefusedError
from gpunode.history.outliers import FleetProfile
from gpunode.history.snapshot import GpuRecord, Snapshot, figures_of, verdicts_of
from gpunode.history.store import BATCH, FABRIC, History, HistoryError, HistoryLimits, default_folder
from gpunode.judging.report import Fleet, NodeReport, worst
from gpunode.text import printable

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
