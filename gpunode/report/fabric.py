"""The part of a report on several nodes together as lines of text: the run, slow pairs folded, the matrix."""

from collections.abc import Iterator

from gpunode.checks.identity import PairMatrix
from gpunode.judging.report import FabricReport
from gpunode.names import fold
from gpunode.text import counted, printable

SLOW = {"nccl": 2 / 3}
SLOW_ELSEWHERE = 1 / 4
"""Share of the usual rate below which a pair is shown: that of the search, by backend."""
WIDEST = 16
"""Nodes of a matrix that fits on a terminal."""
MOST_LINES = 12


def lines(fabric: FabricReport, *, verbose: bool) -> Iterator[str]:
    """Yield the lines; ``verbose`` also shows the matrix of a few nodes."""
    number = len(fabric.matrix.labels) if fabric.matrix is not None else 0
    nodes = f"{counted(number, 'node')}, " if number else ""
    cost = f"{counted(fabric.rounds, 'round')} of exchanges, {fabric.minutes:g} min in all"
    usual = "" if fabric.usual_gb_per_s is None else f"; a good pair {_rate(fabric.usual_gb_per_s)}"
    ranks = counted(fabric.ranks, "rank")
    yield f"fabric  {nodes}{ranks} of {printable(fabric.backend)} by {fabric.engine}: {cost}{usual}"
    if fabric.nccl is not None:
        yield f"        {printable(fabric.nccl)}"
    for figure in fabric.collectives:
        size = f"{figure.size_bytes / 2**20:.4g} MiB"
        yield f"        {figure.name} of {size}: {_rate(figure.busbw_gb_per_s)} bus bandwidth, {figure.time_us:.4g} us"
    if fabric.matrix is None:
        return
    if fabric.usual_gb_per_s is not None:
        yield from _slow_pairs(fabric.matrix, SLOW.get(fabric.backend, SLOW_ELSEWHERE) * fabric.usual_gb_per_s)
    if verbose and number <= WIDEST:
        yield from _table(fabric.matrix)


def _rate(value: float) -> str:
    return f"{value:.3g} GB/s"


def _slow_pairs(matrix: PairMatrix, least: float) -> Iterator[str]:
    """Yield a line for each node with slow pairs, those with most of them first; a pair is shown once."""
    slow = {
        name: {other: rate for other, rate in zip(matrix.labels, row, strict=True) if rate is not None and rate < least}
        for name, row in zip(matrix.labels, matrix.rows, strict=True)
    }
    shown: set[str] = set()
    rows = []
    for name in sorted(slow, key=lambda node: (-len(slow[node]), node)):
        partners = {other: rate for other, rate in slow[name].items() if other not in shown}
        shown.add(name)
        if partners:
            low, high = min(partners.values()), max(partners.values())
            rates = _rate(low) if high < 1.1 * low else f"{low:.3g} to {_rate(high)}"
            rows.append(f"        {printable(name)} - {printable(fold(partners))}: {rates if high else 'failed'}")
    yield from rows[:MOST_LINES]
    if len(rows) > MOST_LINES:
        yield f"        and {len(rows) - MOST_LINES} more nodes with slow pairs: --format json"


def _table(matrix: PairMatrix) -> Iterator[str]:
    """Yield the matrix as a table; ``.``: the pair was not tried."""
    labels = [printable(label) for label in matrix.labels]
    cells = [["." if rate is None else f"{rate:.3g}" for rate in row] for row in matrix.rows]
    width = max(len(text) for text in (*labels, *(cell for row in cells for cell in row))) + 1
    yield f"        {'GB/s'.ljust(width)}{''.join(label.rjust(width) for label in labels)}"
    for label, row in zip(labels, cells, strict=True):
        yield f"        {label.ljust(width)}{''.join(cell.rjust(width) for cell in row)}"
