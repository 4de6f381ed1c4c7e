"""A process that holds a GPU, as a training job does, without computing anything."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import time
from typing import Any

from . import devices, state
from .state import FaultError

START_LIMIT_S = 5.0
_NAME = "python3"


def begin(fault: dict[str, Any]) -> None:
    """Start the process and record it; it ends when the fault is healed, or with the reboot."""
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
    descriptors = [devices.hold(name) for name in held if state.path(name).exists()]
    os.chdir("/")
    # A program of its own, so that its name and command line are a job's and not this tool's.
    for number in descriptors:
        os.set_inheritable(number, True)
    os.execv("/usr/bin/python3", [_NAME, "-I", "-S", "-c", "import signal; signal.pause()"])  # noqa: S606


def end(fault: dict[str, Any]) -> None:
    """End the process."""
    pid = fault["pid"]
    if any(name.startswith("/dev/nvidia") for name in devices.holders().get(pid, [])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + START_LIMIT_S
        while pid in devices.holders() and time.monotonic() < deadline:
            time.sleep(0.05)
    with state.change() as (_, running):
        running["processes"] = [entry for entry in running.get("processes", []) if entry["pid"] != pid]
