"""The machines of the bench: one for each GPU generation, written for tests, simulated, never seen on a machine.

Figures of models (memory, power, clocks, links) are those of recorded outputs and of NVIDIA's
data sheets, as the catalog cites them.
"""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from machine_shapes import JOINED, Model
from machines import GRACE, GUEST, HGX, HGX_4, HGX_B200, PCIE_2, PCIE_4, T4_1, Document, Machine, bundle

K80 = Model("Tesla K80", "Kepler", "102D", "106C", 11441, 300, 875, 2505, 3, "8.0 GT/s PCIe", pages=True, slowdown_c=93)
# No recording of an M60 says its subsystem id and slowdown temperature: stand-ins, which no condition tests.
M60 = Model(
    "Tesla M60", "Maxwell", "13F2", "115E", 8129, 150, 1177, 2505, 3, "8.0 GT/s PCIe", pages=True, slowdown_c=93
)
P100 = Model(
    "Tesla P100-PCIE-16GB",
    "Pascal",
    "15F8",
    "118F",
    16276,
    250,
    1328,
    715,
    3,
    "8.0 GT/s PCIe",
    pages=True,
    slowdown_c=85,
)
V100 = Model(
    "Tesla V100-PCIE-32GB",
    "Volta",
    "1DB6",
    "124A",
    32510,
    250,
    1380,
    877,
    3,
    "8.0 GT/s PCIe",
    pages=True,
    slowdown_c=87,
)
A10 = Model("NVIDIA A10", "Ampere", "2236", "1482", 23028, 150, 1695, 6251, 4, "16.0 GT/s PCIe", slowdown_c=95)
A100 = Model(
    "NVIDIA A100-SXM4-80GB",
    "Ampere",
    "20B2",
    "1463",
    81920,
    400,
    1410,
    1593,
    4,
    "16.0 GT/s PCIe",
    12,
    "25 GB/s",
    "Disabled",
    slowdown_c=89,
)
H200 = Model(
    "NVIDIA H200",
    "Hopper",
    "2335",
    "18BE",
    143771,
    700,
    1980,
    3201,
    5,
    "32.0 GT/s PCIe",
    18,
    "26.562 GB/s",
    "Disabled",
    JOINED,
)
RTX_PRO_6000 = Model(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "Blackwell",
    "2BB5",
    "204E",
    97887,
    600,
    2617,
    12481,
    5,
    "32.0 GT/s PCIe",
    mig="Disabled",
)

MACHINES: dict[str, Machine] = {
    "k80": replace(T4_1, name="k80-1", model=K80),
    "m60": replace(T4_1, name="m60-1", model=M60),
    "p100": replace(T4_1, name="p100-1", model=P100),
    "v100": replace(PCIE_2, name="v100-2", model=V100),
    "t4": T4_1,
    "a10": replace(PCIE_2, name="a10-2", model=A10),
    "a100": replace(HGX, name="hgx-a100-8", model=A100, way="NV12", nvswitches=HGX.nvswitches),
    "l40s": PCIE_4,
    "h100": HGX,
    "h100-4": HGX_4,
    "h200": replace(HGX, name="hgx-h200-8", model=H200),
    "gh200": GRACE,
    "b200": HGX_B200,
    "rtx-pro": replace(PCIE_2, name="rtx-pro-2", model=RTX_PRO_6000, flavour="open"),
    "guest": GUEST,
}

OTHER_DRIVER = {"k80": "470.256.02", "m60": "580.95.05", "rtx-pro": "580.95.05"}
"""Machines whose GPUs the recorded packages' driver does not drive: packages, module and tools have this version."""


@cache
def document(name: str) -> Document:
    """Return the bundle of a machine in good health; what workloads recorded is left out. Not to be changed."""
    found = bundle(MACHINES[name]) | {"results": []}
    other = OTHER_DRIVER.get(name)
    if other is None:
        return found
    text = json.dumps(found).replace(MACHINES[name].driver, other)
    changed: Document = json.loads(text)
    return changed
