"""A directory's storage by fio, or by threads without it, and the number of workers that a DataLoader needs for it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, one_line
from gpunode.workload.payload.measuring import repetition_values, significant
from gpunode.workload.payload.pytorch import torch_module

MIB = 2**20
FILE_BYTES = 1024 * MIB
LEAST_FILE_BYTES = 16 * MIB
SHARE_OF_FREE = 8
"""At most this fraction (1/8) of the free space is written."""
FIO_OPTIONS = ("--ioengine=libaio", "--direct=1", "--time_based", "--group_reporting", "--randrepeat=0", "--thread")
"""Its jobs are threads: as processes they would leave the group that is ended with this one."""
REFUSED = (
    *("Invalid argument", "Operation not supported", "Function not implemented", "does not support direct", "O_DIRECT"),
    *("not loadable", "failed to load engine", "direct=1"),
)
"""In what fio prints where the file system has no direct I/O, or fio not this engine."""
PATTERNS = (("write", MIB, 4, 16), ("read", MIB, 4, 16), ("randwrite", 4096, 4, 32), ("randread", 4096, 4, 32))
"""Pattern, block, jobs, depth."""
FIO_LIMIT_S = 120
SAMPLE_BYTES = 3 * 448 * 448
"""An image of 448 x 448."""
SAMPLES, BATCH, ROUNDS = 128, 16, 3
MAX_WORKERS = 32
ENOUGH = 0.95
"""Share of the best throughput that is sufficient: more workers than this needs have no effect."""


@contextlib.contextmanager
def folder_in(directory: str | None) -> Iterator[tuple[Path, os.statvfs_result]]:
    """Yield a folder of our own in the directory, and its file system; removed afterwards. Trouble names the fault."""
    where = directory or tempfile.gettempdir()
    try:
        if not Path(where).is_dir():
            raise Trouble(f"{where} is not a directory here: use an existing one, also inside the container")
        folder = tempfile.mkdtemp(prefix=".gpunode-", dir=where)
    except OSError as err:
        if err.errno == errno.EROFS:
            raise SkipPart(f"{where} is mounted read-only: choose a directory that can be written to") from None
        raise Trouble(f"nothing can be written into {where}: {err.strerror or err} (uid {os.getuid()})") from None
    try:
        system = os.statvfs(folder)
        if system.f_bavail * system.f_frsize < SHARE_OF_FREE * LEAST_FILE_BYTES:
            free = system.f_bavail * system.f_frsize // MIB
            raise Trouble(f"{where} has {free} MiB of free space, {SHARE_OF_FREE * LEAST_FILE_BYTES // MIB} are needed")
        yield Path(folder), system
    except OSError as err:
        raise Trouble(f"{where}: {err.strerror or err}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the file system of a path; None if the kernel lists none."""
    try:
        rows = [line.split(" ") for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    location = str(path.resolve())
    candidates = [row for row in rows if len(row) > 2 and (location + "/").startswith(row[1].rstrip("/") + "/")]
    return max(candidates, key=lambda row: len(row[1]))[2] if candidates else None


def fio(directory: str | None, seconds: float) -> dict[str, Any]:
    """Return the values of ``storage.fio``: without fio, or where it is refused, those of our own reader and writer.

    Raises SkipPart without a directory, or for a read-only one.
    """
    if directory is None:
        raise SkipPart("no directory was set (--storage DIR)")
    program = shutil.which("fio")
    with folder_in(directory) as (folder, system):
        free = system.f_bavail * system.f_frsize
        most_jobs = max(jobs for _, _, jobs, _ in PATTERNS)
        size = max(LEAST_FILE_BYTES, min(FILE_BYTES, free // SHARE_OF_FREE // most_jobs)) // MIB * MIB
        direct = True
        rows, version = _by_fio(program, folder, size, seconds) if program is not None else ([], None)
        if not rows:
            direct = supports_direct(folder)
            filled(folder, most_jobs, size)
            rows = [
                measured(Access(folder, pattern, block, size, direct), jobs, seconds)
                for pattern, block, jobs, _ in PATTERNS
            ]
        return {
            "device": "cpu",
            "directory": directory,
            "filesystem": file_system_of(folder),
            "free_bytes": free,
            "fio_version": version,
            "direct": direct,
            "size_bytes": size,
            "jobs": rows,
        }


def _by_fio(program: str, folder: Path, size: int, seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows and fio's version; no row if fio cannot measure this file system."""
    rows, version = [], None
    for pattern, block, jobs, depth in PATTERNS:
        answer = _run_fio(
            program,
            folder,
            f"--name={pattern}",
            f"--rw={pattern}",
            f"--bs={block}",
            f"--numjobs={jobs}",
            f"--iodepth={depth}",
            f"--size={size}",
            f"--runtime={seconds:g}",
            "--filename_format=gpunode.$jobnum",
        )
        if answer is None:
            return [], None
        version = str(answer.get("fio version", "")).replace("fio-", "") or None
        rows.append(fio_row(answer, pattern, block, jobs, depth))
    return rows, version


def _run_fio(program: str, folder: Path, *words: str) -> dict[str, Any] | None:
    """Run fio in the folder; return its JSON: as an option, a path with a colon would be two folders.

    None: it has no direct I/O there, or not this engine.
    """
    try:
        done = subprocess.run(
            [program, "--output-format=json", *FIO_OPTIONS, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FIO_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Trouble(f"fio did not return within {FIO_LIMIT_S} s") from None
    complaint = one_line(done.stderr.decode(errors="replace"))
    if done.returncode != 0:
        # It prints some of its complaints before the JSON.
        if any(word in f"{complaint} {done.stdout[:4096].decode(errors='replace')}" for word in REFUSED):
            return None
        raise Trouble(f"fio ended with exit code {done.returncode}: {complaint}")
    text = done.stdout.decode(errors="replace")
    try:
        # Notes may precede the document.
        document = json.loads(text[text.index("{") :])
        return dict(document)
    except (ValueError, TypeError):
        raise Trouble(f"fio printed no JSON: {one_line(text[:200])}") from None


def fio_row(answer: dict[str, Any], pattern: str, block: int, jobs: int, depth: int) -> dict[str, Any]:
    """Return one pattern in the form of ``FioJob``, from fio's JSON (times in ns, ``bw_bytes`` per second)."""
    try:
        (job,) = answer["jobs"]
        if job.get("error"):
            raise Trouble(f"fio {pattern}: {os.strerror(int(job['error']))}")
        figures = job["write" if "write" in pattern else "read"]
        latency = figures.get("clat_ns") or {}
        shares = latency.get("percentile") or {}
        return {
            "pattern": pattern,
            "block_bytes": block,
            "jobs": jobs,
            "depth": depth,
            "bandwidth_gb_per_s": significant(figures["bw_bytes"] / 1e9),
            "iops": significant(figures["iops"]),
            "latency_us": _microseconds(shares.get("50.000000")),
            "latency_p99_us": _microseconds(shares.get("99.000000")),
        }
    except (KeyError, TypeError, ValueError) as err:
        raise Trouble(f"fio's JSON has another shape: {type(err).__name__} {err}") from None


def _microseconds(nanoseconds: Any) -> float | None:
    return None if nanoseconds is None else significant(float(nanoseconds) / 1000)


class Files:
    """Samples read from files through the page cache, if it holds them."""

    def __init__(self, torch: Any, paths: list[str]) -> None:
        self._torch, self._paths = torch, paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> Any:
        data = bytearray(Path(self._paths[number]).read_bytes())
        sample = self._torch.frombuffer(data, dtype=self._torch.uint8).float()
        # As a training does with a sample: convert, normalize.
        return (sample - sample.mean()) / (sample.std() + 1e-6)


def dataloader(directory: str | None) -> dict[str, Any]:
    """Return the values of ``storage.dataloader``: throughput by workers, and the smallest sufficient number."""
    torch = torch_module()
    torch.set_num_threads(1)
    data = importlib.import_module("torch.utils.data")
    cpus = len(os.sched_getaffinity(0))
    with folder_in(directory) as (folder, _):
        paths = []
        for number in range(SAMPLES):
            path = folder / f"sample-{number}"
            path.write_bytes(os.urandom(SAMPLE_BYTES))
            paths.append(str(path))
        rows = []
        for workers in worker_counts(cpus):
            loader = data.DataLoader(
                Files(torch, paths),
                batch_size=BATCH,
                num_workers=workers,
                persistent_workers=workers > 0,
                multiprocessing_context="fork" if workers else None,
            )
            seconds = []
            for _ in range(ROUNDS + 1):
                started = time.perf_counter()
                seen = sum(len(batch) for batch in loader)
                seconds.append(time.perf_counter() - started)
                if seen != SAMPLES:
                    raise Trouble(f"{seen} of {SAMPLES} samples were read")
            # The first round starts the workers.
            del seconds[0], loader
            rate = SAMPLES / statistics.median(seconds)
            rows.append(
                {
                    "workers": workers,
                    "samples_per_second": significant(rate),
                    "gb_per_s": significant(rate * SAMPLE_BYTES / 1e9),
                    **repetition_values(seconds),
                }
            )
    return {
        "device": "cpu",
        "directory": directory,
        "cpus": cpus,
        "sample_bytes": SAMPLE_BYTES,
        "rows": rows,
        "advised_workers": advised(rows),
    }


def worker_counts(cpus: int) -> list[int]:
    """Return 0, 1, 2, 4 … up to the number of processors."""
    counts = [0, 1]
    while counts[-1] * 2 <= min(cpus, MAX_WORKERS):
        counts.append(counts[-1] * 2)
    return counts


def advised(rows: list[dict[str, Any]]) -> int:
    """Return the smallest number of workers that nearly reaches the best throughput."""
    best = max(row["samples_per_second"] for row in rows)
    return int(min(row["workers"] for row in rows if row["samples_per_second"] >= ENOUGH * best))


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
