"""Short local helpers (ansible-inventory, ssh -G …): a time limit, a process group, no shell."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpunode.errors import UndeterminedError, UsageError


@dataclass(frozen=True)
class Completed:
    """How a program ended and what it wrote."""

    rc: int
    stdout: str
    stderr: str


def kill_group(process: "subprocess.Popen[Any]", number: int = signal.SIGKILL) -> None:
    """Send a signal to the whole group of a process that leads one; a group that has ended, or is root's, is not an
    error.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill a process, its group and all its descendants: Ansible's workers lead sessions of their own."""
    doomed = descendants(process.pid)
    kill_group(process)
    for pid in doomed:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    # Not by a pattern of pathlib's: it raises if a process ends between listing and reading.
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with suppress(OSError):
                # pid (name) state ppid …; a name may contain spaces and brackets.
                parent = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    pids = list(children.get(root, ()))
    for pid in pids:
        pids.extend(children.get(pid, ()))
    return pids


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    grace_s: float = 0.0,
) -> Completed:
    """Run a program to its end and return its output; on an exception nothing of it is left behind.

    ``grace_s``: time to end what it started elsewhere, before it is killed.

    Lines of the output end as the program ended them: a carriage return in it starts no line.
    Raises UsageError if there is no such program, UndeterminedError if it exceeds ``timeout_s``.
    """
    source: int | IO[bytes] = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UsageError(f"{argv[0]} is not installed on this machine") from None
    try:
        stdout, stderr = process.communicate(None if stdin is None else stdin.encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UndeterminedError(f"{argv[0]} did not end within {timeout_s:.0f} s") from None
    finally:
        if process.poll() is None and grace_s:
            kill_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        if process.poll() is None:
            kill_group(process)
            process.wait()
    return Completed(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
