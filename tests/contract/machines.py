"""Whole nodes as the probe would print them: written for these tests, simulated, never seen on a machine.

A ``Machine`` says what is in a node; ``bundle`` writes the raw text that the tools of such a node print. What Debian's
packages look like once they are installed is not written but taken from the recorded ``debian-12-driver.json``.
"""

from machine_driver import driver_commands, driver_files
from machine_exposure import exposure_commands, exposure_files
from machine_host import host_commands, host_files
from machine_packages import as_from_nvidia
from machine_pci import pci_commands, pci_files
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
    Document,
    Machine,
    recorded,
)
from machine_ssh import ssh_commands

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
    "Document",
    "Machine",
    "bundle",
    "recorded",
]


def bundle(machine: Machine) -> Document:
    """The node's bundle: everything is good."""
    document = recorded()
    document |= {"host": machine.name, "simulated": True, "results": records(machine)}
    commands, files = document["commands"], document["files"]
    files |= dict(host_files(machine)) | dict(pci_files(machine)) | dict(driver_files(machine))
    commands |= host_commands(machine) | driver_commands(machine) | pci_commands(machine)
    files |= dict(exposure_files(machine))
    commands |= exposure_commands(machine) | ssh_commands()
    if machine.nvidia_repository:
        as_from_nvidia(machine, commands, files)
    return document
