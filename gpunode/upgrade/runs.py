"""The runs on this controller: where they are, who is at work on them, and which can be taken back."""

import fcntl
import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpunode.change.journal import Journal, runs
from gpunode.errors import UsageError
from gpunode.history.store import HistoryError, state_folder
from gpunode.text import now
from gpunode.whole import make_private_folder

LEASE = "lease"
"""File in the folder of the runs, locked by the process that is at work on one of them."""
ROLLBACK = "--run "
"""Begin of the word of a rollback's command that names the run."""


def runs_folder() -> Path:
    """Return the folder of the runs. Raises UsageError."""
    try:
        return state_folder() / "upgrades"
    except HistoryError as err:
        raise UsageError(str(err)) from None


def owner() -> str:
    """Return who runs this, for leases and messages."""
    return f"{getpass.getuser()}@{socket.gethostname()} (process {os.getpid()})"


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lease of the controller; the kernel ends it with the process. Raises UsageError if another has it."""
    make_private_folder(folder)
    number = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(number, 1000).decode(errors="replace").strip()
            raise UsageError(
                f"another gpunode upgrade is in progress: {holder or 'unknown'}; wait until it ends"
            ) from None
        os.ftruncate(number, 0)
        os.write(number, f"{owner()} since {now()}\n".encode())
        yield
    finally:
        os.close(number)


def in_progress(folder: Path) -> bool:
    """Return whether a process is at work on the runs in a folder."""
    try:
        number = os.open(folder / LEASE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(number)
    return False


def goes_back_to(journal: Journal) -> str:
    """Return the run that a rollback takes back; empty for an upgrade."""
    words = (word for word in journal.record.command if word.startswith(ROLLBACK))
    return next(words, "").removeprefix(ROLLBACK)


def upgrades(folder: Path) -> list[Journal]:
    """Return the runs that can be taken back, the latest first."""
    return [journal for journal in runs(folder) if not goes_back_to(journal) and journal.record.changed]


def run_to_take_back(folder: Path, run_id: str | None) -> Journal:
    """Return the run with that id; without an id, that of an unfinished rollback, or else the latest.

    Raises UsageError.
    """
    begun = {goes_back_to(journal) for journal in runs(folder) if journal.record.finished_at is None} - {""}
    journals = upgrades(folder)
    # The nodes that its run held belong to an unfinished rollback.
    unlisted = begun - {journal.record.run for journal in journals}
    journals += [journal for journal in runs(folder) if journal.record.run in unlisted]
    if not journals:
        raise UsageError(f"{folder}: no run of gpunode upgrade changed a node: there is nothing to take back")
    for journal in journals:
        if journal.record.run == run_id or (run_id is None and (journal.record.run in begun or not begun)):
            return journal
    raise UsageError(f"--run {run_id}: not a run that changed a node; gpunode rollback --list lists those")
