# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Run a command within its time limit; with files that are not in place yet, in a mount namespace of its own."""

from __future__ import annotations

import base64
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 60
LARGEST_FOLDER = 16 << 20
"""Maximum size in bytes of a folder that is copied to show a file in it that does not exist yet."""
PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Empty folder that sshd requires. systemd creates it for each start of sshd; with ssh.socket it is often missing."""
NEW_NAMESPACE, BIND, RECURSIVE, PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


class UnavailableError(Exception):
    """The reason why the node cannot show files before they are in place, in one line."""


def run_with_files(files: list[dict[str, Any]], commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Return (exit status, stdout, stderr) of each command, run as if the files were in place.

    A file in a missing folder is not shown. Raise UnavailableError if the node has no mount namespaces.
    """
    with tempfile.TemporaryDirectory(prefix="gpunode-", dir="/run" if os.access("/run", os.W_OK) else None) as drafts:
        binds = _drafted(files, Path(drafts))
        return [_run_in_namespace(argv, binds) for argv in commands]


def _drafted(files: list[dict[str, Any]], drafts: Path) -> list[tuple[bytes, bytes]]:
    """Return (draft, path) of each file and folder that is mounted over another one."""
    binds = []
    by_folder: dict[Path, list[dict[str, Any]]] = {}
    for file in files:
        path = Path(file["path"])
        if path.parent.is_dir():
            by_folder.setdefault(path.parent, []).append(file)
    for number, (folder, inside) in enumerate(sorted(by_folder.items())):
        draft = drafts / str(number)
        if all(file["content"] is not None and Path(file["path"]).is_file() for file in inside):
            draft.mkdir()
            places = [(draft / Path(file["path"]).name, Path(os.path.realpath(file["path"]))) for file in inside]
        else:
            if sum(entry.lstat().st_size for entry in folder.rglob("*")) > LARGEST_FOLDER:
                raise UnavailableError(f"{folder} is too large to be copied")
            shutil.copytree(folder, draft, symlinks=True)
            places = [(draft, folder)]
        for file in inside:
            target = draft / Path(file["path"]).name
            target.unlink(missing_ok=True)
            if file["content"] is not None:
                text = file["content"]
                target.write_bytes(base64.b64decode(text) if file.get("encoding") == "base64" else text.encode())
                target.chmod(int(file["mode"], 8))
        binds += [(os.fsencode(source), os.fsencode(destination)) for source, destination in places]
    return binds


def _run_in_namespace(argv: list[str], binds: list[tuple[bytes, bytes]]) -> tuple[int, str, str]:
    libc = ctypes.CDLL(None, use_errno=True)
    lacks_folder = Path(argv[0]).name == "sshd" and not PRIVILEGE_SEPARATION.is_dir()

    def enter() -> None:
        done = libc.unshare(NEW_NAMESPACE) or libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None)
        for source, destination in binds:
            done = done or libc.mount(source, destination, None, BIND, None)
        if lacks_folder:
            folder = os.fsencode(PRIVILEGE_SEPARATION.parent)
            done = done or libc.mount(b"tmpfs", folder, b"tmpfs", 0, b"size=64k,mode=0755")
        if done:
            raise OSError(ctypes.get_errno(), "mount namespace")
        if lacks_folder:
            PRIVILEGE_SEPARATION.mkdir(mode=0o755)

    try:
        return run(argv, LIMIT_S, enter=enter if binds or lacks_folder else None)
    except subprocess.SubprocessError:
        raise UnavailableError("a mount namespace cannot be created") from None


def run(
    argv: list[str], limit_s: float, env: dict[str, str] | None = None, enter: Callable[[], None] | None = None
) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) of a command; 124 at its time limit, 127 if it cannot be started.

    At the limit its whole process group is killed. ``enter`` runs in the child before the command. Raise
    SubprocessError if ``enter`` fails.
    """
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=env,
            preexec_fn=enter,  # noqa: PLW1509 - a module has one thread
        )
    except OSError as err:
        return 127, "", str(err)
    try:
        output, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return 124, "", f"{argv[0]} ran past {limit_s} s"
    return child.returncode, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")
