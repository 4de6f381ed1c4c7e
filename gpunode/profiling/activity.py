"""What a profile recorded, whatever the profiler: intervals in seconds on devices and in the main thread."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Interval = tuple[float, float]


@dataclass(frozen=True)
class KernelRun:
    """One kernel on a device."""

    start: float
    end: float
    name: str
    device: int = 0


@dataclass(frozen=True)
class MemoryCopy:
    """One copy by a device."""

    start: float
    end: float
    direction: str
    """``HtoD``, ``DtoH``, ``DtoD`` …"""
    size_bytes: int | None = None
    pageable: bool | None = None
    """True if the host's side is pageable memory. None: unknown."""
    device: int = 0


@dataclass
class ProfileActivity:
    """The recorded part of one process."""

    span_s: float
    kernels: list[KernelRun] = field(default_factory=list)
    copies: list[MemoryCopy] = field(default_factory=list)
    calls: dict[str, list[Interval]] = field(default_factory=dict)
    """Calls of the CUDA runtime by name."""
    loading: list[Interval] = field(default_factory=list)
    """The main thread in a DataLoader."""
    single_process: bool | None = None
    """True if the DataLoader has no workers. None: no loader was seen."""
    operations: dict[str, float] = field(default_factory=dict)
    """Seconds of the processor's operations without those that they call, by name."""

    @property
    def on_devices(self) -> list[tuple[int, Interval]]:
        """Return kernels and copies by device."""
        kernels = [(kernel.device, (kernel.start, kernel.end)) for kernel in self.kernels]
        return kernels + [(copy.device, (copy.start, copy.end)) for copy in self.copies]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals sorted, overlapping ones as one."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(intervals: Sequence[Interval]) -> float:
    """Return the seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the seconds that are in both; each of them is merged."""
    total, number = 0.0, 0
    for start, end in first:
        while number < len(second) and second[number][1] <= start:
            number += 1
        index = number
        while index < len(second) and second[index][0] < end:
            total += max(0.0, min(end, second[index][1]) - max(start, second[index][0]))
            index += 1
    return total
