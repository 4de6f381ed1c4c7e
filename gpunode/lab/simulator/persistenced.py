"""``nvidia-persistenced``: keeps the GPUs initialised, and their persistence mode on, while it runs."""

from __future__ import annotations

import os
import pwd
import sys

from . import daemons, smi_settings, state
from .node import NodeSnapshot, package_release

TOOL = "nvidia-persistenced"
PID_FILE = "/var/run/nvidia-persistenced/nvidia-persistenced.pid"
WITH_VALUE = ("-u", "--user", "-g", "--group", "-n", "--nvidia-cfg-path")
SWITCHES = (
    "-v", "--verbose", "-p", "--persistence-mode", "-P", "--no-persistence-mode", "-U", "--uvm-persistence-mode",
    "-d", "--debug",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Start the daemon; return its starter's exit code."""
    if "-V" in argv or "--version" in argv:
        sys.stdout.write(f"nvidia-persistenced:  version {package_release() or 'unknown'}\n")
        return 0
    persistence = True
    left = list(argv)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if option in WITH_VALUE:
            value = value if equals else left.pop(0) if left else ""
            if option in ("-u", "--user") and not _is_user(value):
                return _failed(f"Failed to find user ID of user '{value}': Success")
        elif option in ("-P", "--no-persistence-mode"):
            persistence = False
        elif option not in SWITCHES:
            sys.stderr.write(f"{TOOL}: Invalid argument: '{word}'\n")
            return 1
    return _start(persistence)


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _failed(why: str) -> int:
    daemons.report(TOOL, why)
    daemons.report(TOOL, "PID file unlocked.")
    sys.stderr.write("nvidia-persistenced failed to initialize. Check syslog for more details.\n")
    return 1


def _start(persistence: bool) -> int:
    node = NodeSnapshot()
    if daemons.is_running(node.running.get("persistenced")):
        return _failed("Failed to lock PID file: Resource temporarily unavailable")
    if node.release is None or not node.gpus:
        return _failed(
            "Failed to query NVIDIA devices. Please ensure that the NVIDIA device files (/dev/nvidia*) exist, and that "
            "user 0 has read and write permissions for those files."
        )

    def start() -> None:
        _set(os.getpid(), persistence)

    def stop() -> None:
        _set(None, False)

    return daemons.fork(state.path(PID_FILE), start, stop)


def _set(pid: int | None, persistence: bool) -> None:
    with state.change() as (_, running):
        running["persistenced"] = pid
        for index, gpu in running.get("gpus", {}).items() if running.get("module") else ():
            gpu["persistence"] = persistence
            used = any(str(entry.get("gpu")) == index for entry in running.get("processes") or ())
            if not persistence and not used:
                smi_settings.forget(gpu)
