"""What a user can put in the way of root: each kind of obstacle at each component of a path, and a swap at any time."""

import os
import pwd
import random
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

SECRET = "root-only-text"  # noqa: S105
USER = pwd.getpwnam("daemon")
"""The hostile user."""
OTHER = pwd.getpwnam("bin")
OBSTACLES = (
    "link",
    "relative link",
    "dangling link",
    "link to itself",
    "hard link",
    "pipe",
    "socket",
    "device",
    "directory",
    "empty",
    "sparse",
    "not text",
    "of another user",
    "of root",
    "nothing",
)


class World:
    """A folder of root that users can enter: a home of the user, a folder that all can write to, and root's own."""

    def __init__(self, root: Path) -> None:
        self.root, self.home, self.shared, self.precious = (root / name for name in ("", "home", "shared", "precious"))
        for folder, mode, owner in (
            (self.home, 0o755, USER.pw_uid),
            (self.shared, 0o1777, 0),
            (self.precious, 0o700, 0),
        ):
            folder.mkdir()
            folder.chmod(mode)
            os.chown(folder, owner, USER.pw_gid if owner else 0)
        (self.precious / "secret").write_text(f"{SECRET}\n")
        (self.precious / "secret").chmod(0o600)
        (self.precious / "folder").mkdir()

    def snapshot(self) -> dict[str, Any]:
        """Return all that is in root's own folder."""
        files = {}
        for path in [self.precious, *sorted(self.precious.rglob("*"))]:
            status = path.lstat()
            data = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
            files[str(path)] = (status.st_mode, status.st_uid, status.st_gid, data)
        return files

    def put(self, path: Path, obstacle: str, *, last: bool) -> None:
        """Put an obstacle at a path, as the user would; ``last``: where the file is expected, not a folder."""
        target = self.precious / "secret" if last else self.precious
        if obstacle in ("link", "relative link", "dangling link", "link to itself"):
            leads = {"link": target, "dangling link": self.precious / "none", "link to itself": path}
            path.symlink_to(leads.get(obstacle) or os.path.relpath(target, path.parent))
        elif obstacle == "hard link":
            os.link(self.precious / "secret", path)
            return
        elif obstacle == "pipe":
            os.mkfifo(path)
        elif obstacle == "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        elif obstacle == "device":
            with suppress(PermissionError):
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        elif obstacle == "directory" or not (last or obstacle == "nothing"):
            path.mkdir()
        elif obstacle == "sparse":
            with path.open("wb") as stream:
                stream.truncate(2 << 30)
        elif obstacle != "nothing":
            path.write_bytes({"empty": b"", "not text": b"\xff\xfe caf\xe9\n"}.get(obstacle, b"text\n"))
        owner = {"of another user": OTHER, "of root": pwd.getpwuid(0)}.get(obstacle, USER)
        with suppress(FileNotFoundError):
            os.lchown(path, owner.pw_uid, owner.pw_gid)

    def ways(self, folder: Path, *names: str) -> Iterator[tuple[str, Path]]:
        """Yield (obstacle and component, path) for each obstacle at each component; the folders before are ordinary."""
        for number, name in enumerate(names):
            for obstacle in OBSTACLES:
                at = folder
                for before in names[:number]:
                    at /= before
                    at.mkdir()
                    os.chown(at, USER.pw_uid, USER.pw_gid)
                self.put(at / name, obstacle, last=number == len(names) - 1)
                yield f"{obstacle} at {name}", folder.joinpath(*names)
                first = folder / names[0]
                shutil.rmtree(first) if first.is_dir() and not first.is_symlink() else first.unlink(missing_ok=True)


@contextmanager
def world() -> Iterator[World]:
    """Create the folders and remove them at the end."""
    root = Path(tempfile.mkdtemp(prefix="gpunode-test-", dir="/tmp"))
    root.chmod(0o711)
    try:
        yield World(root)
    finally:
        shutil.rmtree(root)


def within(limit_s: float, act: Callable[[], Any]) -> str:
    """Return what an action returns or raises, as text; "hangs" if it does not end.

    It runs here, interrupted at its limit: a fork of a process with all tests loaded takes longer than most actions.
    """

    def interrupt(*_: object) -> NoReturn:
        raise _LimitReached

    handler, since = signal.getsignal(signal.SIGALRM), time.monotonic()
    # pytest-timeout has the same timer for the whole test.
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        return repr(act())
    except _LimitReached:
        return "hangs"
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - since)), interval)


class _LimitReached(BaseException):
    """The action did not end."""


@contextmanager
def swapped(folder: Path, target: Path, seed: int) -> Iterator[None]:
    """Let the user exchange a folder or file for a link to ``target``, and back, as often as possible."""
    child = os.fork()
    if child == 0:
        try:
            os.setgid(USER.pw_gid)
            os.setuid(USER.pw_uid)
            swap(folder, target, random.Random(seed))  # noqa: S311
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def swap(path: Path, target: Path, source: random.Random) -> None:
    """Exchange until killed; ends after a minute in any case."""
    away, link = path.with_name("away"), path.with_name("link")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(OSError):
            link.symlink_to(target)
        with suppress(OSError):
            path.rename(away)
            link.rename(path)
        time.sleep(source.random() / 2000)
        with suppress(OSError):
            path.rename(link) if path.is_symlink() else None
            away.rename(path)
        time.sleep(source.random() / 2000)
