"""Loaded kernel modules of a simulated node: NVIDIA's own, "loaded" from real files built by DKMS or a package.

The real kmod decides file, options and order (``modprobe --show-depends``); the real modinfo reads version, licence and
kernel from the file. Nothing reaches the host's kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from . import kernel, pci, state

KMOD_LIMIT_S = 60
LIST = "/run/gpunode-lab/proc-modules"
DRIVER = "/run/gpunode-lab/proc/driver/nvidia"
SYS_MODULE = "/run/gpunode-lab/sys/module"
AT_BOOT = ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm")
"""The modules that the packages' udev rules load for a GPU on the bus."""
_DEPENDS = {
    "nvidia_modeset": ("nvidia",),
    "nvidia_uvm": ("nvidia",),
    "nvidia_peermem": ("nvidia",),
    "nvidia_drm": ("nvidia_modeset", "nvidia"),
}
_SIZES = {"nvidia": 14381056, "nvidia_uvm": 2076672, "nvidia_modeset": 1826816, "nvidia_drm": 135168}
_ADAPTERS = ("mlx5_core", "mlx5_ib", "ib_core", "ib_umad", "ib_uverbs")
_PARAMETERS = {
    "ResmanDebugLevel": "4294967295",
    "ModifyDeviceFiles": "1",
    "DeviceFileUID": "0",
    "DeviceFileGID": "0",
    "DeviceFileMode": "438",
    "EnableMSI": "1",
    "EnablePCIeGen3": "0",
    "MemoryPoolSize": "0",
    "UsePageAttributeTable": "4294967295",
    "EnableResizableBar": "0",
    "PreserveVideoMemoryAllocations": "0",
    "EnableGpuFirmware": "18",
    "OpenRmEnableUnsupportedGpus": "1",
    "RegistryDwords": '""',
    "RegistryDwordsPerDevice": '""',
    "RmMsg": '""',
    "GpuBlacklist": '""',
    "ExcludedGpus": '""',
}


class ModuleError(Exception):
    """A module cannot be loaded or removed; the message follows the tool's name."""


def underscored(name: str) -> str:
    """Return a module's name as the kernel writes it."""
    return name.replace("-", "_")


def is_simulated(name: str) -> bool:
    """Return whether loading that module is simulated: NVIDIA's, and those of the hardware's network adapters."""
    hardware = _hardware()
    needed = {*hardware["kernel_modules"], *(_ADAPTERS if hardware["nics"] else ())}
    return underscored(name).startswith("nvidia") or underscored(name) in needed


def _hardware() -> dict[str, Any]:
    return state.hardware()


def kmod(tool: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run one of the real kmod's tools."""
    return subprocess.run(
        [tool, *arguments],
        executable="/usr/bin/kmod",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=KMOD_LIMIT_S,
        check=False,
        start_new_session=True,
    )


def modinfo(file: str) -> dict[str, str]:
    """Return name, version, license, vermagic … of a module's file."""
    fields: dict[str, str] = {}
    for line in kmod("modinfo", [file]).stdout.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key, value.strip())
    return fields


def loaded() -> list[str]:
    """Return the names of the loaded modules, the latest first, as in /proc/modules."""
    names: list[str] = state.running().get("modules", [])
    return names


def insert(file: str, options: list[str]) -> None:
    """Load a module's file, as init_module(2) would. Raises ModuleError with the kernel's reason."""
    about = modinfo(file)
    name = underscored(about.get("name") or Path(file).name.split(".ko")[0])
    if name in loaded():
        return
    built_for = about.get("vermagic", "").split(" ")[0]
    if built_for and built_for != kernel.release():
        kernel.log(
            "{}: version magic '{}' should be '{} SMP '".format(name, about["vermagic"], kernel.release()), kernel.ERROR
        )
        raise ModuleError(f"could not insert '{name}': Exec format error")
    missing = [each for each in _DEPENDS.get(name, ()) if each not in loaded()]
    if missing:
        kernel.log(f"{name}: Unknown symbol (err -2)")
        raise ModuleError(f"could not insert '{name}': Unknown symbol in module, or unknown parameter (see dmesg)")
    if name == "nvidia":
        _insert_nvidia(file, about, options)
    else:
        _note(name, about)


def note_needed(name: str) -> None:
    """Record a module that the hardware's services need as loaded, whether this kernel has it or not."""
    if underscored(name) not in loaded():
        _note(underscored(name), {})


def _insert_nvidia(file: str, about: dict[str, str], options: list[str]) -> None:
    hardware = _hardware()
    flavour = "open" if about.get("license") == "Dual MIT/GPL" else "proprietary"
    version = about.get("version", "")
    kernel.log("nvidia: loading out-of-tree module taints kernel.")
    if flavour == "proprietary":
        kernel.log("nvidia: module license 'NVIDIA' taints kernel.")
    lost = {fault["component"] for fault in state.faults() if fault["fault"] == "gpu-lost"}
    usable = []
    for gpu in [gpu for gpu in hardware["gpus"] if pci.folder(gpu).exists()]:
        why = _unsupported(gpu, flavour, version)
        if why:
            kernel.log("NVRM: The NVIDIA GPU {} (PCI ID: {})".format(gpu["pci_bus_id"], gpu["pci_device_id"]))
            kernel.log(f"NVRM: installed in this system {why}")
        else:
            usable.append(gpu)
    if not usable:
        kernel.log("nvidia: probe of {} failed with error -1".format(hardware["gpus"][0]["pci_bus_id"]))
        kernel.log("NVRM: None of the NVIDIA devices were initialized.", kernel.ERROR)
        raise ModuleError("could not insert 'nvidia': No such device")
    built = time.strftime("%a %b %e %H:%M:%S UTC %Y", time.gmtime(Path(file).stat().st_mtime))
    with state.change() as (kept, running):
        running["module"] = {"version": version, "flavour": flavour, "file": file, "built": built}
        running["gpus"] = {str(gpu["index"]): _modes_at_load(gpu, kept) for gpu in usable}
    kernel.log(f"NVRM: loading {version_line(version, flavour, built)}", kernel.INFO)
    for gpu in usable:
        if f"gpu{gpu['index']}" not in lost:
            pci.bind(gpu, "nvidia")
    write_driver_folder(usable, version, flavour, built, options)
    _note("nvidia", about)


def take(gpu: dict[str, Any]) -> None:
    """Let the loaded driver take a GPU that appeared on the bus, as it does after a rescan."""
    module = state.running().get("module")
    if not module or _unsupported(gpu, module["flavour"], module["version"]):
        return
    with state.change() as (kept, running):
        running["gpus"].setdefault(str(gpu["index"]), _modes_at_load(gpu, kept))
    pci.bind(gpu, "nvidia")
    _write_information(gpu, module["version"], module["flavour"])
    publish()


def _modes_at_load(gpu: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Return a GPU's modes after loading: InfoROM keeps ECC, and MIG on Ampere; the rest is reset with the driver."""
    inforom = kept.get("gpus", {}).get(str(gpu["index"]), {})
    mig = bool(inforom.get("mig")) and gpu["architecture"] == "ampere" and gpu["mig_capable"]
    return {"ecc": inforom.get("ecc", gpu["ecc"]), "mig": mig, "mig_pending": mig, "persistence": False}


def _unsupported(gpu: dict[str, Any], flavour: str, version: str) -> str | None:
    """Return why this driver does not support that GPU; None if it does."""
    branch = int(version.split(".", maxsplit=1)[0] or 0)
    if gpu.get("last_branch") and branch > gpu["last_branch"]:
        return f"is supported through the NVIDIA {gpu['last_branch']}.xx Legacy drivers."
    if gpu.get("first_branch") and branch < gpu["first_branch"]:
        return f"is not supported by the NVIDIA {version} driver release."
    if flavour == "open" and gpu["modules"] == "proprietary":
        return "is not supported by open nvidia.ko because it does not include the required GPU System Processor (GSP)."
    if flavour == "proprietary" and gpu["modules"] == "open":
        return "requires use of the NVIDIA open kernel modules."
    return None


def version_line(version: str, flavour: str, built: str) -> str:
    """Return the driver's version line, as in /proc/driver/nvidia/version."""
    if flavour == "open":
        return f"NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (gpunode-lab)  {built}"
    return f"NVIDIA UNIX x86_64 Kernel Module  {version}  {built}"


def write_driver_folder(gpus: list[dict[str, Any]], version: str, flavour: str, built: str, options: list[str]) -> None:
    """Write /proc/driver/nvidia as a driver of that version leaves it once it is bound to these GPUs."""
    folder = state.path(DRIVER)
    text = "NVRM version: %s\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) \n"
    state.write_text(folder / "version", text % version_line(version, flavour, built))
    state.write_text(folder / "params", "".join("{}: {}\n".format(*item) for item in parameters(options).items()))
    for gpu in gpus:
        _write_information(gpu, version, flavour)


def _write_information(gpu: dict[str, Any], version: str, flavour: str) -> None:
    lines = (
        ("Model", gpu["name"]),
        ("IRQ", "0"),
        ("GPU UUID", gpu["uuid"]),
        ("Video BIOS", gpu.get("vbios_version") or "N/A"),
        ("Bus Type", "PCIe"),
        ("DMA Size", "47 bits"),
        ("DMA Mask", "0x7fffffffffff"),
        ("Bus Location", gpu["pci_bus_id"]),
        ("Device Minor", str(gpu["index"])),
        ("GPU Firmware", version if flavour == "open" else "N/A"),
        ("GPU Excluded", "No"),
    )
    text = "".join("{} \t {}\n".format((name + ":").ljust(7), value) for name, value in lines)
    state.write_text(state.path(DRIVER) / "gpus" / gpu["pci_bus_id"] / "information", text)


def parameters(options: list[str]) -> dict[str, str]:
    """Return the content of /proc/driver/nvidia/params with these options of the module."""
    content = dict(_PARAMETERS)
    for option in options:
        match = re.fullmatch(r"NVreg_(\w+)=(.*)", option)
        if match:
            quoted = match[1] in ("RegistryDwords", "RegistryDwordsPerDevice", "RmMsg", "GpuBlacklist", "ExcludedGpus")
            content[match[1]] = '"{}"'.format(match[2].strip('"')) if quoted else match[2]
    return content


def _note(name: str, about: dict[str, str]) -> None:
    with state.change() as (_, running):
        running["modules"] = [name, *running.get("modules", [])]
    folder = state.path(SYS_MODULE) / name
    state.write_text(folder / "initstate", "live\n")
    if about.get("version"):
        state.write_text(folder / "version", about["version"] + "\n")
    publish()


def remove(name: str) -> None:
    """Remove a loaded module, as delete_module(2) would. Raises ModuleError if it is in use, or not loaded."""
    name = underscored(name)
    if name not in loaded():
        raise ModuleError(f"Module {name} is not currently loaded")
    users = [other for other in loaded() if name in _DEPENDS.get(other, ())]
    if users:
        raise ModuleError("Module {} is in use by: {}".format(name, " ".join(users)))
    if uses(name):
        raise ModuleError(f"Module {name} is in use")
    with state.change() as (_, running):
        running["modules"] = [other for other in running["modules"] if other != name]
        if name == "nvidia":
            running["module"] = None
            running["gpus"] = {}
            running.pop("fabric", None)
    shutil.rmtree(state.path(SYS_MODULE) / name, ignore_errors=True)
    if name == "nvidia":
        shutil.rmtree(state.path(DRIVER), ignore_errors=True)
        for gpu in _hardware()["gpus"]:
            if pci.folder(gpu).exists():
                pci.bind(gpu, None)
    publish()


def uses(name: str) -> int:
    """Return the number of a module's users other than modules: processes with its files open, GPUs in persistence
    mode.
    """
    held = [file for files in kernel.device_holders().values() for file in files]
    if name == "nvidia_uvm":
        return sum(file.startswith("/dev/nvidia-uvm") for file in held)
    if name == "nvidia_modeset":
        return sum(file == "/dev/nvidia-modeset" for file in held)
    if name != "nvidia":
        return 0
    persistent = sum(bool(gpu.get("persistence")) for gpu in state.running().get("gpus", {}).values())
    device_files = [file for file in held if not file.startswith(("/dev/nvidia-uvm", "/dev/nvidia-modeset"))]
    return persistent + len(device_files)


def dependencies(name: str) -> tuple[str, ...]:
    """Return the simulated modules that a module needs, the nearest first."""
    return _DEPENDS.get(name, ())


def in_use(name: str) -> bool:
    """Return whether another module or anything else uses a module."""
    return any(name in _DEPENDS.get(other, ()) for other in loaded()) or uses(name) > 0


def listing() -> list[tuple[str, int, int, list[str]]]:
    """Return (name, size, count of users, modules among them) of the loaded modules, the latest first."""
    names = loaded()
    rows = []
    for name in names:
        users = [other for other in names if name in _DEPENDS.get(other, ())]
        rows.append((name, _SIZES.get(name, 20480), len(users) + uses(name), users))
    return rows


def overwrite(file: Path, data: bytes) -> None:
    """Write a file in place, without a moment in which it is empty.

    A new file at that path would not be the one that is mounted over /proc/modules, and a program may be reading it.
    """
    number = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(number, data)
        os.ftruncate(number, len(data))
    finally:
        os.close(number)


def publish() -> None:
    """Update /proc/modules and the device files to the loaded modules."""
    lines = []
    for name, size, count, users in listing():
        by = "".join(f"{user}," for user in users) or "-"
        taints = " (OE)" if name.startswith("nvidia") else ""
        lines.append(f"{name} {size} {count} {by} Live 0x0000000000000000{taints}\n")
        state.write_text(state.path(SYS_MODULE) / name / "refcnt", f"{count}\n")
    file = state.path(LIST)
    file.parent.mkdir(parents=True, exist_ok=True)
    overwrite(file, "".join(lines).encode("ascii"))
    hardware, bound = _hardware(), state.running().get("gpus", {})
    gpus = [gpu for gpu in hardware["gpus"] if str(gpu["index"]) in bound]
    kernel.make_devices({**hardware, "gpus": gpus}, set(loaded()))


def steps(arguments: list[str]) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """Return what the real modprobe would do for these arguments: the fields of each line, and its whole answer."""
    answer = kmod("modprobe", ["--show-depends", *arguments])
    return [line.split() for line in answer.stdout.splitlines() if line.strip()], answer
