"""Records of ranks that another program started, and dumps of a job: read, and judged without a node."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpunode.checks import Baseline, Expectation, Identity, RunningStack
from gpunode.errors import UndeterminedError, UsageError
from gpunode.fabric.flight_recorder import findings_of, read_dumps
from gpunode.fabric.model import RankNodes
from gpunode.fabric.second_opinion import opinion_of
from gpunode.fabric.verdict import FabricVerdict, values_of, verdict_of
from gpunode.judging.report import NodeReport, judged
from gpunode.whole import read_bounded
from gpunode.workload.output import BoundedOutput
from gpunode.workload.transport import LaunchFailure

MOST_RECORDS = 64 * 2**20
"""Bytes of a file with the output of ranks."""
UNKNOWN = Identity(simulated=False, stack=RunningStack(), gpus=())
"""What is known of a node without facts."""


@dataclass(frozen=True)
class ExpectedOfNodes:
    """What the site expects, and the earlier figures of each node."""

    site: Expectation
    baselines: Mapping[str, Baseline]

    def of(self, names: Iterable[str]) -> dict[str, Expectation]:
        """Return the expectation of each node."""
        return {
            name: self.site.with_baseline(self.baselines[name]) if name in self.baselines else self.site
            for name in names
        }


def of_records(
    records: list[dict[str, Any]],
    engine: str,
    minutes: float,
    expects: ExpectedOfNodes,
    nccl_tests_log: tuple[str, str | None] | None = None,
) -> tuple[FabricVerdict, list[NodeReport]]:
    """Return the verdict on records, and on nccl-tests' output, and the reports on the nodes that the records name."""
    links = next((record for record in records if record.get("record") == "fabric.links"), {})
    try:
        known = RankNodes.model_validate(values_of(links))
    except ValidationError:
        known = RankNodes()  # the verdict has the reason
    names = list(dict.fromkeys(known.names)) or ["rank 0"]
    verdict = verdict_of(
        records,
        nodes=names,
        engine=engine,
        backend=known.backend,
        ranks=len(known.rank_nodes or names),
        minutes=minutes,
        expects=expects.of(names),
    )
    if nccl_tests_log is not None:
        output, failure = nccl_tests_log
        verdict.add(names, opinion_of(output, verdict.report, failure))
    return verdict, [judged(name, UNKNOWN, verdict.findings[name], None) for name in sorted(verdict.findings)]


def of_dumps(folder: Path) -> list[NodeReport]:
    """Return the verdict on the dumps of one job, as the report on a node of its name. Raises UsageError."""
    findings = [finding for _, finding in findings_of(read_dumps(folder))]
    return [judged("job", UNKNOWN, findings, None)]


def read_file(path: Path) -> str:
    """Return the text of a file. Raises UsageError."""
    try:
        data = read_bounded(path, MOST_RECORDS)
    except UsageError as err:
        raise UsageError(f"--records {err}") from None
    if len(data) > MOST_RECORDS:
        raise UsageError(f"--records {path}: more than {MOST_RECORDS >> 20} MiB")
    return data.decode(errors="replace")


def records_of(text: str) -> list[dict[str, Any]]:
    """Return the records in the output of ranks."""
    output = BoundedOutput()
    try:
        output.stdout(text.encode() + b"\n")
    except LaunchFailure as err:
        raise UndeterminedError(str(err)) from None
    return output.records
