"""Nodes as they are built: which GPUs, where they sit, and what else is in the machine."""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
DRIVER_NODE = FIXTURES / "bundles" / "debian-12-driver.json"
PCI = "/sys/bus/pci/devices/"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

Document = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One GPU model as its tools print it."""

    name: str
    architecture: str
    device_id: str
    subsystem_id: str
    memory_mib: int
    power_w: int
    sm_clock: int
    memory_clock: int
    gen: int
    speed: str
    """In sysfs."""
    links: int = 0
    link_speed: str = ""
    mig: str = "N/A"
    fabric: tuple[str, str, str, str] = ("N/A", "N/A", "N/A", "N/A")
    pages: bool = False
    """Retires pages (up to Turing) where later ones remap rows."""
    slowdown_c: int | None = None
    """None: it tells how far it is from its limit (T.Limit)."""


JOINED = ("Completed", "Success", "0", "00000000-0000-0000-0000-000000000000")
H100 = Model(
    "NVIDIA H100 80GB HBM3",
    "Hopper",
    "2330",
    "16C1",
    81559,
    700,
    1980,
    2619,
    5,
    "32.0 GT/s PCIe",
    18,
    "26.562 GB/s",
    "Disabled",
    JOINED,
)
B200 = Model(
    "NVIDIA B200",
    "Blackwell",
    "2901",
    "1999",
    183359,
    1000,
    1965,
    3996,
    5,
    "32.0 GT/s PCIe",
    18,
    "53.125 GB/s",
    "Disabled",
    JOINED,
)
L40S = Model("NVIDIA L40S", "Ada Lovelace", "26B9", "1851", 46068, 350, 2520, 9001, 4, "16.0 GT/s PCIe")
T4 = Model("Tesla T4", "Turing", "1EB8", "12A2", 15360, 70, 1590, 5001, 3, "8.0 GT/s PCIe", pages=True, slowdown_c=93)
GH200 = Model(
    "NVIDIA GH200 480GB", "Hopper", "2342", "16EB", 97871, 900, 1980, 2619, 5, "32.0 GT/s PCIe", mig="Disabled"
)


@dataclass(frozen=True)
class Gpu:
    """Where a GPU sits."""

    slot: str
    ports: tuple[str, ...] = ()
    """Bridges above it, from the root down."""
    numa: int = 0


@dataclass(frozen=True)
class Machine:
    """What is in a node."""

    name: str
    model: Model
    gpus: tuple[Gpu, ...]
    driver: str
    flavour: str = "proprietary"
    nvidia_repository: bool = False
    """Packages of NVIDIA's repository on Ubuntu; else Debian's own, as recorded."""
    kernel: str = "6.1.0-56-cloud-amd64"
    architecture: str = "x86_64"
    virtualization: str = "none"
    gpu_virtualization: str = "None"
    sockets: int = 2
    cores: int = 32
    """Of each socket."""
    memory_gib: int = 512
    nvswitches: tuple[str, ...] = ()
    hcas: tuple[tuple[str, str], ...] = ()
    """(name, slot) of InfiniBand devices."""
    roce: bool = False
    """Their ports are Ethernet's, with flow control."""
    nvme: bool = True
    way: str = "SYS"
    """Between any two GPUs, in the words of nvidia-smi topo."""
    pcie_link: bool = True
    """False: sysfs tells no link (virtual machines)."""
    docker: bool = True
    extra_units: tuple[str, ...] = field(default=())
    gpu_settings: bool = False
    """The role gpu_settings locks the SM clock and sets the power limit."""

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Network interfaces of the InfiniBand devices."""
        return tuple(f"{'rail' if self.roce else 'ib'}{number}" for number in range(len(self.hcas)))


HGX = Machine(
    "hgx-h100-8",
    H100,
    tuple(
        Gpu(f"0000:{bus}:00.0", (f"0000:{root}:01.0", f"0000:{port}:00.0"), number // 4)
        for number, (bus, root, port) in enumerate(
            zip(
                ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db"),
                ("15", "26", "37", "59", "97", "a7", "b7", "d7"),
                ("16", "28", "38", "5b", "98", "a9", "b8", "d9"),
                strict=True,
            )
        )
    ),
    driver="580.95.05",
    flavour="open",
    nvidia_repository=True,
    kernel="6.8.0-60-generic",
    cores=56,
    memory_gib=2048,
    nvswitches=("0000:07:00.0", "0000:08:00.0", "0000:09:00.0", "0000:0a:00.0"),
    hcas=tuple((f"mlx5_{number}", f"0000:{bus}:00.0") for number, bus in enumerate(("1a", "2c", "3c", "5f"))),
    way="NV18",
    extra_units=("nvidia-fabricmanager.service",),
)
HGX_B200 = replace(
    HGX,
    name="hgx-b200-8",
    model=B200,
    nvswitches=(),
    extra_units=("nvidia-fabricmanager.service", "nvlsm.service"),
)
"""Its NVSwitches do not show on the bus."""
HGX_4 = replace(
    HGX,
    name="hgx-h100-4",
    model=replace(H100, fabric=("N/A", "N/A", "N/A", "N/A")),
    gpus=(*HGX.gpus[:2], *HGX.gpus[4:6]),
    nvswitches=(),
    way="NV6",
    extra_units=("gpunode-gpu-settings.service",),
    gpu_settings=True,
    roce=True,
)
"""Each GPU is linked to each: 18 links to three others."""
PCIE_4 = Machine(
    "l40s-4",
    L40S,
    tuple(
        Gpu(f"0000:{bus}:00.0", (f"0000:{root}:01.0",), number // 2)
        for number, (bus, root) in enumerate((("1a", "19"), ("3d", "3c"), ("9a", "99"), ("bd", "bc")))
    ),
    driver="535.261.03",
)
PCIE_2 = replace(PCIE_4, name="l40s-2", gpus=PCIE_4.gpus[:2])
T4_1 = Machine(
    "t4-1",
    T4,
    (Gpu("0000:3b:00.0", ("0000:3a:00.0",), 0),),
    driver="535.261.03",
    sockets=1,
    cores=16,
    memory_gib=64,
)
GUEST = Machine(
    "guest-l40s-1",
    L40S,
    (Gpu("0000:00:05.0"),),
    driver="535.261.03",
    virtualization="kvm",
    gpu_virtualization="Pass-Through",
    sockets=1,
    cores=8,
    memory_gib=64,
    nvme=False,
    pcie_link=False,
    docker=False,
)
GRACE = Machine(
    "gh200-1",
    GH200,
    (Gpu("0009:01:00.0", ("0009:00:00.0",), 0),),
    driver="580.95.05",
    flavour="open",
    nvidia_repository=True,
    kernel="6.8.0-1030-nvidia-64k",
    architecture="aarch64",
    sockets=1,
    cores=72,
    memory_gib=480,
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
