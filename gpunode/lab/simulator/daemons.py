"""Simulated daemons: forking to the background, pid files, ending on a signal; and those of an NVLink fabric:
``nv-fabricmanager``, the subnet manager ``nvlsm``, ``nvidia-imex``.
"""

from __future__ import annotations

import os
import signal
import sys
import syslog
import time
from collections.abc import Callable
from pathlib import Path

from . import state
from .node import NodeSnapshot, package_release

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
        report(FABRIC_MANAGER, why)
        log_line(log, f"[ERROR] [tid {os.getpid()}] {why}")
        return 1
    pid_file = state.path(options["p"]) if "p" in options else None

    def start() -> None:
        log_line(log, f"[INFO] [tid {os.getpid()}] Fabric Manager version is : {package_release()}")
        completed = not node.has_fault("fabric-not-completed")
        with state.change() as (_, running):
            running["fabric_manager"] = os.getpid()
            running["fabric"] = dict(COMPLETED) if completed else {"state": "In Progress"}
        if completed:
            log_line(log, f"[INFO] [tid {os.getpid()}] {CONFIGURED}")

    def stop() -> None:
        log_line(log, f"[INFO] [tid {os.getpid()}] fabric manager is stopping")
        with state.change() as (_, running):
            running["fabric_manager"] = None

    sys.stderr.write(f"Connected to 1 node.\n{CONFIGURED}\n")
    start_it = foreground if config.get("DAEMONIZE") == "0" else fork
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
        return is_running(node.running.get("nvlsm"))
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
        report(NVLSM, f"Error from osm_opensm_bind (0x2A): {why}")
        report(NVLSM, "Perhaps another instance of NVLSM is already running or the HCA is not there")
        return 1

    def start() -> None:
        _set(os.getpid())

    def stop() -> None:
        _set(None)

    pid_file = state.path(options["--pid_file"]) if "--pid_file" in options else None
    return (fork if background else foreground)(pid_file, start, stop)


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
        report(IMEX, why)
        log_line(log, f"[ERROR] {why}")
        return 1

    def start() -> None:
        log_line(log, f"[INFO] IMEX version {package_release()} is running, pid {os.getpid()}")

    def stop() -> None:
        log_line(log, "[INFO] IMEX is stopping")

    return (foreground if config.get("DAEMONIZE") == "0" else fork)(state.path(IMEX_PID_FILE), start, stop)


def imex_refusal(node: NodeSnapshot, release: str | None) -> str | None:
    """Return why IMEX does not start on this node; None if it starts."""
    if node.release is None:
        return "Unable to load the NVIDIA driver: the NVIDIA kernel module is not loaded"
    if release != node.release:
        return f"IMEX version {release} does not match with driver version {node.release}"
    return None
