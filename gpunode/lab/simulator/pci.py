"""The simulated PCI bus: sysfs files of all functions, as lspci, the probe and NVIDIA's scripts read them."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import state

SIZE = 4096
_EXPRESS = 0x60
_ACS = 0x100
_SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
_KINDS = {"endpoint": 0, "root-port": 4, "upstream": 5, "downstream": 6}
_ACS_CAPABLE = 0x001F

Region = tuple[int, int]


def speed(generation: int) -> str:
    """Return a generation's speed in the notation of sysfs."""
    return f"{_SPEEDS[generation]} GT/s PCIe"


def numbers(ids: str) -> tuple[int, int]:
    """Parse ``10de:2330`` to two numbers."""
    vendor, device = ids.split(":")
    return int(vendor, 16), int(device, 16)


def config_space(function: dict[str, Any], gen: int, width: int, regions: list[Region]) -> bytes:
    """Return 4096 bytes for a function of a hardware description, with its link now at ``gen`` x ``width``.

    ``regions`` are (address, size) of 64-bit prefetchable memory. A bridge (one with ``kind``) has Access Control
    Services, disabled, as recommended for GPU servers.
    """
    space = bytearray(SIZE)
    kind = function.get("kind", "endpoint")
    bridge = kind != "endpoint"
    vendor, device = numbers(function["pci_device_id"])
    struct.pack_into("<HHHH", space, 0, vendor, device, 0x0406, 0x0010)
    code = int(function["pci_class"], 16)
    struct.pack_into("<BBBB", space, 8, function.get("revision", 0xA1), code & 0xFF, code >> 8 & 0xFF, code >> 16)
    space[0x0C] = 0x10
    space[0x0E] = 1 if bridge else 0
    space[0x34] = _EXPRESS
    space[0x3D] = 1
    if bridge:
        bus = int(function["pci_bus_id"].split(":")[1], 16)
        struct.pack_into("<BBB", space, 0x18, bus, function["bus_below"], function["bus_last"])
        # No memory and no I/O behind it: base above limit.
        struct.pack_into("<BBHHHHH", space, 0x1C, 0xF0, 0x00, 0, 0xFFF0, 0x0000, 0xFFF1, 0x0001)
    else:
        for number, (address, _) in enumerate(regions):
            struct.pack_into("<Q", space, 0x10 + 8 * number, address | 0xC)
        struct.pack_into("<HH", space, 0x2C, *numbers(function["pci_subsystem_id"]))
    _express(space, function, _KINDS[kind], gen, width)
    if bridge:
        struct.pack_into("<HHHH", space, _ACS, 0x000D, 0x0001, _ACS_CAPABLE, 0x0000)
    return bytes(space)


def _express(space: bytearray, function: dict[str, Any], kind: int, gen: int, width: int) -> None:
    """Write the PCI Express capability: the link's maximum and its current speed and width."""
    most, lanes = function["pcie_gen"], function["pcie_width"]
    flags = 2 | kind << 4
    struct.pack_into("<BBH", space, _EXPRESS, 0x10, 0, flags)
    struct.pack_into("<IHH", space, _EXPRESS + 0x04, 0x8001, 0x2910, 0)
    struct.pack_into("<IHH", space, _EXPRESS + 0x0C, most | lanes << 4, 0x0000, gen | width << 4 | 1 << 12)
    struct.pack_into("<IHH", space, _EXPRESS + 0x2C, (2**most - 1) << 1, most, 0)


Function = dict[str, Any]
DEVICES = "/run/gpunode-lab/sys/devices"
"""Where this module writes; on a node it is mounted, read-only, as /sys/devices."""
SLOTS = "/run/gpunode-lab/sys/slots"
"""Mounted as /sys/bus/pci/devices."""
DRIVERS = "/run/gpunode-lab/sys/drivers"
"""Mounted as /sys/bus/pci/drivers."""
_MEMORY = 0x0000_2000_0000_0000
_WINDOW = 1 << 40
_MIB = 1 << 20
_PREFETCHABLE = 0x14220C
NUMA_FOLDER = "/run/gpunode-lab/sys/node"
"""Mounted as /sys/devices/system/node, if the host's kernel supports NUMA."""
_NEAR, _FAR = 10, 21


def functions(hardware: dict[str, Any]) -> list[Function]:
    """Return all functions of a description: bridges first, so that a folder exists before its subfolders."""
    last = _last_buses(hardware)
    bridges = [dict(bridge, bus_last=last[bridge["pci_bus_id"]], revision=0x04) for bridge in hardware["bridges"]]
    nics = [dict(nic, revision=0) for nic in hardware["nics"]]
    return [*bridges, *hardware["gpus"], *hardware["nvswitches"], *nics]


def _last_buses(hardware: dict[str, Any]) -> dict[str, int]:
    """Return bridge to the highest bus behind it."""
    last = {bridge["pci_bus_id"]: bridge["bus_below"] for bridge in hardware["bridges"]}
    for function in [*hardware["bridges"], *hardware["gpus"], *hardware["nvswitches"], *hardware["nics"]]:
        bus = int(function["pci_bus_id"].split(":")[1], 16)
        for above in function["bridges_above"]:
            last[above] = max(last[above], bus, function.get("bus_below", 0))
    return last


def folder(function: Function) -> Path:
    """Return the path where a function's files are written."""
    return state.path(DEVICES + "/" + sysfs_folder(function))


def sysfs_folder(function: Function) -> str:
    """Return a function's folder below /sys/devices."""
    chain = [*function["bridges_above"], function["pci_bus_id"]]
    return "pci{}/{}".format(chain[0].rsplit(":", 1)[0], "/".join(chain))


def write(hardware: dict[str, Any]) -> None:
    """Write all functions to the bus."""
    state.path(SLOTS).mkdir(parents=True, exist_ok=True)
    for number, function in enumerate(functions(hardware)):
        write_function(function, number)


def write_function(function: Function, number: int) -> None:
    """Write one function's files and add it to the bus; ``number`` decides its interrupts and addresses."""
    numa_nodes = int(state.running().get("numa_nodes", 1))
    path = folder(function)
    path.mkdir(parents=True, exist_ok=True)
    vendor, device = numbers(function["pci_device_id"])
    sub_vendor, sub_device = numbers(function.get("pci_subsystem_id", "0000:0000"))
    regions = _regions(function, number)
    cpus = cpus_of(function["numa_node"], numa_nodes)
    values = {
        "vendor": f"0x{vendor:04x}",
        "device": f"0x{device:04x}",
        "subsystem_vendor": f"0x{sub_vendor:04x}",
        "subsystem_device": f"0x{sub_device:04x}",
        "class": "0x" + function["pci_class"],
        "revision": "0x{:02x}".format(function.get("revision", 0xA1)),
        "irq": str(16 + number),
        "numa_node": str(function["numa_node"]) if numa_nodes > 1 else "-1",
        "local_cpulist": ranges(cpus),
        "local_cpus": f"{sum(1 << cpu for cpu in cpus):x}",
        "power_state": "D0",
        "enable": "1",
        "modalias": _modalias(function),
        "resource": "\n".join(_resources(regions)),
    }
    for name, value in values.items():
        state.write_text(path / name, value + "\n")
    set_link(function, function["pcie_gen"], function["pcie_width"], number)
    bind(function, function.get("driver") or _driver(function))
    link = state.path(SLOTS) / function["pci_bus_id"]
    if not link.is_symlink():
        link.symlink_to("../../../devices/" + sysfs_folder(function))


def set_link(function: Function, gen: int, width: int, number: int) -> None:
    """Set a function's link to that generation and width, in sysfs and in configuration space."""
    path = folder(function)
    values = {
        "current_link_speed": speed(gen),
        "current_link_width": str(width),
        "max_link_speed": speed(function["pcie_gen"]),
        "max_link_width": str(function["pcie_width"]),
    }
    for name, value in values.items():
        state.write_text(path / name, value + "\n")
    new = path / ".config"
    new.write_bytes(config_space(function, gen, width, _regions(function, number)))
    new.chmod(0o644)
    new.replace(path / "config")


def set_link_and_port(hardware: dict[str, Any], gpu: Function, gen: int, width: int) -> None:
    """Set a GPU's link at both of its ends."""
    everything = functions(hardware)
    slots = [function["pci_bus_id"] for function in everything]
    for slot in (gpu["bridges_above"][-1], gpu["pci_bus_id"]):
        number = slots.index(slot)
        function = everything[number]
        if (folder(function) / "config").exists():
            set_link(function, min(gen, function["pcie_gen"]), min(width, function["pcie_width"]), number)


def fall_off(function: Function) -> None:
    """Make a function unresponsive: every read of its configuration space returns ones."""
    path = folder(function)
    state.write_text(path / "current_link_speed", "Unknown\n")
    state.write_text(path / "current_link_width", "63\n")
    new = path / ".config"
    new.write_bytes(b"\xff" * SIZE)
    new.chmod(0o644)
    new.replace(path / "config")


def bind(function: Function, driver: str | None) -> None:
    """Bind a driver to the function, or none."""
    path = folder(function)
    text = f"DRIVER={driver}\n" if driver else ""
    sub = function.get("pci_subsystem_id", "0000:0000").upper()
    text += "PCI_CLASS={}\nPCI_ID={}\n".format(
        function["pci_class"].lstrip("0").upper(), function["pci_device_id"].upper()
    )
    text += "PCI_SUBSYS_ID={}\nPCI_SLOT_NAME={}\nMODALIAS={}\n".format(sub, function["pci_bus_id"], _modalias(function))
    state.write_text(path / "uevent", text)
    link = path / "driver"
    if link.is_symlink():
        link.unlink()
    if driver:
        (state.path(DRIVERS) / driver).mkdir(parents=True, exist_ok=True)
        up = "../" * (len(sysfs_folder(function).split("/")) + 1)  # libpci joins the link's text to the folder
        link.symlink_to(f"{up}bus/pci/drivers/{driver}")


def remove(function: Function) -> None:
    """Remove a function from the bus, as the kernel does."""
    link = state.path(SLOTS) / function["pci_bus_id"]
    if link.is_symlink():
        link.unlink()
    shutil.rmtree(folder(function), ignore_errors=True)


def _driver(function: Function) -> str | None:
    """Return the driver of a function that is not NVIDIA's, which a server's kernel has loaded."""
    if "kind" in function:
        return "pcieport"
    return "mlx5_core" if function["pci_device_id"].startswith("15b3:") else None


def _modalias(function: Function) -> str:
    vendor, device = numbers(function["pci_device_id"])
    sub_vendor, sub_device = numbers(function.get("pci_subsystem_id", "0000:0000"))
    code = function["pci_class"].upper()
    words = (vendor, device, sub_vendor, sub_device, code[:2], code[2:4], code[4:])
    return "pci:v{:08X}d{:08X}sv{:08X}sd{:08X}bc{}sc{}i{}".format(*words)


def _regions(function: Function, number: int) -> list[tuple[int, int]]:
    if "bar1_total_mib" not in function:
        return []
    base = _MEMORY + number * _WINDOW
    big = function["bar1_total_mib"] * _MIB
    return [(base + 2 * big, 16 * _MIB), (base, big), (base + 2 * big + 64 * _MIB, 32 * _MIB)]


def _resources(regions: list[tuple[int, int]]) -> Iterator[str]:
    """Yield seven lines: six registers, of which a 64-bit region takes two, and the ROM."""
    lines = []
    for address, size in regions:
        lines += [f"0x{address:016x} 0x{address + size - 1:016x} 0x{_PREFETCHABLE:016x}", None]
    empty = f"0x{0:016x} 0x{0:016x} 0x{0:016x}"
    for line in [*lines, *[None] * (13 - len(lines))]:
        yield line or empty


def cpus_of(numa_node: int, numa_nodes: int) -> list[int]:
    """Return the host's processors of one simulated NUMA node, divided in blocks; all of them if there are too few."""
    online = processors()
    if len(online) < numa_nodes:
        return online
    size = -(-len(online) // numa_nodes)
    return online[numa_node * size : (numa_node + 1) * size]


def processors() -> list[int]:
    """Return the host's processors."""
    return sorted(os.sched_getaffinity(0))


def ranges(cpus: list[int]) -> str:
    """Return ``0-3,8`` for a sorted list of numbers."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][-1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def write_numa(count: int) -> None:
    """Write the folder."""
    folder = state.path(NUMA_FOLDER)
    every = ranges(list(range(count)))
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        state.write_text(folder / name, every + "\n")
    kib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    for node in range(count):
        cpus = cpus_of(node, count)
        subfolder = folder / f"node{node}"
        state.write_text(subfolder / "cpulist", ranges(cpus) + "\n")
        state.write_text(subfolder / "cpumap", _mask(cpus) + "\n")
        state.write_text(subfolder / "distance", " ".join(_distances(node, count)) + "\n")
        share = kib // count
        lines = [("MemTotal", share), ("MemFree", share // 2), ("MemUsed", share - share // 2)]
        state.write_text(subfolder / "meminfo", "".join(f"Node {node} {name}: {size:15d} kB\n" for name, size in lines))


def _distances(node: int, count: int) -> list[str]:
    return [str(_NEAR if other == node else _FAR) for other in range(count)]


def _mask(cpus: list[int]) -> str:
    """Return a processor mask in groups of 32 bits."""
    bits = sum(1 << cpu for cpu in cpus)
    groups = []
    while True:
        groups.append(f"{bits & 0xFFFFFFFF:08x}")
        bits >>= 32
        if not bits:
            return ",".join(reversed(groups))
