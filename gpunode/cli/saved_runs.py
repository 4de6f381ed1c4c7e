"""The sides of a comparison: runs of the history, bundles, reports."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from gpunode.catalog import load
from gpunode.errors import UndeterminedError, UsageError
from gpunode.history.compare import RunOrigin
from gpunode.history.snapshot import GpuRecord, Snapshot, figures_of, snapshot_of, verdicts_of
from gpunode.history.store import History, HistoryError, history_folder
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.report import NodeReport, Report
from gpunode.judging.request import EvaluatedNode, Json, JudgingRequest
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.yaml_file import first_error

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

    Raises UsageError, and UndeterminedError if the history cannot be read.
    """
    path = Path(text)
    if path.exists():
        return of_path(path)
    if "/" in text or text.endswith(".json"):
        raise UsageError(f"{text}: no such file or folder")
    try:
        with History(history_folder()) as history:
            run = history.find(text)
            return Side(RunOrigin(name=f"run {run.id}", started_at=run.started_at), list(history.snapshots(run.id)))
    except HistoryError as err:
        raise UndeterminedError(str(err)) from None


def of_path(path: Path) -> Side:
    """Return the nodes of a report, of a bundle, or of a folder of bundles. Raises UsageError."""
    if path.is_file() and (report := _report(path)) is not None:
        nodes = sorted((of_report(node, report) for node in report.nodes), key=lambda node: node.host)
        return Side(RunOrigin(name=path.name, started_at=report.started_at), nodes)
    load().prepare()
    nodes = sorted(_of_bundles(bundle_files([str(path)])), key=lambda node: node.host)
    double = next((one.host for one, other in pairwise(nodes) if one.host == other.host), None)
    if double is not None:
        raise UsageError(f"{path}: two bundles of {double}: keep one of them")
    at = max((node.collected_at for node in nodes if node.collected_at), default=None)
    return Side(RunOrigin(name=str(path), started_at=at), nodes)


def _report(path: Path) -> Report | None:
    """Return a report; None for another file. Raises UsageError for a report that cannot be read."""
    try:
        content = path.read_bytes()
        document = json.loads(content) if b"gpunode.report/" in content[:200] else None
        return None if document is None else Report.model_validate(document)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    except (ValueError, RecursionError) as err:
        detail = first_error(err) if isinstance(err, ValidationError) else str(err)
        raise UsageError(f"{path}: not a report of gpunode validate --format json: {detail}") from None


def of_report(node: NodeReport, report: Report) -> Snapshot:
    """Return the snapshot of a node of a report: without facts."""
    return Snapshot(
        host=node.host,
        collected_at=report.started_at,
        level=report.level,
        simulated=node.simulated,
        stack=node.stack,
        gpus=tuple(GpuRecord(index=gpu.index, name=gpu.name, uuid=gpu.uuid) for gpu in node.gpus),
        verdicts=verdicts_of(node.findings),
        figures=figures_of(node.findings),
    )


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
