"""The folder with the copies: a record for each, their locks, and which of them is evicted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from gpunode.errors import UndeterminedError, UsageError
from gpunode.file_access import FileRefusedError, opened
from gpunode.frozen import FrozenByName
from gpunode.text import listed
from gpunode.whole import trusted_users, whole_file

FOLDER = ".gpunode-stage"
EVICTED = "evicted-"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
ROOM = 0.01
"""Share of a disk that stays free."""
MOST_RECORD = 1 << 16
POLL_S = 1.0


def amount(size: float) -> str:
    """Return bytes as ``1.5 GB`` or ``20 MB``."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


class StagedCopy(FrozenByName):
    """The record of one copy."""

    schema_name: Literal["gpunode.stage/1"] = Field("gpunode.stage/1", alias="schema")
    name: str
    source: str
    files: int = Field(ge=0)
    bytes: int = Field(ge=0)
    """Of the whole data set, also while it is not complete."""
    complete: bool
    used_at: float = Field(ge=0)
    """When it was staged or found complete, in seconds since 1970."""


class StagingFolder:
    """A folder that only its owner can write to, with copies of data sets in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / FOLDER

    def open(self) -> None:
        """Create the folder if it is missing. Raises UsageError for one that another user can write to."""
        try:
            with opened(str(self.path), trusted=trusted_users()) as location:
                if location.inode is None:
                    with contextlib.suppress(FileExistsError):  # of another run, which began at the same time
                        os.mkdir(location.name, 0o755, dir_fd=location.folder)
            self._refuse_foreign()
            self.folder.mkdir(mode=0o755, exist_ok=True)
            for left in self.folder.glob(f"{EVICTED}*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
        except FileRefusedError as err:
            raise UsageError(f"{self.path}: {err}") from None
        except OSError as err:
            raise UsageError(f"{self.path}: cannot be written: {err.strerror or err}") from None

    def _refuse_foreign(self) -> None:
        status = self.path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{self.path} is not a directory: name a directory on a local disk")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise UsageError(
                f"{self.path}: other users can write there and could replace the data: name a directory of your own, "
                f"such as {self.path / 'staged'}"
            )

    def copies(self) -> list[StagedCopy]:
        """Return the records of the copies that exist, the least recently used first. Raises UsageError."""
        copies = []
        try:
            paths = sorted(self.folder.glob("*.json"))
        except OSError as err:
            raise UsageError(f"{self.folder}: {err.strerror or err}") from None
        for path in paths:
            try:
                with path.open("rb") as stream:
                    copy = StagedCopy.model_validate_json(stream.read(MOST_RECORD))
            except (OSError, ValidationError):
                raise UsageError(f"{path}: not a record of gpunode stage: remove it and its data set") from None
            if copy.name == path.stem and (self.path / copy.name).is_dir():
                copies.append(copy)
        return sorted(copies, key=lambda copy: copy.used_at)

    def record(self, name: str) -> StagedCopy | None:
        """Return the record of a copy; None if there is none."""
        return next((copy for copy in self.copies() if copy.name == name), None)

    def write(self, copy: StagedCopy) -> None:
        """Write the record of a copy."""
        with whole_file(self.folder / f"{copy.name}.json") as stream:
            stream.write(copy.model_dump_json(by_alias=True, indent=1).encode() + b"\n")

    def journal(self, name: str) -> Path:
        """Return the path of the pieces that were copied."""
        return self.folder / f"{name}.pieces"

    @contextlib.contextmanager
    def lock(self, name: str, wait_s: float, waiting: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of a copy, or of the folder (``name`` empty); wait for another holder for at most ``wait_s``.

        Raises UndeterminedError after that time.
        """
        path = self.folder / f"{name}.lock"
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            until, reported = time.monotonic() + wait_s, False
            while not _locked(number):
                if time.monotonic() > until:
                    raise UndeterminedError(f"{self.path / name}: another gpunode stage did not end in {wait_s:.0f} s")
                if not reported:
                    waiting(f"waiting for another gpunode stage of {self.path / name}")
                    reported = True
                time.sleep(POLL_S)
            yield
        finally:
            os.close(number)

    def is_locked(self, name: str) -> bool:
        """Return whether another process stages this copy."""
        with contextlib.suppress(OSError):
            number = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return not _locked(number)
            finally:
                os.close(number)
        return False

    def free(self) -> int:
        """Return the bytes that may be used on the disk."""
        disk = os.statvfs(self.path)
        return max(0, disk.f_bavail * disk.f_frsize - int(disk.f_blocks * disk.f_frsize * ROOM))

    def used(self, copy: StagedCopy) -> int:
        """Return the bytes of a copy on the disk, also of one that is not complete."""
        if copy.complete:
            return copy.bytes
        total = 0
        for folder, _, names in os.walk(self.path / copy.name):
            for name in names:
                with contextlib.suppress(OSError):
                    total += Path(folder, name).lstat().st_blocks * 512
        return total

    def make_room(self, name: str, size: int, missing: int, limit: int | None, spare_s: float) -> list[StagedCopy]:
        """Remove the least recently used copies until ``size`` fits into the limit and ``missing`` on the disk.

        Returns the evicted ones. Raises UsageError, before anything is removed, if it cannot fit.
        """
        if limit is not None and size > limit:
            raise UsageError(f"{name} has {amount(size)}, --limit is {amount(limit)}: raise the limit")
        others = [copy for copy in self.copies() if copy.name != name]
        kept = sum(copy.bytes for copy in others)
        free, chosen, why = self.free(), list[StagedCopy](), list[str]()
        busy = in_use([self.path / copy.name for copy in others]) if others else set()
        now = time.time()
        for copy in others:
            if missing <= free and (limit is None or kept + size <= limit):
                break
            if self.is_locked(copy.name) or self.path / copy.name in busy:
                why.append(f"{copy.name} is in use")
            elif now - copy.used_at < spare_s:
                why.append(f"{copy.name} was used {(now - copy.used_at) / 60:.0f} min ago (--spare)")
            else:
                chosen.append(copy)
                kept, free = kept - copy.bytes, free + self.used(copy)
        if missing > free or (limit is not None and kept + size > limit):
            reason = f"; {listed(why)}" if why else ""
            room = f"{amount(missing)} are missing, {amount(free)} can be free on the disk"
            if missing <= free and limit is not None:
                room = f"{amount(size)} beside {amount(kept)} of other copies exceed --limit"
            raise UsageError(f"{self.path}: no room for {name}: {room}{reason}")
        for copy in chosen:
            self.evict(copy)
        return chosen

    def evict(self, copy: StagedCopy) -> None:
        """Remove a copy: its name first, so that nobody finds half of it."""
        gone = self.folder / f"{EVICTED}{copy.name}"
        shutil.rmtree(gone, ignore_errors=True)
        (self.path / copy.name).rename(gone)
        (self.folder / f"{copy.name}.json").unlink(missing_ok=True)
        self.journal(copy.name).unlink(missing_ok=True)
        shutil.rmtree(gone)


def _locked(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class MountPlace:
    """A mount as one process sees it."""

    device: str
    """``259:3``."""
    root: str
    """Folder of the file system that is mounted."""
    path: str


def in_use(folders: Sequence[Path], proc: Path = Path("/proc")) -> set[Path]:
    """Return the folders with an open or mapped file, with a process in them, or mounted into a container.

    A path counts by its place in the file system: containers have other names for it. Only root sees the files of
    other users' processes.
    """
    own_mounts = mounts_of(proc / "self")
    wanted = {
        location: folder
        for folder in folders
        if (location := _file_system_of(os.path.realpath(folder), own_mounts)) is not None
    }
    busy = set()
    for process in proc.glob("[0-9]*"):
        mounts = mounts_of(process)
        locations = {location for path in _paths_of(process) if (location := _file_system_of(path, mounts)) is not None}
        locations |= {(mount.device, mount.root) for mount in mounts if mount not in own_mounts}
        for (device, path), folder in wanted.items():
            if any(device == other and (path == text or text.startswith(f"{path}/")) for other, text in locations):
                busy.add(folder)
    return busy


def mounts_of(process: Path) -> list[MountPlace]:
    """Return the mounts of a process, the longest paths first; none if they cannot be read."""
    mounts = []
    with contextlib.suppress(OSError):
        for line in (process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            fields = line.split(" ")
            if len(fields) > 5:
                root, path = (
                    re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field) for field in fields[3:5]
                )
                mounts.append(MountPlace(fields[2], root, path))
    return sorted(mounts, key=lambda mount: -len(mount.path))


def _file_system_of(path: str, mounts: Sequence[MountPlace]) -> tuple[str, str] | None:
    """Return the file system of a path and the path in it; None: no mount has it."""
    for mount in mounts:
        top = mount.path.rstrip("/")
        if path == mount.path or path.startswith(f"{top}/"):
            return mount.device, f"{mount.root.rstrip('/')}{path[len(top) :]}".rstrip("/") or "/"
    return None


def _paths_of(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield str((process / "cwd").readlink())
    with contextlib.suppress(OSError):
        for number in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(number.readlink())
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_bytes().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6:
                yield os.fsdecode(fields[5])


def name_of(source: Path, name: str | None) -> str:
    """Return the name of a copy: that of its source if none is given. Raises UsageError."""
    copy_name = source.name if name is None else name
    if NAME.fullmatch(copy_name) is None:
        raise UsageError(
            f'--name: "{copy_name}" is not a valid name of a copy: letters, digits and ._+- (example: imagenet)'
        )
    return copy_name
