"""The driver's device files and their numbers. No driver serves them: opening one for reading fails."""

from __future__ import annotations

import os
import stat
from typing import Any

from . import state

NVIDIA = 195
UVM = 510
NVSWITCH = 509
CAPS = 508
INFINIBAND = 231
_FIRST_VERBS = 192
"""Of /dev/infiniband/uverbs0; umad0 is minor 0 (drivers/infiniband/core, uverbs_main.c and user_mad.c)."""
_CONTROL = 255
_MODESET = 254
NUMBERS = {
    "nvidia": NVIDIA,
    "nvidia-uvm": UVM,
    "nvidia-nvswitch": NVSWITCH,
    "nvidia-caps": CAPS,
    "infiniband_mad": INFINIBAND,
    "infiniband_verbs": INFINIBAND,
}
"""Names and major numbers, as in /proc/devices."""


def nodes(hardware: dict[str, Any], modules: set[str]) -> list[tuple[str, int, int, int]]:
    """Return (path, major, minor, mode) of the files that belong to these loaded modules."""
    files = []
    if "nvidia" in modules:
        files += [(f"/dev/nvidia{gpu['index']}", NVIDIA, gpu["index"], 0o666) for gpu in hardware["gpus"]]
        files += [("/dev/nvidiactl", NVIDIA, _CONTROL, 0o666)]
        files += [
            (f"/dev/nvidia-caps/nvidia-cap{minor}", CAPS, minor, mode) for minor, mode in ((1, 0o400), (2, 0o444))
        ]
        if hardware["nvswitches"]:
            files += [("/dev/nvidia-nvswitchctl", NVSWITCH, _CONTROL, 0o666)]
            files += [(f"/dev/nvidia-nvswitch{at}", NVSWITCH, at, 0o666) for at in range(len(hardware["nvswitches"]))]
    if "nvidia_modeset" in modules:
        files += [("/dev/nvidia-modeset", NVIDIA, _MODESET, 0o666)]
    if "nvidia_uvm" in modules:
        files += [("/dev/nvidia-uvm", UVM, 0, 0o666), ("/dev/nvidia-uvm-tools", UVM, 1, 0o666)]
    return files


def of_adapters(hardware: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """Return (path, major, minor, mode) of the files of RDMA adapters, which exist from the boot on."""
    numbers = range(len(hardware["nics"]))
    mads = [(f"/dev/infiniband/umad{at}", INFINIBAND, at, 0o600) for at in numbers]
    return mads + [(f"/dev/infiniband/uverbs{at}", INFINIBAND, _FIRST_VERBS + at, 0o666) for at in numbers]


def make(hardware: dict[str, Any], modules: set[str]) -> None:
    """Create the missing files. Those of unloaded modules stay, as the real ones do until the reboot."""
    for name, major, minor, mode in nodes(hardware, modules) + of_adapters(hardware):
        file = state.path(name)
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(str(file), stat.S_IFCHR | mode, os.makedev(major, minor))
        file.chmod(mode)


def holders() -> dict[int, list[str]]:
    """Return process number to the device files that the process holds open."""
    files_by_process: dict[int, list[str]] = {}
    for process in state.path("/proc").glob("[0-9]*"):
        try:
            targets = {str(entry.readlink()) for entry in (process / "fd").iterdir()}
        except OSError:
            continue  # It ended, or closed the file, in the meantime.
        held = sorted(target for target in targets if target.startswith("/dev/nvidia"))
        if held:
            files_by_process[int(process.name)] = held
    return files_by_process


def hold(name: str) -> int:
    """Open a device file so that other programs see it in use; return the descriptor."""
    return os.open(str(state.path(name)), os.O_PATH | os.O_CLOEXEC)
