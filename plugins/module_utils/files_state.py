"""Read the state of paths on this node: kind, digest, mode, owner, and the text of a few documents."""

from __future__ import annotations

import glob
import grp
import hashlib
import os
import pwd
import stat
from pathlib import Path
from typing import Any

LARGEST = 1 << 20
"""Maximum size of a document, in bytes."""
MOST = 5000
"""Maximum number of paths."""


def file_state(path: str) -> dict[str, Any]:
    """Return kind, mode, owner and group of a path, the digest of a file, and the number of entries of a folder."""
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": "absent"}
    except OSError:
        return {"kind": "unknown"}
    found: dict[str, Any] = {
        "kind": "other",
        "mode": f"{stat.S_IMODE(there.st_mode):04o}",
        "owner": name_of(pwd.getpwuid, there.st_uid),
        "group": name_of(grp.getgrgid, there.st_gid),
        "mtime": there.st_mtime,
    }
    try:
        if stat.S_ISREG(there.st_mode):
            found.update(kind="file", sha256=digest(path))
        elif stat.S_ISDIR(there.st_mode):
            found.update(kind="folder", entries=len(os.listdir(path)))  # noqa: PTH208
        elif stat.S_ISLNK(there.st_mode):
            found.update(kind="link", target=os.readlink(path))  # noqa: PTH115
    except OSError:
        return {"kind": "unknown"}
    return found


def name_of(database: Any, number: int) -> str:
    """Return the name of a user or group; the number if it has no name."""
    try:
        return str(database(number)[0])
    except KeyError:
        return str(number)


def digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    whole = hashlib.sha256()
    with Path(path).open("rb") as file:
        for part in iter(lambda: file.read(LARGEST), b""):
            whole.update(part)
    return whole.hexdigest()


def document(path: str) -> str | None:
    """Return the text of a file; None if it is absent, larger than ``LARGEST`` or not text."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
        return data.decode("utf-8") if len(data) <= LARGEST else None
    except (OSError, UnicodeDecodeError):
        return None


def taken(paths: list[str], globs: list[str], contents: list[str]) -> dict[str, Any]:
    """Return ``files`` (path to its state) and ``contents`` (path to text or None)."""
    wanted = {*paths, *contents}
    for pattern in globs:
        wanted.update(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return {
        "files": {path: file_state(path) for path in sorted(wanted)[:MOST]},
        "contents": {path: document(path) for path in contents},
    }
