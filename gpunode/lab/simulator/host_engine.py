"""``nv-hostengine``: DCGM's daemon."""

from __future__ import annotations

import os
import sys

from . import daemon, state
from .node import NodeSnapshot, package_release

TOOL = "nv-hostengine"
PID_FILE = "/var/run/nvhostengine.pid"
WITH_VALUE = ("--service-account", "-b", "--bind-interface", "-p", "--port", "-d", "--domain-socket", "--pid", "-f")


def main(argv: list[str]) -> int:
    """Start, stop or print the version of the host engine; return its exit code."""
    if "--version" in argv or "-v" in argv:
        sys.stdout.write(f"Version : {package_release() or 'unknown'}\nBuild Type : Release\n")
        return 0
    if "-t" in argv or "--term" in argv:
        return _terminate()
    background = not {"-n", "--no-daemon"}.intersection(argv)
    if daemon.is_running(NodeSnapshot().running.get("host_engine")):
        sys.stderr.write("Host engine already running.\n")
        return 1
    file = argv[argv.index("--pid") + 1] if "--pid" in argv[:-1] else PID_FILE

    def start() -> None:
        _set(os.getpid())

    def stop() -> None:
        _set(None)

    sys.stdout.write("Started host engine version " + (package_release() or "unknown") + " using port number: 5555 \n")
    return (daemon.fork if background else daemon.foreground)(state.path(file), start, stop)


def _terminate() -> int:
    pid = NodeSnapshot().running.get("host_engine")
    if not isinstance(pid, int) or not daemon.is_running(pid):
        sys.stderr.write("Unable to terminate host engine, it may not be running.\n")
        return 1
    os.kill(pid, 15)
    sys.stdout.write("Host engine successfully terminated.\n")
    return 0


def _set(pid: int | None) -> None:
    with state.change() as (_, running):
        running["host_engine"] = pid
