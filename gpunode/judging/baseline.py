"""The report of ``--baseline``: a node's own earlier figures."""

import json
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path

from pydantic import ValidationError

from gpunode.checks import Baseline
from gpunode.checks.registry import Status
from gpunode.errors import UsageError
from gpunode.expectations import is_metric
from gpunode.judging.report import NodeReport, Report
from gpunode.text import listed
from gpunode.yaml_file import first_error

GOOD = (Status.PASS, Status.NOTE, Status.WARN, Status.SKIP)
"""A figure that failed is not used as an expectation."""


def read_baselines(path: Path) -> dict[str, Baseline]:
    """Read a report and return the figures of its nodes by host. Raises UsageError with one line."""
    try:
        content = path.read_bytes()
    except OSError as err:
        raise UsageError(f"--baseline {path}: cannot be read: {err.strerror}") from None
    report = report_of(content, f"--baseline {path}")
    all_nodes = {node.host: of_node(node, f"{path.name} of {report.finished_at}") for node in report.nodes}
    baselines = {host: baseline for host, baseline in all_nodes.items() if baseline.figures}
    if not baselines:
        raise UsageError(
            f"--baseline {path}: it contains no figure of a real GPU: run gpunode validate --level standard first"
        )
    return baselines


def report_of(content: bytes, where: str) -> Report:
    """Parse a report. Raises UsageError with one line that names ``where``."""
    try:
        return Report.model_validate(json.loads(content))
    except (ValueError, RecursionError) as err:
        detail = first_error(err) if isinstance(err, ValidationError) else str(err)
        raise UsageError(f"{where}: not a report of gpunode validate --format json: {detail}") from None


def without_figures(path: Path, nodes: Iterable[NodeReport], baselines: Mapping[str, Baseline]) -> str | None:
    """Return a line that names the nodes without a figure in the report; None: there are none."""
    # Of two bundles of one host, the second has its file after the name; of an unreachable node it is unknown whether
    # it is simulated.
    reached = [node.host for node in nodes if node.simulated is not None]
    absent = [host for host in reached if host.partition(" (")[0] not in baselines]
    return f"--baseline {path}: it has no figure of {listed(absent, most=5)}: not compared" if absent else None


def of_node(node: NodeReport, origin: str) -> Baseline:
    """Return a node's figures that can be expected again; none of a simulated node."""
    figures: dict[tuple[str, str, int | None], float] = {}
    for finding in node.findings:
        figure, measured = finding.figure, finding.measured
        if figure is None or finding.status not in GOOD or not is_metric(figure.metric):
            continue
        if isinstance(measured, int | float) and measured > 0:
            key = (figure.metric, finding.component, figure.message_bytes)
            # If two programs measured the same, the slower one is used: the other's figure does not describe this one.
            figures[key] = min(float(measured), figures.get(key, inf))
    return Baseline(origin, {} if node.simulated else figures)
