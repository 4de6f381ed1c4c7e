"""``nv-fabricmanager``: configures the NVSwitches, or prints why it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import daemon, state
from .node import NodeSnapshot, package_release

TOOL = "nv-fabricmanager"
CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
WITH_VALUE = ("-c", "--config", "-p", "--pid-file", "-g", "--fm-sm-mgmt-port-guid", "-n", "--fabric-name")


def main(argv: list[str]) -> int:
    """Start the fabric manager; return its exit code."""
    if "-v" in argv or "--version" in argv:
        sys.stdout.write(f"Fabric Manager version is : {package_release() or 'unknown'}\n")
        return 0
    options: dict[str, str] = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        if word not in WITH_VALUE or not left:
            sys.stderr.write(f"nv-fabricmanager: invalid option '{word}'\n")
            return 1
        options[word.lstrip("-")[0]] = left.pop(0)
    return _start(options)


def _start(options: dict[str, str]) -> int:
    config = settings(state.path(options.get("c", CONFIG)))
    if config is None:
        sys.stderr.write(f"failed to open/read config file {options.get('c', CONFIG)}\n")
        return 1
    log = state.path(config.get("LOG_FILE_NAME") or "/var/log/fabricmanager.log")
    node = NodeSnapshot()
    why = refusal(node, package_release())
    if why:
        daemon.report(TOOL, why)
        daemon.log_line(log, f"[ERROR] [tid {os.getpid()}] {why}")
        return 1
    pid_file = state.path(options["p"]) if "p" in options else None

    def start() -> None:
        daemon.log_line(log, f"[INFO] [tid {os.getpid()}] Fabric Manager version is : {package_release()}")
        completed = not node.has_fault("fabric-not-completed")
        with state.change() as (_, running):
            running["fabric_manager"] = os.getpid()
            running["fabric"] = dict(COMPLETED) if completed else {"state": "In Progress"}
        if completed:
            daemon.log_line(log, f"[INFO] [tid {os.getpid()}] {CONFIGURED}")

    def stop() -> None:
        daemon.log_line(log, f"[INFO] [tid {os.getpid()}] fabric manager is stopping")
        with state.change() as (_, running):
            running["fabric_manager"] = None

    sys.stderr.write(f"Connected to 1 node.\n{CONFIGURED}\n")
    start_it = daemon.foreground if config.get("DAEMONIZE") == "0" else daemon.fork
    return start_it(pid_file, start, stop)


COMPLETED = {"state": "Completed", "status": "Success"}
CONFIGURED = (
    "Successfully configured all the available NVSwitches to route GPU NVLink traffic. NVLink Peer-to-Peer support "
    "will be enabled once the GPUs are successfully registered with the NVLink fabric."
)


def refusal(node: NodeSnapshot, release: str | None) -> str | None:
    """Return why this fabric manager does not start on this node, in its own message; None if it starts."""
    if node.release is None:
        return (
            "failed to allocate handle (client) to NVIDIA GPU driver with error:NVIDIA kernel module is not loaded "
            "[NV_ERR_OPERATING_SYSTEM]"
        )
    if release != node.release:
        return (
            f"fabric manager NVIDIA GPU driver interface version {release} don't match with driver version "
            f"{node.release}. Please update with matching NVIDIA driver package."
        )
    if "fabric-manager" not in node.services or not _sees_switches(node):
        return (
            "request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to "
            "do [NV_WARN_NOTHING_TO_DO]"
        )
    return None


def _sees_switches(node: NodeSnapshot) -> bool:
    """Return whether NVSwitches are on the PCI bus: up to NVLink 4; later ones are behind the subnet manager."""
    if "nvlsm" in node.services:
        return daemon.is_running(node.running.get("nvlsm"))
    return bool(node.hardware.get("nvswitches"))


def settings(file: Path) -> dict[str, str] | None:
    """Return the ``NAME=VALUE`` lines of a configuration; None if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}
