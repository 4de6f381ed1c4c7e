"""What a profile recorded, whatever the profiler: intervals in seconds on devices and in the main thread.

``parse_nsys`` and ``parse_torch`` read it from the files of Nsight Systems and of PyTorch's profiler.
"""

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunode.errors import UndeterminedError


class ProfileError(UndeterminedError):
    """A command was not profiled, or its profile cannot be read."""


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


KERNELS, COPIES, SETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
CALLS, RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""CUpti_ActivityMemcpyKind."""
MOST_ROWS = 5_000_000


def parse_nsys(path: Path) -> ProfileActivity:
    """Return the activity of an SQLite export of Nsight Systems (nsys export --type sqlite).

    Raises ProfileError for a file that is not one. Tables and columns: NVIDIA's page "SQLite Export Schema Reference"
    of the Nsight Systems exporter (docs.nvidia.com/nsight-systems, read 2026-11-23). They were never compared with an
    export recorded here: unsure. Tables are absent if nothing was recorded for them; times are nanoseconds.
    """
    try:
        # As a file that nobody writes: nothing is created next to it.
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
            return _read_nsys(database)
    except sqlite3.Error as err:
        raise ProfileError(f"{path} cannot be read as an export of nsys: {err}") from None


def _read_nsys(database: sqlite3.Connection) -> ProfileActivity:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    if "StringIds" not in tables:
        raise ProfileError("the file has no table StringIds: not an export of nsys, or of another version")
    activity = ProfileActivity(0.0)
    names = dict(database.execute("SELECT id, value FROM StringIds"))
    if KERNELS in tables:
        name = "demangledName" if "demangledName" in _columns(database, KERNELS) else "shortName"
        for start, end, device, text in _rows(database, KERNELS, ("start", "end", "deviceId", name)):
            activity.kernels.append(KernelRun(start / 1e9, end / 1e9, str(names.get(text, text)), device or 0))
    activity.copies.extend(_copies(database, tables))
    if CALLS in tables:
        for start, end, text in _rows(database, CALLS, ("start", "end", "nameId")):
            # Names carry the version of the interface: cudaLaunchKernel_v7000.
            name = str(names.get(text, text)).partition("_v")[0]
            activity.calls.setdefault(name, []).append((start / 1e9, end / 1e9))
    if RANGES in tables:
        for start, end, text in _rows(database, RANGES, ("start", "end", "text")):
            if end is not None and isinstance(text, str) and "DataLoader" in text:
                activity.loading.append((start / 1e9, end / 1e9))
                activity.single_process = "SingleProcess" in text
    times = [interval for _, interval in activity.on_devices]
    times += [interval for calls in activity.calls.values() for interval in calls] + activity.loading
    if not times:
        raise ProfileError("nsys recorded no CUDA activity: the command used no GPU, or ended before it did")
    activity.span_s = max(end for _, end in times) - min(start for start, _ in times)
    return activity


def _copies(database: sqlite3.Connection, tables: set[str]) -> Iterator[MemoryCopy]:
    if COPIES in tables:
        kinds = _memory_kinds(database, tables)
        columns = ("start", "end", "deviceId", "bytes", "copyKind", "srcKind", "dstKind")
        for start, end, device, size, kind, source, target in _rows(database, COPIES, columns):
            sides = [kinds[memory] for memory in (source, target) if memory in kinds]
            pageable = any("pageable" in side for side in sides) if sides else None
            direction = DIRECTIONS.get(kind, "other")
            yield MemoryCopy(start / 1e9, end / 1e9, direction, size, pageable, device or 0)
    if SETS in tables:
        for start, end, device in _rows(database, SETS, ("start", "end", "deviceId")):
            yield MemoryCopy(start / 1e9, end / 1e9, "memset", None, None, device or 0)


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}


def _rows(database: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> sqlite3.Cursor:
    """Return the rows of a table; a column that this version lacks is NULL."""
    known = _columns(database, table)
    chosen = ", ".join(f'"{name}"' if name in known else "NULL" for name in columns)
    return database.execute(f"SELECT {chosen} FROM {table} LIMIT {MOST_ROWS}")  # noqa: S608 (constants above)


def _memory_kinds(database: sqlite3.Connection, tables: set[str]) -> dict[int, str]:
    """Return the kinds of memory by number as the export itself names them; nothing if it does not."""
    if "ENUM_CUDA_MEM_KIND" not in tables:
        return {}
    rows = _rows(database, "ENUM_CUDA_MEM_KIND", ("id", "name", "label"))
    return {number: f"{name} {label}".lower() for number, name, label in rows}


COPY = re.compile(r"Memcpy (\w+) \((\w+) -> (\w+)\)")
LOADER = re.compile(r"enumerate\(DataLoader\)#_(Single|Multi)")


def parse_torch(text: str) -> ProfileActivity:
    """Return the activity of a trace of torch.profiler (Chrome's JSON format, written by Kineto).

    Raises ProfileError for text that is not one. Categories: ``kernel``, ``gpu_memcpy``, ``gpu_memset``,
    ``cuda_runtime``, ``cpu_op``, ``user_annotation``; times in microseconds. Source: pytorch/kineto (output_json.cpp,
    test traces of tb_plugin), and a trace recorded with PyTorch 2.13 on a processor. No trace of a GPU was recorded:
    unsure.
    """
    try:
        document = json.loads(text)
    except ValueError as err:
        raise ProfileError(f"the trace is not complete JSON ({err}): the command may have been killed") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ProfileError("the trace has no traceEvents")
    activity = ProfileActivity(0.0)
    operations: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    first, last = float("inf"), 0.0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        try:
            start = float(event["ts"]) / 1e6
            end = start + float(event.get("dur", 0)) / 1e6
        except (KeyError, TypeError, ValueError):
            raise ProfileError("the trace has an event without a time") from None
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        if category == "trace":
            continue
        first, last = min(first, start), max(last, end)
        arguments: Any = event.get("args") if isinstance(event.get("args"), dict) else {}
        _add(activity, operations, (category, name, start, end), arguments, event.get("tid"))
    activity.span_s = max(0.0, last - first)
    if not activity.span_s:
        raise ProfileError("the trace is empty")
    for rows in operations.values():
        _self_times(rows, activity.operations)
    return activity


def _add(
    activity: ProfileActivity,
    operations: dict[Any, list[tuple[float, float, str]]],
    event: tuple[str, str, float, float],
    arguments: dict[str, Any],
    thread: Any,
) -> None:
    category, name, start, end = event
    device = arguments.get("device")
    device = device if isinstance(device, int) else 0
    if category == "kernel":
        activity.kernels.append(KernelRun(start, end, name, device))
    elif category in ("gpu_memcpy", "gpu_memset"):
        shape = COPY.match(name)
        size = arguments.get("bytes")
        pageable = None if shape is None else "Pageable" in shape.group(2, 3)
        direction = shape[1] if shape else "memset"
        activity.copies.append(
            MemoryCopy(start, end, direction, size if isinstance(size, int) else None, pageable, device)
        )
    elif category in ("cuda_runtime", "cuda_driver"):
        activity.calls.setdefault(name, []).append((start, end))
    elif category == "cpu_op":
        operations[thread].append((start, end, name))
    elif category == "user_annotation" and (loader := LOADER.match(name)):
        activity.loading.append((start, end))
        activity.single_process = loader[1] == "Single"


def _self_times(rows: list[tuple[float, float, str]], totals: dict[str, float]) -> None:
    """Add each operation's own time of one thread, in which operations are nested."""
    open_: list[list[Any]] = []

    def close() -> None:
        start, end, name, inner = open_.pop()
        totals[name] = totals.get(name, 0.0) + max(0.0, end - start - inner)
        if open_:
            open_[-1][3] += end - start

    for start, end, name in sorted(rows, key=lambda row: (row[0], -row[1])):
        while open_ and open_[-1][1] <= start:
            close()
        open_.append([start, end, name, 0.0])
    while open_:
        close()
