"""Nodes as they are built: which of the simulator's hardware they have, and what else is in the machine."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpunode.lab.hardware import describe

FIXTURES = Path(__file__).parents[1] / "fixtures"
DRIVER_NODE = FIXTURES / "bundles" / "debian-12-driver.json"
PCI = "/sys/bus/pci/devices/"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
RECORDED_DRIVER = "535.261.03"
GUEST_SLOT = "0000:00:05.0"

Document = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What is in a node."""

    name: str
    shows: str
    """An entry of gpunode/lab/hardware/hardware.yml: GPUs, bus, adapters."""
    driver: str
    most_gpus: int | None = None
    """So many of its GPUs, the first ones; None: all."""
    flavour: str = "proprietary"
    nvidia_repository: bool = False
    """Packages of NVIDIA's repository on Ubuntu; else Debian's own, as recorded."""
    kernel: str = "6.1.0-56-cloud-amd64"
    virtualization: str = "none"
    """Else a guest with its GPUs passed through: sysfs reports no links there."""
    cores: int = 32
    """Of each socket."""
    memory_gib: int = 512
    nvme: bool = True
    docker: bool = True
    extra_units: tuple[str, ...] = ()
    slurm: bool = False
    """It runs jobs of Slurm, and has DCGM."""
    gpu_settings: bool = False
    """The role gpu_settings locks the SM clock and sets the power limit."""

    @property
    def hardware(self) -> Document:
        """The description that the simulator reads. Not to be changed."""
        return described(self)

    @property
    def gpus(self) -> list[Document]:
        gpus: list[Document] = self.hardware["gpus"]
        return gpus

    @property
    def slots(self) -> tuple[str, ...]:
        """The GPUs' PCI addresses."""
        return tuple(gpu["pci_bus_id"] for gpu in self.gpus)

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu["uuid"] for gpu in self.gpus)

    @property
    def architecture(self) -> str:
        return str(self.hardware["cpu"]["architecture"])

    @property
    def sockets(self) -> int:
        return int(self.hardware["cpu"]["sockets"])

    @property
    def processors(self) -> int:
        """As lscpu counts them: two of each core, on aarch64 one."""
        return self.sockets * self.cores * (1 if self.architecture == "aarch64" else 2)

    @property
    def roce(self) -> bool:
        """Ports of its adapters are Ethernet's, with flow control."""
        return any(nic["link_layer"] == "Ethernet" for nic in self.hardware["nics"])

    @property
    def interfaces(self) -> dict[str, Document]:
        """Network interfaces of the adapters."""
        kind = "rail" if self.roce else "ib"
        return {f"{kind}{number}": nic for number, nic in enumerate(self.hardware["nics"])}


@cache
def described(machine: Machine) -> Document:
    """Return the description of the machine's hardware, with as many GPUs as it has."""
    hardware = describe(machine.shows, machine.name)
    gpus = hardware["gpus"] = hardware["gpus"][: machine.most_gpus]
    if machine.virtualization != "none":
        hardware["cpu"]["sockets"] = hardware["numa_nodes"] = 1
        seen = {"pci_bus_id": GUEST_SLOT, "bridges_above": [], "virtualization_mode": "Pass-Through"}
        gpus[:] = [gpu | seen for gpu in gpus]
    functions = [*gpus, *hardware["nvswitches"], *hardware["nics"]]
    above = {slot for function in functions for slot in function["bridges_above"]}
    hardware["bridges"] = [bridge for bridge in hardware["bridges"] if bridge["pci_bus_id"] in above]
    return hardware


HGX = Machine(
    "hgx-h100-8",
    "hgx-h100-8",
    driver="580.95.05",
    flavour="open",
    nvidia_repository=True,
    kernel="6.8.0-60-generic",
    cores=56,
    memory_gib=2048,
    extra_units=("nvidia-fabricmanager.service",),
    slurm=True,
)
HGX_B200 = replace(
    HGX,
    name="hgx-b200-8",
    shows="hgx-b200-8",
    extra_units=("nvidia-fabricmanager.service", "nvlsm.service"),
)
"""Its NVSwitches do not show on the bus."""
HGX_4 = replace(
    HGX,
    name="hgx-h100-4",
    shows="hgx-h100-4",
    extra_units=("gpunode-gpu-settings.service",),
    gpu_settings=True,
)
"""Each GPU is linked to each: 18 links to three others."""
PCIE_4 = Machine("l40s-4", "l40s-4", driver="535.261.03")
PCIE_2 = replace(PCIE_4, name="l40s-2", most_gpus=2)
V100_2 = replace(PCIE_2, name="v100-2", shows="v100-2")
T4_1 = Machine("t4-1", "t4-1", driver="535.261.03", cores=16, memory_gib=64)
GUEST = Machine(
    "guest-l40s-1",
    "l40s-4",
    driver="535.261.03",
    most_gpus=1,
    virtualization="kvm",
    cores=8,
    memory_gib=64,
    nvme=False,
    docker=False,
)
GRACE = Machine(
    "gh200-1",
    "gh200-1",
    driver="580.95.05",
    flavour="open",
    nvidia_repository=True,
    kernel="6.8.0-1030-nvidia-64k",
    cores=72,
    memory_gib=480,
    extra_units=("kubelet.service", "containerd.service"),
)


def answer(stdout: str = "", rc: int = 0, stderr: str = "", argv: tuple[str, ...] = ("tool",)) -> Document:
    """A command's answer."""
    return {
        "argv": list(argv),
        "rc": rc,
        "stdout": stdout,
        "stderr": stderr,
        "seconds": 0.1,
        "timed_out": False,
        "truncated": False,
    }


@cache
def recorded_text() -> str:
    """The recorded bundle."""
    return DRIVER_NODE.read_text(encoding="utf-8")


def recorded() -> Document:
    """The recorded bundle: Debian's driver installed, built and held; no GPU; an older probe."""
    document: Document = json.loads(recorded_text())
    return document
