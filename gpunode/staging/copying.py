"""The copy of one data set: its files in pieces, each written, read back and compared before it counts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpunode.errors import UndeterminedError, UsageError
from gpunode.staging.shelf import amount
from gpunode.text import counted, listed

PIECE = 64 << 20
"""Bytes of a file that are copied and verified together. A journal names a piece by its start alone, so another size
needs another file for the journal: a part of a piece would count as the whole."""
BATCH_FILES = 256
"""Small files that are written before the first is flushed to the disk."""
BLOCK = 1 << 20
PART = ".gpunode-part"
MOST_FILES = 5_000_000
MOST_FAILURES = 20
TICK_S = 0.5


@dataclass(frozen=True)
class StagedFile:
    """A file of the data set."""

    path: str
    """Relative to the data set."""
    size: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True)
class FilePiece:
    """A part of a file."""

    file: StagedFile
    at: int

    @property
    def size(self) -> int:
        """Return its bytes."""
        return min(PIECE, self.file.size - self.at)


@dataclass
class FileListing:
    """What a data set consists of."""

    files: list[StagedFile] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    """Links to what the data set has itself, as they are."""
    left_out: list[str] = field(default_factory=list)
    """Links that lead nowhere, pipes, devices."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


def listing(source: Path) -> FileListing:
    """Return the files of a directory. Raises UsageError for one that cannot be copied as a whole."""
    top = os.path.realpath(source)
    file_listing = FileListing()
    waiting = [""]
    try:
        while waiting:
            folder = waiting.pop()
            with os.scandir(Path(top, folder)) as entries:
                for entry in entries:
                    path = os.path.join(folder, entry.name)  # noqa: PTH118 (a text, millions of times)
                    _sort(entry, path, top, file_listing, waiting)
            if len(file_listing.files) > MOST_FILES:
                raise UsageError(
                    f"{source} has more than {MOST_FILES} files: pack them into shards (tar, Parquet) first"
                )
    except OSError as err:
        raise UsageError(f"{err.filename or source}: cannot be read: {err.strerror or err}") from None
    if not file_listing.files:
        raise UsageError(f"{source} has no files to copy")
    return file_listing


def _sort(entry: os.DirEntry[str], path: str, top: str, file_listing: FileListing, waiting: list[str]) -> None:
    if entry.name.endswith(PART):
        # Its copy would have the name under which the file without the suffix is copied.
        raise UsageError(f"{entry.path}: a file of an incomplete copy: finish it (gpunode stage) or rename it")
    if entry.is_symlink():
        target = os.path.realpath(entry.path)
        if f"{target}/".startswith(f"{top}/") and not os.path.isabs(os.readlink(entry.path)):  # noqa: PTH115, PTH117
            file_listing.links[path] = os.readlink(entry.path)  # noqa: PTH115
            return
        if Path(target).is_dir():
            raise UsageError(f"{entry.path} is a link to a directory outside the data set: stage {target} by itself")
    elif entry.is_dir():
        file_listing.folders.append(path)
        waiting.append(path)
        return
    try:
        status = entry.stat()
    except FileNotFoundError:
        file_listing.left_out.append(path)
        return
    if stat.S_ISREG(status.st_mode):
        file_listing.files.append(
            StagedFile(path, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode) & 0o777)
        )
    else:
        file_listing.left_out.append(path)


class PieceJournal:
    """The pieces of a copy that were verified: a line for each, added after the piece is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def known(self) -> dict[str, tuple[int, int, dict[int, str]]]:
        """Return size, time and the digests of the pieces by place, for each file. A torn last line is left out."""
        files: dict[str, tuple[int, int, dict[int, str]]] = {}
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as stream:
            for line in stream:
                with contextlib.suppress(ValueError, TypeError):
                    path, size, mtime_ns, at, digest = json.loads(line)
                    if path not in files or files[path][:2] != (size, mtime_ns):
                        files[path] = (size, mtime_ns, {})
                    files[path][2][at] = digest
        return files

    def replace(self, known: dict[str, tuple[int, int, dict[int, str]]]) -> None:
        """Write the journal again with these pieces."""
        draft = self._path.with_name(f"{self._path.name}.new")
        with draft.open("wb") as stream:
            for path, (size, mtime_ns, pieces) in known.items():
                for at, digest in pieces.items():
                    stream.write(_line(path, size, mtime_ns, at, digest))
        draft.replace(self._path)

    def add(self, pieces: Sequence[tuple[FilePiece, str]]) -> None:
        """Add verified pieces."""
        lines = [
            _line(piece.file.path, piece.file.size, piece.file.mtime_ns, piece.at, digest) for piece, digest in pieces
        ]
        with self._lock, self._path.open("ab") as stream:
            stream.write(b"".join(lines))


def _line(path: str, size: int, mtime_ns: int, at: int, digest: str) -> bytes:
    return json.dumps([path, size, mtime_ns, at, digest]).encode() + b"\n"


@dataclass
class CopyOutcome:
    """What a run copied."""

    copied_bytes: int = 0
    copied_files: int = 0
    failures: list[str] = field(default_factory=list)
    """Of the first files; ``failed`` is their number."""
    failed: int = 0


class CopyRun:
    """The copy of a data set from ``source`` to ``target``."""

    def __init__(self, source: Path, target: Path, file_listing: FileListing, journal: PieceJournal) -> None:
        self._source, self._target, self._listing, self._journal = source, target, file_listing, journal
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._left: dict[str, int] = {}
        self.outcome = CopyOutcome()
        self.moved = 0
        """Bytes read and verified, as a sign of progress."""

    def missing_bytes(self) -> int:
        """Return the bytes that the journal does not have; nothing is changed."""
        known = self._journal.known()
        missing = 0
        for file in self._listing.files:
            size, mtime_ns, pieces = known.get(file.path, (0, 0, {}))
            has = pieces if (size, mtime_ns) == (file.size, file.mtime_ns) else {}
            missing += sum(FilePiece(file, at).size for at in range(0, file.size, PIECE) if at not in has)
        return missing

    def prepare(self, *, verify: bool) -> list[FilePiece]:
        """Remove what the source no longer has, create folders and links; return the pieces to copy.

        ``verify``: read every piece that is there and compare it with its digest.
        """
        known = self._journal.known()
        requested = {file.path for file in self._listing.files}
        folders = set(self._listing.folders)
        self._target.mkdir(mode=0o755, exist_ok=True)
        for path in list(_below(self._target)):
            name = str(path.relative_to(self._target))
            is_folder = path.is_dir() and not path.is_symlink()
            wanted = name in folders if is_folder else not path.is_symlink() and name.removesuffix(PART) in requested
            if not wanted and is_folder:
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif not wanted and not (path.is_symlink() and self._listing.links.get(name) == os.readlink(path)):  # noqa: PTH115
                path.unlink()
        for folder in sorted(folders):
            (self._target / folder).mkdir(mode=0o755, exist_ok=True)
        for name, link in self._listing.links.items():
            if not (self._target / name).is_symlink():
                (self._target / name).symlink_to(link)
        kept: dict[str, tuple[int, int, dict[int, str]]] = {}
        todo: list[FilePiece] = []
        for file in self._listing.files:
            pieces = self._present_pieces(file, known.get(file.path), verify=verify)
            missing = [FilePiece(file, at) for at in range(0, max(1, file.size), PIECE) if at not in pieces]
            if pieces:
                kept[file.path] = (file.size, file.mtime_ns, pieces)
            if missing:
                todo += missing
                self._left[file.path] = len(missing)
            elif not (self._target / file.path).exists():
                self._finish(file)
        self._journal.replace(kept)
        return todo

    def _present_pieces(
        self, file: StagedFile, known: tuple[int, int, dict[int, str]] | None, *, verify: bool
    ) -> dict[int, str]:
        """Return the digests of the file's pieces that are on the disk."""
        path, part = self._target / file.path, self._target / (file.path + PART)
        existing = path if path.exists() else part
        matches = known is not None and known[:2] == (file.size, file.mtime_ns)
        try:
            if known is None or not matches or existing.stat().st_size != file.size:
                for leftover in (path, part):
                    leftover.unlink(missing_ok=True)
                return {}
        except FileNotFoundError:
            return {}
        if not verify:
            return known[2]
        verified = {
            at: digest for at, digest in known[2].items() if self._digest(existing, FilePiece(file, at)) == digest
        }
        if len(verified) < len(known[2]) and existing == path:
            path.rename(part)
        return verified

    def run(
        self, pieces: Sequence[FilePiece], jobs: int, stall_s: float, progress: Callable[[int], None]
    ) -> CopyOutcome:
        """Copy the pieces; ``progress`` is called with the bytes that were copied.

        Raises UndeterminedError if no byte was read or written for ``stall_s``.
        """
        batches = _batches(pieces)
        # As daemons: a read that hangs in the kernel does not keep this process.
        threads = [threading.Thread(target=self._work, args=(batches,), daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        moved, since = -1, time.monotonic()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(TICK_S) if threads[0].is_alive() else time.sleep(TICK_S / 5)
                progress(self.outcome.copied_bytes)
                if self.moved != moved:
                    moved, since = self.moved, time.monotonic()
                elif time.monotonic() - since > stall_s:
                    raise UndeterminedError(
                        f"{self._source}: nothing was read or written for {stall_s:.0f} s: look at the mount and the "
                        "disk; the next run continues"
                    )
        finally:
            self._stop.set()
        return self.outcome

    def _work(self, batches: Iterator[list[FilePiece]]) -> None:
        while not self._stop.is_set():
            with self._lock:
                batch = next(batches, None)
            if batch is None:
                return
            written: list[tuple[FilePiece, str]] = []
            for piece in batch:
                try:
                    written.append((piece, self._write(piece)))
                except _Stopped:
                    return
                except OSError as err:
                    self._failed(piece.file, err.strerror or str(err))
            good = [pair for pair in written if self._is_on_disk(*pair)]
            self._journal.add(good)
            for piece, _ in good:
                with self._lock:
                    self.outcome.copied_bytes += piece.size
                    self._left[piece.file.path] -= 1
                    done = not self._left[piece.file.path]
                if done:
                    try:
                        self._finish(piece.file)
                    except OSError as err:
                        self._failed(piece.file, err.strerror or str(err))
                        continue
                    with self._lock:
                        self.outcome.copied_files += 1

    def _write(self, piece: FilePiece) -> str:
        """Copy one piece to the disk; return its digest. Raises OSError, also for a source that changed."""
        digest, file = hashlib.sha256(), piece.file
        part = self._target / (file.path + PART)
        source = os.open(self._source / file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            target = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(target, file.size)
                offset, end = piece.at, piece.at + piece.size
                while offset < end:
                    if self._stop.is_set():
                        raise _Stopped
                    block = os.pread(source, min(BLOCK, end - offset), offset)
                    if not block:
                        raise OSError("it shrank while it was copied")
                    digest.update(block)
                    view = memoryview(block)
                    while view:
                        number = os.pwrite(target, view, offset)
                        view, offset = view[number:], offset + number
                    self.moved += len(block)
                status = os.fstat(source)
                if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                    raise OSError("it changed while it was copied")
            finally:
                os.close(target)
        finally:
            os.close(source)
        return digest.hexdigest()

    def _is_on_disk(self, piece: FilePiece, digest: str) -> bool:
        """Flush a piece, read it back from the disk, and return whether it is what was read from the source."""
        try:
            part = self._target / (piece.file.path + PART)
            number = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(number)
            finally:
                os.close(number)
            disk_digest = self._digest(part, piece)
        except OSError as err:
            self._failed(piece.file, err.strerror or str(err))
            return False
        if disk_digest != digest:
            self._failed(piece.file, "the disk returns other data than was written")
            return False
        return True

    def _digest(self, path: Path, piece: FilePiece) -> str | None:
        """Return the digest of a piece on the disk; None if it cannot be read."""
        digest = hashlib.sha256()
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            os.posix_fadvise(number, piece.at, piece.size, os.POSIX_FADV_DONTNEED)
            offset, end = piece.at, piece.at + piece.size
            while offset < end:
                block = os.pread(number, min(BLOCK, end - offset), offset)
                if not block:
                    return None
                digest.update(block)
                offset += len(block)
                self.moved += len(block)
        except OSError:
            return None
        finally:
            os.close(number)
        return digest.hexdigest()

    def _finish(self, file: StagedFile) -> None:
        """Give a complete file its owner, mode, time and name."""
        part = self._target / (file.path + PART)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):
                status = (self._source / file.path).stat()
                os.chown(part, status.st_uid, status.st_gid, follow_symlinks=False)
        part.chmod(file.mode)
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
        part.rename(self._target / file.path)

    def _failed(self, file: StagedFile, why: str) -> None:
        with self._lock:
            self.outcome.failed += 1
            if len(self.outcome.failures) < MOST_FAILURES:
                self.outcome.failures.append(f"{file.path}: {why}")


class _Stopped(Exception):  # noqa: N818 (no error)
    """The run was ended."""


def _below(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder, what is in a folder before the folder itself."""
    for top, folders, names in os.walk(folder, topdown=False):
        yield from (Path(top, name) for name in (*names, *folders))


def _batches(pieces: Sequence[FilePiece]) -> Iterator[list[FilePiece]]:
    """Yield pieces that are written before the first is flushed: many small files together, large ones alone."""
    batch: list[FilePiece] = []
    size = 0
    for piece in pieces:
        if batch and (size + piece.size > PIECE or len(batch) >= BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.size
    if batch:
        yield batch


def described(file_listing: FileListing) -> str:
    """Return what is copied, and what is not."""
    text = f"{counted(len(file_listing.files), 'file')}, {amount(file_listing.bytes)}"
    if file_listing.left_out:
        text += f"; left out, because they are no files or lead nowhere: {listed(file_listing.left_out)}"
    return text
