"""A PCI function's configuration space, as far as ``lspci -vv`` and the probe read it."""

from __future__ import annotations

import struct
from typing import Any

SIZE = 4096
_EXPRESS = 0x60
_SUBSYSTEM = 0x50
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
