"""Short local helpers (ansible-inventory, ssh -G …): limits of time and output, a process group, no shell."""

import errno
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.errors import UndeterminedError, UsageError

MOST_BYTES = 64 << 20
"""Limit of what a program prints, on stdout and stderr together."""


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


def run(  # noqa: PLR0913
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    grace_s: float = 0.0,
    most_bytes: int = MOST_BYTES,
) -> Completed:
    """Run a program to its end and return its output; on an exception nothing of it is left behind.

    ``grace_s``: time to end what it started elsewhere, before it is killed.

    Lines of the output end as the program ended them: a carriage return in it starts no line.
    Raises UsageError if the program cannot be started, UndeterminedError if it exceeds ``timeout_s`` or ``most_bytes``.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UsageError(f"{argv[0]} is not installed on this machine") from None
    except OSError as err:
        why = f"{argv[0]} cannot be started: {err.strerror}"
        if err.errno in (errno.EACCES, errno.ENOEXEC):
            raise UsageError(f"{why} (a program is executable, and a script begins with #!)") from None
        raise UndeterminedError(why) from None
    with process:
        try:
            stdout, stderr = _output(process, (stdin or "").encode(), time.monotonic() + timeout_s, most_bytes)
        except subprocess.TimeoutExpired:
            raise UndeterminedError(f"{argv[0]} did not end within {timeout_s:.0f} s") from None
        except OverflowError:
            raise UndeterminedError(f"{argv[0]} was stopped: it printed more than {most_bytes >> 20} MiB") from None
        finally:
            if process.poll() is None and grace_s:
                kill_group(process, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            if process.poll() is None:
                kill_group(process)
                process.wait()
    return Completed(process.returncode, stdout, stderr)


def _output(process: "subprocess.Popen[bytes]", stdin: bytes, end: float, most_bytes: int) -> tuple[str, str]:
    """Write to a program, and return its stdout and stderr. Raises TimeoutExpired after ``end``, and OverflowError."""
    parts = {stream: bytearray() for stream in (process.stdout, process.stderr) if stream is not None}
    rest = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ, stream)
        if process.stdin is not None:
            selector.register(process.stdin, selectors.EVENT_WRITE, process.stdin)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in ready:
                if key.data in parts:
                    data = os.read(key.fd, 1 << 16)
                    parts[key.data] += data
                    over = not data
                else:
                    over = True  # unless the program reads on: it need not
                    with suppress(BrokenPipeError):
                        # As much as a pipe takes without blocking.
                        rest = rest[os.write(key.fd, rest[: select.PIPE_BUF]) :]
                        over = not rest
                if over:
                    selector.unregister(key.data)
                    key.data.close()
            if sum(map(len, parts.values())) > most_bytes:
                raise OverflowError
    process.wait(max(0.0, end - time.monotonic()))
    stdout, stderr = (part.decode(errors="replace") for part in parts.values())
    return stdout, stderr
