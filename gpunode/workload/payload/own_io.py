"""Reading and writing of files where fio is not there: its patterns, by threads, without the page cache if possible."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.measuring import significant

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without direct I/O (FUSE, some network file systems) answer."""
MOST_TIMES = 100_000


def supports_direct(folder: Path) -> bool:
    """Return True if files of the folder can be read and written without the page cache."""
    path = folder / "direct"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as err:
        if err.errno in NO_DIRECT:
            return False
        raise
    try:
        with mmap.mmap(-1, 4096) as block:
            os.pwritev(file, [block], 0)
            os.preadv(file, [block], 0)
    except OSError as err:
        if err.errno in NO_DIRECT:
            return False
        raise
    finally:
        os.close(file)
        path.unlink()
    return True


@dataclasses.dataclass(frozen=True)
class Access:
    """How files of a folder are read or written."""

    folder: Path
    pattern: str
    block: int
    size: int
    """Of each file."""
    direct: bool


class _Job(threading.Thread):
    """One thread with a file of its own."""

    def __init__(self, access: Access, number: int, ends: float) -> None:
        super().__init__(daemon=True)
        self._access, self._number, self._ends = access, number, ends
        self.bytes = 0
        self.times: list[float] = []
        self.failure: OSError | None = None

    def run(self) -> None:
        """Run until the time is over."""
        try:
            flags = os.O_RDWR | (os.O_DIRECT if self._access.direct else 0)
            file = os.open(self._access.folder / f"gpunode.{self._number}", flags)
            try:
                self._transfer(file)
            finally:
                os.close(file)
        except OSError as err:
            self.failure = err

    def _transfer(self, file: int) -> None:
        access = self._access
        writes, blocks, number = "write" in access.pattern, access.size // access.block, 0
        chance = random.Random(self._number)  # noqa: S311 - places to read
        with mmap.mmap(-1, access.block) as buffer:
            buffer.write(os.urandom(access.block))
            while number == 0 or time.perf_counter() < self._ends:  # a thread may start after the end
                if not access.direct and number % blocks == 0:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                index = chance.randrange(blocks) if access.pattern.startswith("rand") else number % blocks
                began = time.perf_counter()
                done = (os.pwritev if writes else os.preadv)(file, [buffer], index * access.block)
                if writes and not access.direct:
                    os.fdatasync(file)
                if len(self.times) < MOST_TIMES:
                    self.times.append(time.perf_counter() - began)
                if done == 0:
                    raise OSError(errno.EIO, "the file ended early")
                self.bytes += done
                number += 1


def measured(access: Access, jobs: int, seconds: float) -> dict[str, Any]:
    """Return one pattern in the form of ``FioJob``, on the files of ``filled``. Raises Trouble."""
    started = time.perf_counter()
    threads = [_Job(access, number, started + seconds) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    failure = next((thread.failure for thread in threads if thread.failure is not None), None)
    if failure is not None:
        raise Trouble(f"{access.pattern}: {failure.strerror or failure}")
    times = sorted(each for thread in threads for each in thread.times)
    total = sum(thread.bytes for thread in threads)
    return {
        "pattern": access.pattern,
        "block_bytes": access.block,
        "jobs": jobs,
        "depth": 1,
        "bandwidth_gb_per_s": significant(total / took / 1e9),
        "iops": significant(total / access.block / took),
        "latency_us": significant(statistics.median(times) * 1e6) if times else None,
        "latency_p99_us": significant(times[len(times) * 99 // 100] * 1e6) if times else None,
    }


def filled(folder: Path, jobs: int, size: int) -> None:
    """Write the files that the patterns read, so that no read ends early in a hole or at the end."""
    chunk = os.urandom(1 << 20)
    for number in range(jobs):
        with (folder / f"gpunode.{number}").open("wb") as file:
            for _ in range(size // len(chunk)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
