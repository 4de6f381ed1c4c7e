"""``nvidia-imex``: memory shared between the nodes of a rack."""

from __future__ import annotations

import os
import sys

from . import daemon, state
from .fabric_manager import settings
from .node import NodeSnapshot, package_release

TOOL = "nvidia-imex"
CONFIG = "/etc/nvidia-imex/config.cfg"
PID_FILE = "/var/run/nvidia-imex/nvidia-imex.pid"


def main(argv: list[str]) -> int:
    """Start the IMEX daemon; return its exit code."""
    if "-v" in argv or "--version" in argv:
        sys.stdout.write(f"IMEX version is: {package_release() or 'unknown'}\n")
        return 0
    name = argv[argv.index("-c") + 1] if "-c" in argv[:-1] else CONFIG
    config = settings(state.path(name))
    if config is None:
        sys.stderr.write(f"failed to open/read config file {name}\n")
        return 1
    log = state.path(config.get("LOG_FILE_NAME") or "/var/log/nvidia-imex.log")
    why = refusal(NodeSnapshot(), package_release())
    if why:
        daemon.report(TOOL, why)
        daemon.log_line(log, f"[ERROR] {why}")
        return 1

    def start() -> None:
        daemon.log_line(log, f"[INFO] IMEX version {package_release()} is running, pid {os.getpid()}")

    def stop() -> None:
        daemon.log_line(log, "[INFO] IMEX is stopping")

    return (daemon.foreground if config.get("DAEMONIZE") == "0" else daemon.fork)(state.path(PID_FILE), start, stop)


def refusal(node: NodeSnapshot, release: str | None) -> str | None:
    """Return why IMEX does not start on this node; None if it starts."""
    if node.release is None:
        return "Unable to load the NVIDIA driver: the NVIDIA kernel module is not loaded"
    if release != node.release:
        return f"IMEX version {release} does not match with driver version {node.release}"
    return None
