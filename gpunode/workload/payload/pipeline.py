"""The input pipeline on the user's own files, which are only read: cold and hot reads, decoding, loaders by workers."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import re
import stat
import statistics
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpunode.workload.payload import pagecache
from gpunode.workload.payload.isolate import Clock, Job, SkipPart, Task, Trouble, run_jobs
from gpunode.workload.payload.measuring import significant
from gpunode.workload.payload.storage import ENOUGH, file_system_of, worker_counts

MOST_ENTRIES, WALK_S = 200_000, 20.0
"""Of the directory: what lies beyond is not counted, and `walk_complete` is false."""
MOST_FILES, MOST_BYTES = 2048, 1 << 30
"""Of the files that are read."""
OPENED, OPENING_S, LEAST_FILES = 8, 2.0, 48
"""Files that are opened to learn the latency, seconds to open all, and files that are read in spite of it."""
MEMORY_SHARE = 4
"""At most this fraction (1/4) of the available memory is read, so that hot files stay in memory."""
SUFFIXES = {
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".bmp"), "images"),
    **dict.fromkeys((".tar", ".tgz"), "tar"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
"""Kinds of files; all others are ``files``."""
IMAGES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM")
"""The first bytes of formats that a decoder is tried on."""
REMOTE = re.compile(
    r"(nfs4?|cifs|smb3?|ceph|lustre|gpfs|beegfs|wekafs|afs|9p|virtiofs|orangefs|glusterfs|fuse\.(?!ext|ntfs|overlay|bindfs).*)"
)
"""Types of file systems with their files on another machine; FUSE unless it is known as a local one."""
MOST_LEFT = 0.02
"""Share of the files' pages that may be in memory when a read counts as cold."""
THREADS = 16
CHUNK = 1 << 20
BLOCK = 1 << 20
"""A sample of files above 16 times this size."""
SIDE = 224
"""Pixels of a decoded image's side: it is resized as for training."""
BATCH = 16
DECODED = 64
KINDS = ("images", "tar", "parquet", "files")


def walk(directory: str, seconds: float = WALK_S) -> dict[str, Any]:
    """Return what the directory holds: files by kind, bytes, and a random choice of each kind's files.

    Links to files are followed, links to directories are not, so that no loop can occur.
    """
    until = time.monotonic() + seconds
    chance = random.Random(0)  # noqa: S311 - a choice of files
    contents: dict[str, Any] = dict.fromkeys(("files", "bytes", "unreadable", "broken_links", "other"), 0)
    kinds: dict[str, list[Any]] = {kind: [0, 0, []] for kind in KINDS}
    waiting, entries, complete = [directory], 0, True
    while waiting and complete:
        # A random one, so that a walk that is cut short has seen several parts of the tree.
        folder = waiting.pop(chance.randrange(len(waiting)))
        try:
            with os.scandir(folder) as listed:
                for entry in listed:
                    entries += 1
                    if entries > MOST_ENTRIES or time.monotonic() > until:
                        complete = False
                        break
                    _sort(entry, contents, kinds, waiting, chance)
        except OSError as err:
            if folder == directory:
                raise Trouble(
                    f"{directory} cannot be read: {err.strerror or err} (uid {os.getuid()}); "
                    "grant this user read permission, or use --no-container"
                ) from None
            contents["unreadable"] += 1
    contents["walk_complete"] = complete
    contents["kinds"] = {kind: row[0] for kind, row in kinds.items() if row[0]}
    contents["chosen"] = {kind: row for kind, row in kinds.items() if row[0]}
    return contents


def _sort(
    entry: os.DirEntry[str],
    contents: dict[str, Any],
    kinds: dict[str, list[Any]],
    waiting: list[str],
    chance: random.Random,
) -> None:
    """Add one entry of a directory to what is found."""
    try:
        if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
            return
        status = entry.stat()
    except OSError:
        contents["broken_links" if entry.is_symlink() else "unreadable"] += 1
        return
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        contents["other"] += 1
        return
    contents["files"] += 1
    contents["bytes"] += status.st_size
    row = kinds[SUFFIXES.get(Path(entry.name).suffix.lower(), "files")]
    row[0] += 1
    row[1] += status.st_size
    # Reservoir sampling: each file of the kind is equally likely to be chosen, whatever their number.
    if len(row[2]) < MOST_FILES:
        row[2].append((entry.path, status.st_size))
    elif (slot := chance.randrange(row[0])) < MOST_FILES:
        row[2][slot] = (entry.path, status.st_size)


def run(directory: str | None, rate: float | None, gpus: int, seconds: float) -> dict[str, Any]:
    """Return the values of ``input.pipeline``. ``gpus``: their number; ``seconds``: of each of its figures.

    Raises SkipPart without a directory, Trouble for one that is empty or cannot be read.
    """
    if directory is None:
        raise SkipPart("no directory was set (--data DIR)")
    if not Path(directory).is_dir():
        raise Trouble(f"{directory} is not a directory here: use an existing one, also inside the container")
    contents = walk(directory)
    chosen = contents.pop("chosen")
    if not chosen:
        raise Trouble(
            f"{directory} has no files to read: {contents['other']} empty or special, "
            f"{contents['broken_links']} broken links, {contents['unreadable']} unreadable"
        )
    kind = max(chosen, key=lambda name: chosen[name][1])
    paths, size = affordable(chosen[kind][2])
    filesystem = file_system_of(Path(directory))
    torch = _module("torch")
    samples = FileSamples(kind, torch)
    per_sample, decoders = samples.examine(paths, min(seconds, 3.0))
    cpus = len(os.sched_getaffinity(0))
    values: dict[str, Any] = {
        "device": "cuda" if gpus else "cpu",
        "directory": directory,
        "filesystem": filesystem,
        "remote": filesystem is not None and REMOTE.fullmatch(filesystem) is not None,
        **contents,
        "kind": kind,
        "read_files": len(paths),
        "read_bytes": size,
        "sample_bytes": significant(per_sample),
        "cpus": cpus,
        "gpus": gpus,
        "model_rate": rate,
        "decoders": decoders,
        "unusable": samples.unusable,
        **_reads(paths, seconds),
        "loaders": [],
        "advised_workers": None,
        "synthetic_samples_per_second": None,
    }
    if torch is None:
        values["no_loader"] = "PyTorch is not in the image"
        return values
    torch.set_num_threads(1)
    values.update(_loaders(samples, paths, per_sample, gpus, seconds, cold=values["proof"] is not None))
    if gpus and kind == "images":
        values["decoders"] += _on_gpu(paths)
    return values


def affordable(listed: list[tuple[str, int]]) -> tuple[list[str], int]:
    """Return the files to read, and their bytes, within the limits of number, bytes, memory and time.

    Every figure opens each file several times: on a mount with a long latency there are fewer of them.
    """
    began = time.perf_counter()
    pagecache.drop(path for path, _ in listed[:OPENED])
    each = (time.perf_counter() - began) / max(1, len(listed[:OPENED]))
    listed = listed[: max(LEAST_FILES, int(OPENING_S / max(each, 1e-9)))]
    most = MOST_BYTES
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        most = min(most, int(text.partition("MemAvailable:")[2].split()[0]) * 1024 // MEMORY_SHARE)
    paths: list[str] = []
    total = 0
    for path, size in listed:
        read = min(size, pagecache.MOST_BYTES)
        if paths and total + read > most:
            continue
        paths.append(path)
        total += read
    return paths, total


def _module(name: str) -> Any:
    """Return a module; None if it is absent or cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


# --- reads


class _Reader(threading.Thread):
    """Reads every file that the shared list still has, until the time is over."""

    def __init__(self, waiting: list[str], until: float) -> None:
        super().__init__(daemon=True)
        self._waiting, self._until = waiting, until
        self.bytes = 0
        self.done: list[str] = []
        self.failed = self.shrunk = 0

    def run(self) -> None:
        """Read until the list is empty."""
        block = bytearray(CHUNK)
        while time.perf_counter() < self._until:
            try:
                path = self._waiting.pop()
            except IndexError:
                return
            try:
                file = pagecache.open_regular(path)
                try:
                    self._read(file, path, block)
                finally:
                    os.close(file)
            except OSError:
                self.failed += 1

    def _read(self, file: int, path: str, block: bytearray) -> None:
        size = min(os.fstat(file).st_size, pagecache.MOST_BYTES)
        offset = 0
        while offset < size and time.perf_counter() < self._until:
            number = os.preadv(file, [memoryview(block)[: min(CHUNK, size - offset)]], offset)
            if not number:
                self.shrunk += 1
                break
            offset += number
            self.bytes += number
        else:
            if offset >= size:
                self.done.append(path)


def read(paths: list[str], threads: int, seconds: float) -> tuple[dict[str, Any], list[str], int, int]:
    """Return a row of reads, the files that were read completely, and how many failed or shrank."""
    waiting = list(reversed(paths))
    started = time.perf_counter()
    readers = [_Reader(waiting, started + seconds) for _ in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        # A read that hangs in the kernel is left behind: the part's own limit ends it.
        reader.join()
    took = max(time.perf_counter() - started, 1e-9)
    done = [path for reader in readers for path in reader.done]
    row = {
        "threads": threads,
        "gb_per_s": significant(sum(reader.bytes for reader in readers) / took / 1e9),
        "files_per_s": significant(len(done) / took),
    }
    return row, done, sum(reader.failed for reader in readers), sum(reader.shrunk for reader in readers)


def _reads(paths: list[str], seconds: float) -> dict[str, Any]:
    """Return the reads: cold if the page cache is proven to be empty of these files, then hot."""
    rows: list[dict[str, Any]] = []
    failed = shrunk = 0
    left: float | None = None
    proof: str | None = None
    done: set[str] = set()
    for threads in (1, THREADS):
        pagecache.drop(paths)
        share, method = pagecache.resident(paths)
        left = share if left is None or (share or 0) > left else left
        row, some, bad, less = read(paths, threads, seconds)
        done.update(some)
        failed, shrunk = max(failed, bad), max(shrunk, less)
        if share is None or share > MOST_LEFT:
            continue
        proof = method
        rows.append({"state": "cold", **row})
    hot = [path for path in paths if path in done] or paths
    read(hot, THREADS, seconds)
    share, _ = pagecache.resident(hot)
    for threads in (1, THREADS):
        row, _, bad, less = read(hot, threads, seconds)
        failed, shrunk = max(failed, bad), max(shrunk, less)
        rows.append({"state": "hot", **row})
    if not any(row["gb_per_s"] for row in rows):
        raise Trouble(f"none of the {len(paths)} chosen files could be read ({failed} failed, {shrunk} shrank)")
    return {
        "proof": proof,
        "cold_resident": None if left is None else round(left, 4),
        "hot_resident": None if share is None else round(share, 4),
        "failed": failed,
        "shrunk": shrunk,
        "reads": [row for row in rows if row["gb_per_s"]],
    }


# --- samples


class FileSamples:
    """Samples of files of one kind, as a dataset would return them."""

    def __init__(self, kind: str, torch: Any) -> None:
        self.kind = kind
        self.unusable = 0
        """Files or images of those examined that are damaged, or of a format without a decoder."""
        self._torch = torch
        self._pillow = _module("PIL.Image")
        self._decode: Callable[[bytes], bytes] | None = None
        if self._pillow is not None:
            self._decode = self._by_pillow

    def _by_pillow(self, data: bytes) -> bytes:
        with self._pillow.open(io.BytesIO(data)) as image:
            return bytes(image.convert("RGB").resize((SIDE, SIDE)).tobytes())

    def raw(self, path: str) -> Iterator[bytes]:
        """Yield the samples of one file as they are stored; nothing for a file that cannot be read."""
        if self.kind == "tar":
            yield from self._members(path)
        elif self.kind == "parquet":
            yield from self._rows(path)
        else:
            with contextlib.suppress(OSError):
                file = pagecache.open_regular(path)
                with os.fdopen(file, "rb") as stream:
                    size = os.fstat(file).st_size
                    if size <= 16 * BLOCK:
                        yield stream.read(16 * BLOCK)
                        return
                    for _ in range(min(size, pagecache.MOST_BYTES) // BLOCK):
                        yield stream.read(BLOCK)

    def _members(self, path: str) -> Iterator[bytes]:
        """Yield the members of a shard: its images, or every file if it has none."""
        with contextlib.suppress(OSError, tarfile.TarError, EOFError):
            file = pagecache.open_regular(path)
            with os.fdopen(file, "rb") as stream, tarfile.open(fileobj=stream, mode="r:*") as shard:
                only_images = False
                for member in shard:
                    is_image = SUFFIXES.get(Path(member.name).suffix.lower()) == "images"
                    only_images = only_images or is_image
                    content = shard.extractfile(member) if member.isreg() and (is_image or not only_images) else None
                    if content is not None:
                        yield content.read(16 * BLOCK)

    def _rows(self, path: str) -> Iterator[bytes]:
        """Yield the rows of a table: an image's bytes, or a text of its values."""
        parquet = _module("pyarrow.parquet")
        if parquet is None:
            raise SkipPart("the files are Parquet, and the image has no pyarrow")
        try:
            with parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=64):
                    for row in batch.to_pylist():
                        yield _cell(row)
        except (OSError, ValueError):  # ArrowInvalid is a ValueError
            return

    def decoded(self, data: bytes) -> bytes | None:
        """Return a sample as it is passed on; None if it is damaged."""
        if self._decode is None or not data.startswith(IMAGES):
            return data
        try:
            return self._decode(data)
        except Exception:
            # Decoders raise what they like for damaged files.
            self.unusable += 1
            return None

    def examine(self, paths: list[str], seconds: float) -> tuple[float, list[dict[str, Any]]]:
        """Return the bytes of a sample in its file, and the rates of the decoders in samples per second of a core."""
        until = time.monotonic() + seconds
        some: list[bytes] = []
        sizes: list[float] = []
        for path in paths:
            before = len(some)
            for data in self.raw(path):
                some.append(data)
                if len(some) >= DECODED or time.monotonic() > until:
                    break
            if len(some) == before:
                self.unusable += 1
            elif self.kind == "parquet":
                sizes.append(_bytes_of_row(path))
            if len(some) >= DECODED or time.monotonic() > until:
                break
        if not some:
            raise Trouble(f"none of the first {self.unusable} files is readable as {self.kind}")
        size = statistics.mean(sizes) if sizes else statistics.mean(len(data) for data in some)
        images = [data for data in some if data.startswith(IMAGES)]
        rows = []
        if images and self._decode is not None:
            done, began, until = 0, time.process_time(), time.monotonic() + seconds
            for data in images:
                done += self.decoded(data) is not None
                if time.monotonic() > until:
                    break
            took = max(time.process_time() - began, 1e-9)
            if done:
                name = f"Pillow {getattr(_module('PIL'), '__version__', '')}".strip()
                rows.append({"decoder": name, "device": "cpu", "samples_per_second": significant(done / took)})
        return max(size, 1.0), rows


def _cell(row: dict[str, Any]) -> bytes:
    for value in row.values():
        inner = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(inner, bytes) and inner.startswith(IMAGES):
            return inner
    return repr(row).encode()


def _bytes_of_row(path: str) -> float:
    """Return the bytes in the file for one row of a table."""
    with _module("pyarrow.parquet").ParquetFile(path) as table:
        return Path(path).stat().st_size / max(1, int(table.metadata.num_rows))


# --- loaders


class SampleStream:
    """An iterable dataset over the files: worker n of m reads every m-th. Without workers it measures its parts."""

    def __init__(self, torch: Any, samples: FileSamples, paths: list[str], *, cycle: bool) -> None:
        self._torch, self._samples, self._paths, self._cycle = torch, samples, paths, cycle
        self.read_s = self.decode_s = 0.0
        self.samples = 0

    def __iter__(self) -> Iterator[Any]:
        worker = self._torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        paths = self._paths[first::step] or (self._paths if self._cycle else [])
        useful = True
        while useful:
            useful = False
            for path in paths:
                raw = self._samples.raw(path)
                while True:
                    began = time.perf_counter()
                    data = next(raw, None)
                    got = time.perf_counter()
                    sample = None if data is None else self._samples.decoded(data)
                    self.read_s += got - began
                    self.decode_s += time.perf_counter() - got
                    if data is None:
                        break
                    if sample:
                        useful = self._cycle
                        self.samples += 1
                        yield self._torch.frombuffer(bytearray(sample), dtype=self._torch.uint8)


class Synthetic:
    """The same samples without files and decoding: what is left is the loader itself."""

    def __init__(self, torch: Any, size: int) -> None:
        self._sample = torch.zeros(size, dtype=torch.uint8)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._sample


def delivered(  # noqa: PLR0913
    torch: Any, dataset: Any, workers: int, seconds: float, where: str | None, *, pin: bool
) -> float | None:
    """Return a loader's samples per second; None if it delivers none. ``where``: each batch is copied to that GPU."""
    data = importlib.import_module("torch.utils.data")

    class Dataset(data.IterableDataset):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Iterator[Any]:
            return iter(dataset)

    loader = data.DataLoader(
        Dataset(),
        batch_size=BATCH,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=lambda batch: (len(batch), torch.cat(batch)),
        multiprocessing_context="fork" if workers else None,
    )
    started = first = time.perf_counter()
    until = started + seconds
    total = counted = 0
    for number, (size, batch) in enumerate(loader, start=1):
        if where is not None:
            batch.to(where, non_blocking=pin)
        now = time.perf_counter()
        total += size
        # The first batch of each worker arrives with the time that the workers took to start.
        if number <= max(1, workers):
            first = now
        else:
            counted += size
        if now > until and counted:
            break
        if now > until + seconds:
            break
    if where is not None:
        torch.cuda.synchronize()
    ended = time.perf_counter()
    if not total:
        return None
    return counted / (ended - first) if counted else total / (ended - started)


def _loaders(  # noqa: PLR0913
    samples: FileSamples, paths: list[str], per_sample: float, gpus: int, seconds: float, *, cold: bool
) -> dict[str, Any]:
    """Return the loaders' rows, hot and cold by workers, the fewest sufficient workers, and the synthetic rate."""
    torch = samples._torch
    cpus = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []

    def add(state: str, workers: int, *, loaders: int = 1, pinned: bool | None = None, rate: float | None) -> None:
        if rate is not None:
            figure = {"samples_per_second": significant(rate), "gb_per_s": significant(rate * per_sample / 1e9)}
            rows.append({"state": state, "workers": workers, "loaders": loaders, "pinned": pinned, **figure})

    counts = worker_counts(cpus)
    for state in ("cold", "hot"):
        for workers in counts if state == "hot" or cold else ():
            if state == "cold":
                pagecache.drop(paths)
            stream = SampleStream(torch, samples, paths, cycle=state == "hot")
            began = time.perf_counter()
            add(state, workers, rate=delivered(torch, stream, workers, seconds, None, pin=False))
            if not workers and stream.samples:
                took = time.perf_counter() - began - stream.read_s - stream.decode_s
                each = {"read_s": stream.read_s, "decode_s": stream.decode_s, "other_s": max(0.0, took)}
                figures = {name: significant(total / stream.samples) for name, total in each.items()}
                steps.append({"state": state, **figures})
    hot = [row for row in rows if row["state"] == "hot"]
    if not hot:
        raise Trouble(f"a DataLoader got no sample from the {len(paths)} chosen files ({samples.kind})")
    best = max(row["samples_per_second"] for row in hot)
    advised = min(row["workers"] for row in hot if row["samples_per_second"] >= ENOUGH * best)
    first = next((sample for path in paths for sample in map(samples.decoded, samples.raw(path)) if sample), b"\0")
    synthetic = delivered(torch, Synthetic(torch, len(first)), advised, seconds, None, pin=False)
    if gpus > 1:
        per_gpu = max(1, cpus // gpus)
        add("hot", per_gpu, loaders=gpus, rate=at_once(samples, paths, gpus, per_gpu, seconds))
    for pinned in (True, False) if gpus else ():
        stream = SampleStream(torch, samples, paths, cycle=True)
        add("hot", advised, pinned=pinned, rate=delivered(torch, stream, advised, seconds, "cuda:0", pin=pinned))
    return {
        "loaders": rows,
        "steps": steps,
        "advised_workers": advised,
        "synthetic_samples_per_second": None if synthetic is None else significant(synthetic),
    }


def at_once(samples: FileSamples, paths: list[str], loaders: int, workers: int, seconds: float) -> float | None:
    """Return the samples per second of one loader for each GPU, all at the same time."""

    def measure(number: int) -> dict[str, Any]:
        part = SampleStream(samples._torch, samples, paths[number::loaders] or paths, cycle=True)
        return {"rate": delivered(samples._torch, part, workers, seconds, None, pin=False)}

    jobs = [Job((Task("loader", measure, (number,), 4 * seconds + 30),), str(number)) for number in range(loaders)]
    total = 0.0
    for _, _, outcome in run_jobs(jobs, loaders, Clock(None)):
        if not outcome.values.get("rate"):
            return None
        total += outcome.values["rate"]
    return total


# --- decoding on the GPU


def _on_gpu(paths: list[str]) -> list[dict[str, Any]]:
    """Return the rates of the decoders on the first GPU, each in a process of its own; nothing for those that fail."""
    files = [path for path in paths if path.lower().endswith((".jpg", ".jpeg"))][:512]
    tasks = [Task(name, decode, (files,), 60) for name, decode in (("nvJPEG", _by_nvjpeg), ("DALI", _by_dali))]
    outcomes = run_jobs([Job((task,)) for task in tasks if files], 1, Clock(None))
    return [
        {"decoder": task.name, "device": "cuda", "samples_per_second": significant(outcome.values["rate"])}
        for _, task, outcome in outcomes
        if outcome.values.get("rate")
    ]


def _by_nvjpeg(files: list[str]) -> dict[str, Any]:
    torch, vision = importlib.import_module("torch"), importlib.import_module("torchvision.io")
    vision.decode_jpeg(vision.read_file(files[0]), device="cuda")
    began = time.perf_counter()
    for path in files:
        vision.decode_jpeg(vision.read_file(path), device="cuda")
    torch.cuda.synchronize()
    return {"rate": len(files) / (time.perf_counter() - began)}


def _by_dali(files: list[str]) -> dict[str, Any]:
    dali, functions = importlib.import_module("nvidia.dali"), importlib.import_module("nvidia.dali.fn")
    pipeline = dali.Pipeline(batch_size=BATCH, num_threads=4, device_id=0)
    with pipeline:
        encoded, _ = functions.readers.file(files=files)
        decoded = functions.decoders.image(encoded, device="mixed")
        pipeline.set_outputs(functions.resize(decoded, size=[SIDE, SIDE]))
    pipeline.build()
    pipeline.run()
    began = time.perf_counter()
    for _ in range(max(1, len(files) // BATCH)):
        pipeline.run()
    return {"rate": max(1, len(files) // BATCH) * BATCH / (time.perf_counter() - began)}
