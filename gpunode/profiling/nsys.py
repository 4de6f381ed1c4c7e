"""The SQLite export of Nsight Systems (``nsys export --type sqlite``), as activity.

Tables and columns: NVIDIA's page "SQLite Export Schema Reference" of the Nsight Systems exporter
(docs.nvidia.com/nsight-systems, read 2026-11-23). They were never compared with an export recorded here: unsure.
Tables are absent if nothing was recorded for them; times are nanoseconds.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from gpunode.profiling.activity import KernelRun, MemoryCopy, ProfileActivity
from gpunode.profiling.errors import ProfileError

KERNELS, COPIES, SETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
CALLS, RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""CUpti_ActivityMemcpyKind."""
MOST_ROWS = 5_000_000


def parse(path: Path) -> ProfileActivity:
    """Return the activity of an export. Raises ProfileError for a file that is not one."""
    try:
        # As a file that nobody writes: nothing is created next to it.
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
            return _read(database)
    except sqlite3.Error as err:
        raise ProfileError(f"{path} cannot be read as an export of nsys: {err}") from None


def _read(database: sqlite3.Connection) -> ProfileActivity:
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
