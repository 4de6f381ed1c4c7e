"""What faults begin and revert on the node itself: a process that holds a GPU, installed files of another release."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from . import kernel, state
from .state import FaultError

START_LIMIT_S = 5.0
_NAME = "python3"


def hold_gpu(fault: dict[str, Any]) -> None:
    """Start a process that holds a GPU, as a training job does, without computing anything, and record it.

    It ends when the fault is healed, or with the reboot.
    """
    index = int(re.sub(r"\D", "", fault["component"]))
    if not state.path(f"/dev/nvidia{index}").exists():
        raise FaultError(f"gpu-busy: /dev/nvidia{index} is not there: install and load a driver first")
    try:
        user = pwd.getpwnam(fault["user"])
    except KeyError:
        raise FaultError(f"gpu-busy: user={fault['user']}: the node has no such user") from None
    reading, writing = os.pipe()
    if os.fork() == 0:
        _hold(index, user, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        fault["pid"] = int(pipe.readline())
    os.wait()
    entry = {"gpu": index, "pid": fault["pid"], "name": _NAME, "memory_mib": fault["memory_mib"]}
    with state.change() as (_, running):
        running.setdefault("processes", []).append(entry)


def _hold(index: int, user: pwd.struct_passwd, descriptor: int) -> None:
    """Detach, in the child, and hold the device files until killed."""
    os.setsid()
    if pid := os.fork():
        os.write(descriptor, f"{pid}\n".encode())
        os._exit(0)
    os.close(descriptor)
    empty = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(empty, number)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    held = [f"/dev/nvidia{index}", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    descriptors = [kernel.hold_device(name) for name in held if state.path(name).exists()]
    os.chdir("/")
    # A program of its own, so that its name and command line are a job's and not this tool's.
    for number in descriptors:
        os.set_inheritable(number, True)
    os.execv("/usr/bin/python3", [_NAME, "-I", "-S", "-c", "import signal; signal.pause()"])  # noqa: S606


def release_gpu(fault: dict[str, Any]) -> None:
    """End the process."""
    pid = fault["pid"]
    if any(name.startswith("/dev/nvidia") for name in kernel.device_holders().get(pid, [])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + START_LIMIT_S
        while pid in kernel.device_holders() and time.monotonic() < deadline:
            time.sleep(0.05)
    with state.change() as (_, running):
        running["processes"] = [entry for entry in running.get("processes", []) if entry["pid"] != pid]


_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
_SAVED = "/var/lib/gpunode-lab/nv-fabricmanager"
_LIMIT_S = 60
_VERSION = re.compile(r"GPUNODE_LAB_PACKAGE_VERSION=(\S+)")


def _run(*argv: str) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)


def _next(release: str) -> str:
    """Return a release after the given one that does not exist."""
    head, _, last = release.rpartition(".")
    return f"{head}.{int(last) + 1:0{len(last)}d}"


def add_library(fault: dict[str, Any]) -> None:
    """Install the NVML library once more under a later release's name; ldconfig links ``.so.1`` to it."""
    libraries = sorted(state.path(_LIBRARIES).glob("libnvidia-ml.so.*.*"))
    if not libraries:
        raise FaultError("library-mismatch: no driver's library is installed: install a driver first")
    name = "libnvidia-ml.so." + _next(libraries[-1].name.partition(".so.")[2])
    shutil.copyfile(libraries[-1], libraries[-1].with_name(name))
    fault["file"] = f"{_LIBRARIES}/{name}"
    _run("ldconfig")


def remove_library(fault: dict[str, Any]) -> None:
    """Remove the library."""
    state.path(fault["file"]).unlink(missing_ok=True)
    _run("ldconfig")


def swap_fabric_manager(fault: dict[str, Any]) -> None:
    """Replace the fabric manager's program by one of another release, and restart its unit."""
    program = state.path(_FABRIC_MANAGER)
    text = program.read_text(encoding="utf-8") if program.exists() else ""
    match = _VERSION.search(text)
    if not match:
        raise FaultError("fabric-manager-version: no simulated fabric manager is installed: install it first")
    other = fault["version"] or _next(match[1])
    if other == match[1]:
        raise FaultError(f"fabric-manager-version: version={other} is the one that is installed")
    shutil.copy2(program, state.path(_SAVED))
    fault["version"] = other
    _replace(program, text.replace(match[0], f"GPUNODE_LAB_PACKAGE_VERSION={other}"))
    _run("systemctl", "try-restart", "nvidia-fabricmanager.service")


def restore_fabric_manager(fault: dict[str, Any]) -> None:
    """Restore the program, unless another package has been installed in the meantime."""
    program, saved = state.path(_FABRIC_MANAGER), state.path(_SAVED)
    if program.exists() and fault["version"] in program.read_text(encoding="utf-8"):
        _replace(program, saved.read_text(encoding="utf-8"))
    saved.unlink(missing_ok=True)
    _run("systemctl", "reset-failed", "nvidia-fabricmanager.service")
    _run("systemctl", "start", "nvidia-fabricmanager.service")


def _replace(program: Path, text: str) -> None:
    new = program.with_name(f".{program.name}.new")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o755)
    new.replace(program)
