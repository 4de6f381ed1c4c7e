"""Boot of a node with simulated hardware: runs before systemd, in the role of firmware and kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from . import faults, kernel, modprobe, modules, nics, pci, smi_mig, state
from .node import NodeSnapshot

_LIBC = ctypes.CDLL(None, use_errno=True)
_READ_ONLY = 1
_REMOUNT = 32
_BIND = 4096
_REC = 16384


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2); raise OSError with the target's name."""
    words = [word.encode() for word in (source, target, kind, options)]
    if _LIBC.mount(words[0], words[1], words[2] or None, ctypes.c_ulong(flags), words[3] or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Show ``source`` at ``target``, which must exist."""
    mount(source, target, flags=_BIND | _REC)
    if read_only:
        mount("none", target, flags=_REMOUNT | _BIND | _READ_ONLY)


def with_additions(folder: str, stand_in: str, without: Container[str] = ()) -> None:
    """Make entries in a folder of sysfs possible: mount ``stand_in`` over it, which shows all that was in it.

    What is added to ``stand_in`` from then on appears in ``folder``. Entries named in ``without`` are left out.
    """
    Path(stand_in).mkdir(parents=True, exist_ok=True)
    for entry in _entries(folder):
        target = Path(stand_in, entry.name)
        if entry.name in without:
            continue
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            target.mkdir()
            mount(str(entry), str(target), flags=_BIND | _REC)
        else:
            target.touch()
            mount(str(entry), str(target), flags=_BIND)
    bind(stand_in, folder)


def overlay(folder: str, stand_in: str) -> None:
    """Make entries possible by an overlay: for folders with many entries that do not change."""
    upper, work = stand_in + ".added", stand_in + ".work"
    for each in (stand_in, upper, work):
        Path(each).mkdir(parents=True, exist_ok=True)
    mount("overlay", stand_in, "overlay", options=f"lowerdir={folder},upperdir={upper},workdir={work}")
    bind(stand_in, folder)


def _entries(folder: str) -> Iterable[Path]:
    entries: list[Path] = sorted(Path(folder).iterdir())
    return entries


REPORT = "/var/log/gpunode-lab-boot.log"
GPUS = "/var/log/gpunode-lab-gpus.log"
"""The settings of each GPU when the node came up, one line per GPU and boot."""
BIN = "/usr/lib/gpunode-lab/bin"
REAL = "/usr/lib/gpunode-lab/real"
DIVERTED = ("modprobe", "rmmod", "lsmod", "dmesg")
FOLDERS = ("/sbin", "/usr/sbin", "/bin", "/usr/bin")
_DPKG_LIMIT_S = 60
_SYS = "/run/gpunode-lab/sys"


def main(_: list[str]) -> int:
    """Set the node up; write errors to REPORT, and let the node boot in any case."""
    report = state.path(REPORT)
    try:
        boot()
    except Exception:
        report.write_text(traceback.format_exc(), encoding="utf-8")
        sys.stderr.write(traceback.format_exc())
        return 1
    report.write_text("", encoding="utf-8")
    return 0


def boot() -> None:
    """Run all steps in the order in which a machine comes up."""
    hardware = state.hardware()
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    divert()
    release = kernel.boot()
    kernel.begin_log(release, hardware["name"])
    _settle(hardware)
    _bus(hardware)
    _proc()
    with state.change() as (_, running):
        running["modules"] = []
        running["booted"] = True
    modules.publish()
    if hardware["nics"]:
        modules.note_needed("mlx5_core")
    for name in [*modules.AT_BOOT, *_requested_modules()]:
        if modules.is_simulated(name) and (modules.steps(["-b", name])[0] or not name.startswith("nvidia")):
            modprobe.main(["-b", "-q", name])
    _log_settings()


def _log_settings() -> None:
    """Record the GPUs' settings before any program of the node can change them."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with state.path(GPUS).open("a", encoding="utf-8") as stream:
        for gpu in NodeSnapshot().gpus:
            default = float(gpu.get("power_limit_w", 0))
            locked = "locked" if gpu.now.get("locked_sm_clock_mhz") else "not locked"
            stream.write(
                f"{stamp} gpu{gpu.number} power limit {gpu.power_limit_w:g} of {default:g} W, clocks {locked}, compute "
                f"mode {gpu.compute_mode}, ECC {gpu.ecc}, MIG {gpu.mig} with {len(smi_mig.instances(gpu))} instances\n"
            )


def _requested_modules() -> list[str]:
    """Return the modules in modules-load.d(5), because their service does not run in containers."""
    files: dict[str, Path] = {}
    for folder in ("/usr/lib/modules-load.d", "/run/modules-load.d", "/etc/modules-load.d"):
        files.update({file.name: file for file in Path(folder).glob("*.conf")})
    lines = [
        line.strip() for _, file in sorted(files.items()) for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return [line for line in lines if line and not line.startswith(("#", ";"))]


def divert() -> None:
    """Install the simulated tools in place of the real ones by dpkg-divert, which upgrades respect."""
    Path(REAL).mkdir(parents=True, exist_ok=True)
    for tool in DIVERTED:
        target = f"{BIN}/{tool}"
        if any(_leads_to(f"{folder}/{tool}", target) for folder in FOLDERS):
            continue
        for number, path in enumerate(_packaged(tool)):
            real = f"{REAL}/{tool}" + (f".{number}" if number else "")
            if _dpkg(["dpkg-divert", "--truename", path]).stdout.strip() != real:
                _dpkg(["dpkg-divert", "--local", "--quiet", "--rename", "--divert", real, "--add", path], check=True)
            Path(path).unlink(missing_ok=True)
            Path(path).symlink_to(target)


def _leads_to(path: str, target: str) -> bool:
    return Path(path).is_symlink() and str(Path(path).readlink()) == target


def _dpkg(argv: list[str], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_DPKG_LIMIT_S,
        check=check,
        start_new_session=True,
    )


def _packaged(tool: str) -> list[str]:
    """Return the paths under which dpkg lists a tool: with or without /usr, depending on the release; some have two."""
    paths = [f"{folder}/{tool}" for folder in FOLDERS]
    packaged = [path for path in paths if _dpkg(["dpkg-query", "-S", path]).returncode == 0]
    if not packaged:
        raise FileNotFoundError(errno.ENOENT, "no package has it", tool)
    return packaged


def _settle(hardware: dict[str, Any]) -> None:
    """Apply the effects of a reboot to the GPUs' kept state: rows that waited for a reset are remapped."""
    with state.change() as (kept, _):
        for gpu in kept.get("gpus", {}).values():
            if "remapped" in gpu:
                gpu["remapped"]["pending"] = False
        for gpu in hardware["gpus"]:
            if gpu["architecture"] != "ampere":
                kept.get("gpus", {}).get(str(gpu["index"]), {}).pop("mig", None)


def _bus(hardware: dict[str, Any]) -> None:
    """Write PCI functions, NUMA nodes, adapters, and the files that list loaded modules."""
    roots = {folder.split("/", 1)[0] for folder in map(pci.sysfs_folder, pci.functions(hardware))}
    with_additions("/sys/devices", _SYS + "/devices", without=roots)
    _numa(hardware["numa_nodes"])
    with_additions("/sys/bus/pci/drivers", pci.DRIVERS)
    pci.write(hardware)
    bind(pci.SLOTS, "/sys/bus/pci/devices")
    with_additions("/sys/class", _SYS + "/class")
    nics.write(hardware)
    with contextlib.suppress(OSError):  # kernels without an overlay over sysfs: there /proc lists the modules
        overlay("/sys/module", _SYS + "/module")
    faults.at_boot()


def _numa(count: int) -> None:
    """Write the hardware's NUMA nodes; if the host's kernel has no folder for them, the node has none."""
    pci.write_numa(count)
    try:
        bind(pci.NUMA_FOLDER, "/sys/devices/system/node")
    except FileNotFoundError:
        count = 1
    with state.change() as (_, running):
        running["numa_nodes"] = count


def _proc() -> None:
    """Write /proc/driver, /proc/modules and /proc/devices."""
    driver = Path(modules.DRIVER).parent
    driver.mkdir(parents=True, exist_ok=True)
    bind(str(driver), "/proc/driver")
    state.write_text(Path(modules.LIST), "")
    with contextlib.suppress(FileNotFoundError):  # a kernel without loadable modules has no such file
        bind(modules.LIST, "/proc/modules")
    numbers = Path("/run/gpunode-lab/proc/devices")
    text = Path("/proc/devices").read_text(encoding="ascii")
    lines = "".join(f"{number:3d} {name}\n" for name, number in kernel.DEVICE_NUMBERS.items())
    head, block, rest = text.partition("\nBlock devices:")
    state.write_text(numbers, head + lines + block + rest)
    bind(str(numbers), "/proc/devices")
