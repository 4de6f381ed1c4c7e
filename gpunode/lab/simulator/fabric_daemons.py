"""The daemons of an NVLink fabric: ``nv-fabricmanager``, the subnet manager ``nvlsm``, ``nvidia-imex``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import daemon, state
from .node import NodeSnapshot, package_release

FABRIC_MANAGER = "nv-fabricmanager"
CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
FABRIC_MANAGER_OPTIONS = ("-c", "--config", "-p", "--pid-file", "-g", "--fm-sm-mgmt-port-guid", "-n", "--fabric-name")


def fabric_manager(argv: list[str]) -> int:
    """Start the fabric manager, which configures the NVSwitches or prints why it cannot; return its exit code."""
    if "-v" in argv or "--version" in argv:
        sys.stdout.write(f"Fabric Manager version is : {package_release() or 'unknown'}\n")
        return 0
    options: dict[str, str] = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        if word not in FABRIC_MANAGER_OPTIONS or not left:
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
        daemon.report(FABRIC_MANAGER, why)
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


NVLSM = "nvlsm"
NVLSM_MODULES = ("ib_umad", "mlx5_core")
NVLSM_OPTIONS = ("--guid", "-g", "--pid_file", "--config", "-F", "--log_file", "-f")


def nvlsm(argv: list[str]) -> int:
    """Start the subnet manager of NVLink 5 switches, as fabric manager's script does; return its exit code."""
    if "--version" in argv:
        sys.stdout.write(f"NVLSM {package_release() or 'unknown'}\n")
        return 0
    options: dict[str, str] = {}
    background = False
    left = list(argv)
    while left:
        word = left.pop(0)
        if word in NVLSM_OPTIONS and left:
            options[word] = left.pop(0)
        elif word in ("-B", "--daemon"):
            background = True
        else:
            sys.stderr.write(f"nvlsm: unrecognized option '{word}'\n")
            return 1
    node = NodeSnapshot()
    loaded = node.running.get("modules") or []
    missing = [name for name in NVLSM_MODULES if name not in loaded]
    if missing or "nvlsm" not in node.services:
        why = f"module {missing[0]} is not loaded" if missing else "no NVLink 5 switch"
        daemon.report(NVLSM, f"Error from osm_opensm_bind (0x2A): {why}")
        daemon.report(NVLSM, "Perhaps another instance of NVLSM is already running or the HCA is not there")
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


IMEX = "nvidia-imex"
IMEX_CONFIG = "/etc/nvidia-imex/config.cfg"
IMEX_PID_FILE = "/var/run/nvidia-imex/nvidia-imex.pid"


def imex(argv: list[str]) -> int:
    """Start the IMEX daemon: memory shared between the nodes of a rack; return its exit code."""
    if "-v" in argv or "--version" in argv:
        sys.stdout.write(f"IMEX version is: {package_release() or 'unknown'}\n")
        return 0
    name = argv[argv.index("-c") + 1] if "-c" in argv[:-1] else IMEX_CONFIG
    config = settings(state.path(name))
    if config is None:
        sys.stderr.write(f"failed to open/read config file {name}\n")
        return 1
    log = state.path(config.get("LOG_FILE_NAME") or "/var/log/nvidia-imex.log")
    why = imex_refusal(NodeSnapshot(), package_release())
    if why:
        daemon.report(IMEX, why)
        daemon.log_line(log, f"[ERROR] {why}")
        return 1

    def start() -> None:
        daemon.log_line(log, f"[INFO] IMEX version {package_release()} is running, pid {os.getpid()}")

    def stop() -> None:
        daemon.log_line(log, "[INFO] IMEX is stopping")

    return (daemon.foreground if config.get("DAEMONIZE") == "0" else daemon.fork)(
        state.path(IMEX_PID_FILE), start, stop
    )


def imex_refusal(node: NodeSnapshot, release: str | None) -> str | None:
    """Return why IMEX does not start on this node; None if it starts."""
    if node.release is None:
        return "Unable to load the NVIDIA driver: the NVIDIA kernel module is not loaded"
    if release != node.release:
        return f"IMEX version {release} does not match with driver version {node.release}"
    return None
