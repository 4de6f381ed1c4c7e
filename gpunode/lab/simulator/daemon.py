"""What the simulated daemons share: going to the background, pid files, ending when told."""

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
    """Run in the background: ``start``, wait for SIGTERM or SIGINT, ``stop``. The starter's exit code: 0 once it runs.

    The starter returns when ``start`` is through and the pid file is there, as systemd's Type=forking wants it.
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
    """The same without leaving the terminal."""
    start()
    _hold_signals()
    write_pid(pid_file)
    wait()
    stop()
    if pid_file:
        pid_file.unlink(missing_ok=True)
    return 0


def write_pid(pid_file: Path | None) -> None:
    """This process's number, in one step."""
    if pid_file:
        state.write_text(pid_file, f"{os.getpid()}\n")


def wait() -> None:
    """Until SIGTERM or SIGINT."""
    _hold_signals()
    signal.sigwait(_ENDING)


def _hold_signals() -> None:
    """Keep them for ``wait``: one that comes as soon as the pid is known must not skip ``stop``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def is_running(pid: object) -> bool:
    """True where there is such a process."""
    return isinstance(pid, int) and (state.ROOT / f"proc/{pid}").exists()


def log_line(file: Path, text: str) -> None:
    """Add a line to a daemon's log as fabric manager stamps its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("[%b %d %Y %H:%M:%S]")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{stamp} {text}\n")


def say(tool: str, text: str) -> None:
    """To the terminal, and to the system's log under the tool's name."""
    sys.stderr.write(text + "\n")
    if str(state.ROOT) == "/" and not sys.stderr.isatty():
        return  # the journal has it from stderr
    if str(state.ROOT) == "/":
        syslog.openlog(tool, syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_ERR, text)
