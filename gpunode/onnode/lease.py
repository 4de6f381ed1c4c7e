"""The node's part of a change: the lease, and the mark of the drain. Python 3.8, standard library; sent over stdin.

The first argument is a JSON object: ``op`` (``take``, ``mark``, ``free``), ``token``, ``owner``, ``lasts_s``, and for
``mark`` the ``findings`` before the change. The answer is a JSON object: ``refused`` is the reason in one line, empty
if the act was done. Each act may be repeated.

A lease of another token is taken over only if it has expired and the node carries no mark of a drain: what a run
drained stays its own until that run, or a person, ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path("/var/lib/gpunode")
LEASE = "change.json"
MARK = "drained.json"
LOCK = ".change.lock"
WAIT_S = 10.0
"""Longer than any act of another controller takes, and shorter than the time of a node."""
UNREADABLE = {"token": "", "owner": "an unreadable file", "since": "?", "beat": 0, "lasts_s": 0}


def read(path: Path) -> dict[str, Any] | None:
    """Return a document; None if it is missing."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return UNREADABLE
    return document if isinstance(document, dict) else UNREADABLE


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document as a whole, on the disk."""
    draft = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(draft, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(json.dumps(document) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Write a folder to the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(number)
    os.close(number)


def answer(question: dict[str, Any], folder: Path = FOLDER, at: float | None = None) -> dict[str, str]:
    """Return the answer to one question; ``at`` is the time."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / LOCK, flags, 0o600)
    try:
        if not locked(lock):
            return {"refused": f"another change has held {folder / LOCK} for {WAIT_S:g} s: see lslocks"}
        return {"refused": act(question, folder, time.time() if at is None else at)}
    finally:
        os.close(lock)


def locked(lock: int) -> bool:
    """Take the lock; return False if another process keeps it for ``WAIT_S``."""
    end = time.monotonic() + WAIT_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def act(question: dict[str, Any], folder: Path, at: float) -> str:
    """Do one act; return why it was refused."""
    lease, mark, op = read(folder / LEASE), read(folder / MARK), question["op"]
    if op == "free":
        for name, document in ((MARK, mark), (LEASE, lease)):
            if document is not None and document.get("token") == question["token"]:
                (folder / name).unlink()
        sync(folder)
        return ""
    if lease is not None and lease.get("token") != question["token"]:
        # A clock that was set back makes the time negative; then the lease has not expired.
        silent_s = at - float(lease.get("beat") or 0)
        expired = silent_s > float(lease.get("lasts_s") or 0) and bool(lease.get("token"))
        if op != "take" or not expired or mark is not None:
            silent = f", without a sign of life for {silent_s / 60:.0f} minutes" if expired else ""
            return f"held by {str(lease.get('owner'))[:200]} since {str(lease.get('since'))[:40]}{silent}"
        lease = None
    foreign = mark is not None and mark.get("token") != question["token"]
    if foreign:
        return f"drained by a playbook ({folder / MARK})"
    if lease is None and op == "mark":
        return f"the lease is gone: somebody removed {folder / LEASE}"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    new = {name: question[name] for name in ("token", "owner", "lasts_s")}
    write(folder / LEASE, {"since": since, **(lease or {}), **new, "beat": int(at)})
    if op == "mark" and mark is None:
        findings = question["findings"]
        write(folder / MARK, {"since": since, "findings": findings, "token": question["token"]})
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.loads(sys.argv[1]))))
