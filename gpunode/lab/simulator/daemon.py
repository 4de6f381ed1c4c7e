"""Shared parts of the simulated daemons: forking to the background, pid files, ending on a signal."""

from __future__ import annotations

import os
import signal
import sys
import syslog
import time
from collections.abc import Callable
from pathlib import Path

from . import state

_DONE = b"1"
_ENDING = {signal.SIGTERM, signal.SIGINT}


def fork(pid_file: Path | None, start: Callable[[], None], stop: Callable[[], None]) -> int:
    """Run in the background: ``start``, wait for SIGTERM or SIGINT, ``stop``. Return 0 in the starter once it runs.

    The starter returns when ``start`` has finished and the pid file exists, as systemd's Type=forking requires.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    if os.fork():
        os.close(writer)
        os.wait()
        with os.fdopen(reader, "rb") as stream:
            return 0 if stream.read(1) == _DONE else 1
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    code = 1
    try:
        code = _background(pid_file, start, stop, writer)
    finally:
        os._exit(code)


def _background(pid_file: Path | None, start: Callable[[], None], stop: Callable[[], None], writer: int) -> int:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir("/")
    start()
    _hold_signals()
    write_pid(pid_file)
    os.write(writer, _DONE)
    os.close(writer)
    wait()
    stop()
    if pid_file:
        pid_file.unlink(missing_ok=True)
    return 0


def foreground(pid_file: Path | None, start: Callable[[], None], stop: Callable[[], None]) -> int:
    """Run in the foreground: ``start``, wait, ``stop``. Return the exit code."""
    start()
    _hold_signals()
    write_pid(pid_file)
    wait()
    stop()
    if pid_file:
        pid_file.unlink(missing_ok=True)
    return 0


def write_pid(pid_file: Path | None) -> None:
    """Write this process's number, in one step."""
    if pid_file:
        state.write_text(pid_file, f"{os.getpid()}\n")


def wait() -> None:
    """Wait for SIGTERM or SIGINT."""
    _hold_signals()
    signal.sigwait(_ENDING)


def _hold_signals() -> None:
    """Block them until ``wait``: one that comes as soon as the pid is known must not skip ``stop``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def is_running(pid: object) -> bool:
    """Return whether such a process exists."""
    return isinstance(pid, int) and (state.ROOT / f"proc/{pid}").exists()


def log_line(file: Path, text: str) -> None:
    """Append a line to a daemon's log, with a timestamp in fabric manager's format."""
    file.parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("[%b %d %Y %H:%M:%S]")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{stamp} {text}\n")


def report(tool: str, text: str) -> None:
    """Print to the terminal, and to the system's log under the tool's name."""
    sys.stderr.write(text + "\n")
    if str(state.ROOT) == "/" and not sys.stderr.isatty():
        return  # stderr goes to the journal
    if str(state.ROOT) == "/":
        syslog.openlog(tool, syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_ERR, text)
