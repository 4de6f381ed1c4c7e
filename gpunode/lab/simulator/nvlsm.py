"""``nvlsm``: the subnet manager of NVLink 5 switches, started by fabric manager's script."""

from __future__ import annotations

import os
import sys

from . import daemon, state
from .node import NodeSnapshot, package_release

TOOL = "nvlsm"
NEEDED = ("ib_umad", "mlx5_core")
WITH_VALUE = ("--guid", "-g", "--pid_file", "--config", "-F", "--log_file", "-f")


def main(argv: list[str]) -> int:
    """Start the subnet manager; return its exit code."""
    if "--version" in argv:
        sys.stdout.write(f"NVLSM {package_release() or 'unknown'}\n")
        return 0
    options: dict[str, str] = {}
    background = False
    left = list(argv)
    while left:
        word = left.pop(0)
        if word in WITH_VALUE and left:
            options[word] = left.pop(0)
        elif word in ("-B", "--daemon"):
            background = True
        else:
            sys.stderr.write(f"nvlsm: unrecognized option '{word}'\n")
            return 1
    node = NodeSnapshot()
    loaded = node.running.get("modules") or []
    missing = [name for name in NEEDED if name not in loaded]
    if missing or "nvlsm" not in node.services:
        why = f"module {missing[0]} is not loaded" if missing else "no NVLink 5 switch"
        daemon.report(TOOL, f"Error from osm_opensm_bind (0x2A): {why}")
        daemon.report(TOOL, "Perhaps another instance of NVLSM is already running or the HCA is not there")
        return 1

    def start() -> None:
        _set(os.getpid())

    def stop() -> None:
        _set(None)

    pid_file = state.path(options["--pid_file"]) if "--pid_file" in options else None
    return (daemon.fork if background else daemon.foreground)(pid_file, start, stop)


def _set(pid: int | None) -> None:
    with state.change() as (_, running):
        running["nvlsm"] = pid
