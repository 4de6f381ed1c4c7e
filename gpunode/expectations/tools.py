"""Conversion of parsed output into figures: nvbandwidth, nccl-tests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gpunode.expectations.assess import Figure
from gpunode.expectations.limits import METRICS, Where
from gpunode.facts.models.outputs import NcclRow, NcclTests, Nvbandwidth

NVBANDWIDTH_BYTES = 512 * 2**20
"""Its buffer size; the default of ``--bufferSize``."""
HOST_TESTS = {"host_to_device_memcpy_ce": "host_to_device", "device_to_host_memcpy_ce": "device_to_host"}
PEER_TESTS = frozenset({"device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce"})
COLLECTIVES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
"""Collectives with another name in nccl-tests."""


@dataclass(frozen=True)
class ToolTrouble:
    """A part of an output without a figure to assess."""

    grade: Literal["bad", "unknown"]
    """``bad``: the program reports a fault. ``unknown``: no result."""
    message: str


def of_nvbandwidth(answer: Nvbandwidth, message_bytes: int = NVBANDWIDTH_BYTES) -> Iterator[Figure | ToolTrouble]:
    """Yield one figure for each GPU and direction and for each ordered pair of GPUs, and the tests that failed."""
    for test in answer.tests:
        if test.status in ("failed", "error"):
            yield ToolTrouble("bad", f"{test.name} ended with {test.status}")
        elif test.status != "passed" or test.unit != "GB/s" or not test.matrix:
            continue
        elif test.name in HOST_TESTS and len(test.matrix) == 1:
            for gpu, cell in enumerate(test.matrix[0]):
                if cell is not None:
                    yield Figure(HOST_TESTS[test.name], cell, Where(gpu), message_bytes)
        elif test.name in PEER_TESTS:
            yield from _pairs(test.matrix, message_bytes)


def _pairs(matrix: Sequence[Sequence[float | None]], message_bytes: int) -> Iterator[Figure]:
    for first, row in enumerate(matrix):
        for second, cell in enumerate(row):
            if first != second and cell is not None:
                yield Figure("peer_to_peer", cell, Where(first, second), message_bytes)


def of_nccl_tests(
    answer: NcclTests, collective: str | None = None, nodes: int | None = None
) -> Iterator[Figure | ToolTrouble]:
    """Yield the bus bandwidth of the largest message of each run, the better of both placements.

    ``collective`` and ``nodes`` are used if the log does not contain them.
    """
    for run in answer.runs:
        name = run.collective or collective
        messages = f": {run.messages[0]}" if run.messages else ""
        largest = max(run.rows, key=lambda row: row.size_bytes, default=None)
        if run.wrong_total or run.out_of_bounds:
            wrong = run.wrong_total or run.out_of_bounds
            yield ToolTrouble("bad", f"{name or 'a collective'}: {wrong} values wrong")
        elif not run.complete:
            yield ToolTrouble("bad", f"{name or 'a collective'} did not finish{messages}")
        elif not run.ok:
            yield ToolTrouble("bad", f"{name or 'a collective'} failed{messages}")
        elif run.ranks == 1:
            yield ToolTrouble("unknown", "only one GPU took part: its bandwidth is not that of a collective")
        elif name is None:
            yield ToolTrouble("unknown", "the log does not name the collective")
        elif largest is None or (best := _best(largest)) is None:
            yield ToolTrouble("unknown", f"{name}: the log has no complete run")
        elif (metric := metric_of(name)) not in METRICS:
            yield ToolTrouble("unknown", f"no expected value for the collective {name[:40]}")
        else:
            where = Where(ranks=run.ranks, nodes=run.nodes or nodes or 1)
            yield Figure(metric, best, where, largest.size_bytes)


def metric_of(collective: str) -> str:
    """Return the metric of a collective by nccl-tests' name for it; it may be a metric that cannot be expected."""
    return f"{COLLECTIVES.get(collective, collective)}_busbw"


def _best(row: NcclRow) -> float | None:
    placements = [placement for placement in (row.out_of_place, row.in_place) if placement is not None]
    return max(
        (placement.busbw_gb_per_s for placement in placements if placement.busbw_gb_per_s is not None), default=None
    )
