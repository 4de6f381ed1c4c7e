"""Read the state of paths on this node: kind, digest, mode, owner, and the text of a few documents."""

from __future__ import annotations

import glob
import grp
import hashlib
import os
import pwd
import stat
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import file_access

LARGEST = 16 << 20
"""Maximum size of a file of which the digest is computed, in bytes."""
MOST = 5000
"""Maximum number of paths."""


def file_state(path: str) -> dict[str, Any]:
    """Return kind, mode, owner and group of a path, the digest of a file, and the number of entries of a folder.

    ``problem``: why a path could not be read.
    """
    try:
        with file_access.opened(path, trusted=file_access.ours(), follow=False) as location:
            return _state_of(location)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": "absent"}
    except OSError as err:
        return {"kind": "unknown", "problem": reason(path, err)}


def _state_of(location: file_access.OpenPath) -> dict[str, Any]:
    status = location.inode
    if status is None:
        return {"kind": "absent"}
    state: dict[str, Any] = {
        "kind": "other",
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "owner": name_of(pwd.getpwuid, status.st_uid),
        "group": name_of(grp.getgrgid, status.st_gid),
        "mtime": status.st_mtime,
    }
    if stat.S_ISREG(status.st_mode):
        state["kind"] = "file"
        if status.st_size <= LARGEST:
            state["sha256"] = hashlib.sha256(file_access.content(location, LARGEST)).hexdigest()
    elif stat.S_ISDIR(status.st_mode):
        state.update(kind="folder", entries=len(file_access.names_at(location)))
    elif stat.S_ISLNK(status.st_mode):
        state.update(kind="link", target=os.readlink("", dir_fd=location.number))
    return state


def reason(path: str, err: OSError) -> str:
    """Return why a path was not read, in one line."""
    return str(err) if isinstance(err, file_access.FileRefusedError) else f"{path}: {err.strerror or err}"


def name_of(database: Any, number: int) -> str:
    """Return the name of a user or group; the number if it has no name."""
    try:
        return str(database(number)[0])
    except KeyError:
        return str(number)


def document(path: str) -> str | None:
    """Return the text of a file; None if it is absent, larger than ``file_access.LARGEST`` or not text."""
    try:
        text: str = file_access.text(path)
    except OSError:
        return None
    return text


def collected(paths: list[str], globs: list[str], contents: list[str]) -> dict[str, Any]:
    """Return ``files`` (path to its state) and ``contents`` (path to text or None).

    A document that exists and has no text has the reason as the ``problem`` of its state.
    """
    wanted = sorted({*paths, *contents})
    matching = sorted({path for pattern in globs for path in glob.glob(pattern, recursive=True)} - {*wanted})  # noqa: PTH207
    files = {path: file_state(path) for path in [*wanted, *matching][:MOST]}
    texts: dict[str, str | None] = dict.fromkeys(contents)
    for path in contents:
        try:
            texts[path] = file_access.text(path)
        except (FileNotFoundError, NotADirectoryError) as err:
            if path in files and files[path]["kind"] != "absent":
                files[path]["problem"] = reason(path, err)
        except OSError as err:
            if path in files:
                files[path]["problem"] = reason(path, err)
    return {"files": files, "contents": texts}
