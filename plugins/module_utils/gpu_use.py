"""List the processes that use the GPUs and the kernel modules of the driver on this node now."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

FAMILY = ("nvidia_peermem", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")
"""The driver's own modules, in the order in which they are unloaded."""
# The kernel truncates process names to 15 characters.
DAEMONS = ("nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "nvidia-imex", "nvlsm", "dcgm-exporter")
DEVICE = re.compile(r"/dev/nvidia")
DISPLAY = re.compile(r"/dev/dri/")


def holders(proc: str = "/proc") -> list[dict[str, Any]]:
    """Return the processes with an open driver device: ``pid``, ``name``, ``unit`` (empty: none), ``devices``."""
    rows = []
    for process in sorted(Path(proc).glob("[0-9]*"), key=lambda path: int(path.name)):
        devices = set()
        try:
            for entry in (process / "fd").iterdir():
                target = _link(entry)
                if DEVICE.match(target) or DISPLAY.match(target):
                    devices.add(target)
        except OSError:
            continue  # The process ended.
        if devices:
            row = {"pid": int(process.name), "name": _text(process / "comm").strip() or "?"}
            rows.append({**row, "unit": unit_of(_text(process / "cgroup")), "devices": sorted(devices)})
    return rows


def computing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the processes that compute: CUDA's memory device is open, and they are not daemons of NVIDIA."""
    return [row for row in rows if row["name"] not in DAEMONS and any("nvidia-uvm" in path for path in row["devices"])]


def title(holder: dict[str, Any]) -> str:
    """Return the name of a process for messages."""
    unit = f", {holder['unit']}" if holder["unit"] else ""
    return f"{holder['name']} (pid {holder['pid']}{unit})"


def unit_of(cgroup: str) -> str:
    """Return the systemd service of a process from its ``/proc/PID/cgroup``; empty without one."""
    services = re.findall(r"/([^/\n]+\.service)(?=/|$)", cgroup, re.MULTILINE)
    return services[-1] if services else ""


def modules(text: str) -> dict[str, tuple[int, list[str]]]:
    """Parse the output of ``lsmod``; return name to (number of users, modules among them)."""
    loaded = {}
    for line in text.splitlines():
        name, *numbers = line.split()[:4] or [""]
        if len(numbers) >= 2 and numbers[0].isdigit() and numbers[1].isdigit():
            users = numbers[2].split(",") if len(numbers) > 2 else []
            loaded[name] = (int(numbers[1]), [user for user in users if user and user != "-"])
    return loaded


def obstacles(loaded: dict[str, tuple[int, list[str]]], rows: list[dict[str, Any]], units: list[str]) -> list[str]:
    """Return why the driver's modules cannot be unloaded after these units were stopped, one line each."""
    lines = []
    above = {user for name in FAMILY for user in loaded.get(name, (0, []))[1]} - set(FAMILY)
    lines += [f"module {name} uses the driver" for name in sorted(above)]
    drm = loaded.get("nvidia_drm", (0, []))[0] > 0
    holding = [holder for holder in rows if any(DEVICE.match(path) for path in holder["devices"]) or drm]
    foreign = [holder for holder in holding if holder["unit"] not in units]
    lines += [f"{title(holder)} holds {holder['devices'][0]}" for holder in foreign]
    for name in FAMILY:
        count, users = loaded.get(name, (0, []))
        # Persistence mode counts as a user without a process; it ends when its daemon is stopped.
        if count > len(users) and not holding and not units:
            lines.append(f"module {name} has {count - len(users)} users without a visible process")
    return lines


def _link(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - Path.readlink is younger than the Python of some nodes
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:65536]
    except OSError:
        return ""
