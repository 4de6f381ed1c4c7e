"""A user with a shell on a lab node: swaps what root may open, holds locks, and reports what can be read.

Runs on the node with that user's rights, as ``python3 -I``, until it is killed. It reads JSON: ``seed``, ``paths`` to
swap, ``kinds`` of what it puts there, ``targets`` of links, ``text`` of ordinary files, ``secret`` to search for,
``limit_s``. It prints the number of swaps, and ``LEAK`` with each place where it read the secret.
"""

import collections
import fcntl
import json
import os
import random
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

KINDS = (
    *("link", "relative link", "dangling link", "link to itself", "hard link", "pipe", "endless pipe", "socket"),
    *("directory", "empty", "sparse", "not text", "text", "closed", "nothing"),
)
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/scratch")
LOCKED = ("/run/lock", "/run/gpunode", "/etc/gpunode", "/etc/ssh", "/etc/docker", "/var/lib/gpunode", "/var/lib/dpkg")
PAUSES_S = (0, 0.0002, 0.0005, 0.001, 0.05)
MOST_ENTRIES, MOST_LOCKS = 400, 300
PEEK_EVERY = 40
SPARSE_BYTES = 2 << 30


class User:
    """The user's paths and what the user holds open."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.source = random.Random(order["seed"])  # noqa: S311 - no secret
        self.paths = [Path(path) for path in order["paths"]]
        self.kinds: list[str] = order["kinds"]
        self.targets: list[str] = order["targets"]
        self.text, self.secret = str(order["text"]), str(order["secret"]).encode()
        self.pipes: collections.deque[int] = collections.deque()
        self.locks: dict[Path, int] = {}
        self.end = time.monotonic() + order["limit_s"]

    def run(self) -> None:
        """Swap until the time is over."""
        number = 0
        while time.monotonic() < self.end:
            path = self.source.choice(self.paths)
            with suppress(OSError):
                self.swap(path, self.source.choice(self.kinds))
            time.sleep(self.source.choice(PAUSES_S))
            if any(path in other.parents for other in self.paths):
                with suppress(OSError):
                    self.swap(path, "directory")
            self.feed()
            if number % PEEK_EVERY == 0:
                self.lock()
                for leak in self.leaks():
                    print("LEAK", leak)
                print(number, flush=True)
            number += 1

    def swap(self, path: Path, kind: str) -> None:
        """Put something else at a path, by renames."""
        new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
        remove(new)
        self.put(new, kind)
        with suppress(FileNotFoundError):
            path.rename(old)
        if kind != "nothing":
            new.rename(path)
        remove(old)

    def put(self, path: Path, kind: str) -> None:
        """Create an obstacle, or an ordinary file or folder."""
        target = self.source.choice(self.targets)
        if kind.endswith("link"):
            leads = {"relative link": os.path.relpath(target, path.parent), "dangling link": f"{path}.none"}
            os.link(target, path) if kind == "hard link" else path.symlink_to(leads.get(kind, target))
        elif kind == "link to itself":
            path.symlink_to(path.name)
        elif kind.endswith("pipe"):
            os.mkfifo(path)
            if kind == "endless pipe":
                self.pipes.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        elif kind == "directory":
            path.mkdir(0o700)
            (path / "authorized_keys").write_text(self.text, encoding="utf-8")
        elif kind == "sparse":
            with path.open("wb") as stream:
                stream.truncate(SPARSE_BYTES)
        elif kind != "nothing":
            path.write_bytes({"empty": b"", "not text": b"\xff\xfe caf\xe9\n"}.get(kind, self.text.encode()))
            path.chmod(0 if kind == "closed" else 0o600)

    def feed(self) -> None:
        """Keep the endless pipes full; close the oldest."""
        while len(self.pipes) > 20:
            os.close(self.pipes.popleft())
        for number in self.pipes:
            with suppress(OSError):
                os.write(number, b"endless\n" * 4096)

    def lock(self) -> None:
        """Lock what this user can open and root might lock."""
        for path in entries(LOCKED):
            if path not in self.locks and len(self.locks) < MOST_LOCKS:
                with suppress(OSError):
                    self.locks[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                    fcntl.flock(self.locks[path], fcntl.LOCK_EX | fcntl.LOCK_NB)

    def leaks(self) -> Iterator[str]:
        """Yield where the secret can be read: files in shared folders and the own home, command lines."""
        homes = {str(path.parent) for path in self.paths}
        lines = [Path("/proc") / name / "cmdline" for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
        for path in [*entries((*SHARED, *homes)), *lines]:
            with suppress(OSError):
                number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    if stat.S_ISREG(os.fstat(number).st_mode) and self.secret in os.read(number, 1 << 20):
                        yield str(path)
                finally:
                    os.close(number)


def remove(path: Path) -> None:
    """Remove whatever is at a path."""
    if not path.is_symlink() and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def entries(folders: Sequence[str]) -> Iterator[Path]:
    """Yield folders and what is in them and in their folders."""
    for folder in folders:
        for number, (name, folders_in, files) in enumerate(os.walk(folder)):
            if number > MOST_ENTRIES:
                break
            yield Path(name)
            yield from (Path(name) / file for file in files[:MOST_ENTRIES])
            if name.count("/") > folder.count("/") + 1:
                folders_in.clear()


if __name__ == "__main__":
    User(json.load(sys.stdin)).run()
