"""Shared parts of measurements: repetitions by device events, medians, comparison by blocks, lack of memory."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpunode.workload.payload.isolate import Trouble, UndeterminedPart
from gpunode.workload.payload.pytorch import device_for, synchronize, torch_module

BLOCK = 128
MAX_BLOCKS = 16
"""Maximum number of blocks with wrong elements in a record."""
OURS_SHARE = 0.5
"""If this process has a smaller share of the GPU memory in use, other processes have the rest."""
MIB = 2**20


def opened(where: str | None) -> tuple[Any, Any]:
    """Return PyTorch and the device to measure; the processor for None."""
    torch = torch_module()
    return torch, device_for(torch, where)


def timer_of(device: Any) -> str:
    """Return ``events`` or ``clock``, as in records."""
    return "events" if device.type == "cuda" else "clock"


def repeated(  # noqa: PLR0913 (what a measurement is)
    torch: Any, device: Any, work: Callable[[], Any], *, warmups: int, repetitions: int, limit_s: float = 60.0
) -> list[float]:
    """Return the seconds of each repetition after the warm-up: by device events on a GPU, by the clock elsewhere.

    At least three repetitions, and no more of them once ``limit_s`` is over.
    """
    for _ in range(warmups):
        work()
    synchronize(torch, device)
    times: list[float] = []
    until = time.monotonic() + limit_s
    while len(times) < repetitions and (len(times) < 3 or time.monotonic() < until):
        times.append(once(torch, device, work))
    return times


def once(torch: Any, device: Any, work: Callable[[], Any]) -> float:
    """Return the seconds of ``work``: between two events on a GPU, by the clock elsewhere."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_of(seconds: list[float]) -> float:
    """Return the median; never 0, because figures are divided by it."""
    return max(statistics.median(seconds), 1e-9)


def repetition_values(seconds: list[float]) -> dict[str, Any]:
    """Return ``repetitions`` and ``spread``."""
    return {"repetitions": len(seconds), "spread": round((max(seconds) - min(seconds)) / median_of(seconds), 4)}


def bandwidth(size_bytes: float, seconds: list[float]) -> dict[str, Any]:
    """Return ``bandwidth_gb_per_s`` with ``repetitions`` and ``spread``."""
    return {"bandwidth_gb_per_s": significant(size_bytes / median_of(seconds) / 1e9), **repetition_values(seconds)}


def significant(number: float) -> float:
    """Return the number with five significant digits: a slow figure must not become 0."""
    return float(f"{number:.5g}")


def wrong_elements(tensor: Any, expected: Any) -> int:
    """Return how many elements differ; a NaN differs."""
    return int((tensor != expected).sum())


def corrupted(matrix: Any, expected: Any, round_number: int) -> list[dict[str, Any]]:
    """Return the blocks of a matrix in which elements differ, in the form of ``Corruption``; the first ones of many."""
    rows, columns = (int(size) for size in matrix.shape)
    bad = matrix != expected
    blocks: list[dict[str, Any]] = []
    for row in range(0, rows, BLOCK):
        stripe = bad[row : row + BLOCK]
        if not bool(stripe.any()):
            continue
        for column in range(0, columns, BLOCK):
            block = stripe[:, column : column + BLOCK]
            places = block.nonzero()
            if len(places) == 0:
                continue
            first_row, first_column = (int(part) for part in places[0])
            at = (row + first_row, column + first_column)
            blocks.append(
                {
                    "round": round_number,
                    "row": row,
                    "column": column,
                    "rows": int(block.shape[0]),
                    "columns": int(block.shape[1]),
                    "wrong": len(places),
                    "first_row": at[0],
                    "first_column": at[1],
                    "found": finite(float(matrix[at])),
                    "expected": finite(float(expected[at])),
                }
            )
            if len(blocks) == MAX_BLOCKS:
                return blocks
    return blocks


def finite(number: float) -> float | None:
    """Return the number; None if it is infinite or not a number."""
    return number if number - number == 0 else None


@contextlib.contextmanager
def memory_needed(torch: Any, device: Any, purpose: str) -> Iterator[None]:
    """Convert an out-of-memory error to Undetermined if others use the GPU's memory, else to Trouble."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        reserved = int(torch.cuda.memory_reserved(device))
        text = f"out of GPU memory for {purpose}: {free // MIB} of {total // MIB} MiB are free"
        if reserved < OURS_SHARE * (total - free):
            raise UndeterminedPart(
                f"{text}, this process has {reserved // MIB} MiB: another process uses the GPU"
            ) from None
        raise Trouble(text) from None
