"""Whole nodes as the probe prints them: simulated, never seen on a machine.

A ``Machine`` has what is in a node. Its hardware and nvidia-smi are the lab's simulator, laid below a folder with the
files of a host and read by the real probe; what Debian's packages look like once they are installed is taken from the
recorded ``debian-12-driver.json``.
"""

import json

from machine_node import text_of
from machine_records import records
from machine_shapes import (
    DRIVER_NODE,
    GRACE,
    GUEST,
    HGX,
    HGX_4,
    HGX_B200,
    PCI,
    PCIE_2,
    PCIE_4,
    SECURE_BOOT,
    T4_1,
    V100_2,
    Document,
    Machine,
    recorded,
)

__all__ = [
    "DRIVER_NODE",
    "GRACE",
    "GUEST",
    "HGX",
    "HGX_4",
    "HGX_B200",
    "PCI",
    "PCIE_2",
    "PCIE_4",
    "SECURE_BOOT",
    "T4_1",
    "V100_2",
    "Document",
    "Machine",
    "bundle",
    "recorded",
]


def bundle(machine: Machine) -> Document:
    """Return the node's bundle: everything is good."""
    document: Document = json.loads(text_of(machine))
    return document | {"simulated": True, "results": records(machine)}
