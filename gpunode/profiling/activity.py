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
        kernels = [(one.device, (one.start, one.end)) for one in self.kernels]
        return kernels + [(one.device, (one.start, one.end)) for one in self.copies]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals sorted, overlapping ones as one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Return the seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the seconds that are in both; each of them is merged."""
    total, number = 0.0, 0
    for start, end in one:
        while number < len(other) and other[number][1] <= start:
            number += 1
        place = number
        while place < len(other) and other[place][0] < end:
            total += max(0.0, min(end, other[place][1]) - max(start, other[place][0]))
            place += 1
    return total
