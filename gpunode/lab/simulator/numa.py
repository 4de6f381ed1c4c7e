"""Simulated NUMA nodes: the host's processors and memory, divided among as many nodes as the hardware has."""

from __future__ import annotations

import os

from . import pci, state

FOLDER = "/run/gpunode-lab/sys/node"
"""Mounted as /sys/devices/system/node, if the host's kernel supports NUMA."""
_NEAR, _FAR = 10, 21


def write(count: int) -> None:
    """Write the folder."""
    folder = state.path(FOLDER)
    every = pci.ranges(list(range(count)))
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        state.write_text(folder / name, every + "\n")
    kib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    for node in range(count):
        cpus = pci.cpus_of(node, count)
        place = folder / f"node{node}"
        state.write_text(place / "cpulist", pci.ranges(cpus) + "\n")
        state.write_text(place / "cpumap", _mask(cpus) + "\n")
        state.write_text(place / "distance", " ".join(_distances(node, count)) + "\n")
        share = kib // count
        lines = [("MemTotal", share), ("MemFree", share // 2), ("MemUsed", share - share // 2)]
        state.write_text(place / "meminfo", "".join(f"Node {node} {name}: {size:15d} kB\n" for name, size in lines))


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
