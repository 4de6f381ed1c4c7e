"""The machines of the bench: one for each GPU generation, simulated, never seen on a machine."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from machines import GRACE, GUEST, HGX, HGX_4, HGX_B200, PCIE_2, PCIE_4, T4_1, V100_2, Document, Machine, bundle

MACHINES: dict[str, Machine] = {
    "k80": replace(T4_1, name="k80-1", shows="k80-1", driver="470.256.02"),
    "m60": replace(T4_1, name="m60-1", shows="m60-1", driver="580.95.05"),
    "p100": replace(T4_1, name="p100-1", shows="p100-1"),
    "v100": V100_2,
    "t4": T4_1,
    "a10": replace(PCIE_2, name="a10-2", shows="a10-2"),
    "a100": replace(HGX, name="hgx-a100-8", shows="dgx-a100-8"),
    "l40s": PCIE_4,
    "h100": HGX,
    "h100-4": HGX_4,
    "h200": replace(HGX, name="hgx-h200-8", shows="hgx-h200-8"),
    "gh200": GRACE,
    "b200": HGX_B200,
    "rtx-pro": replace(PCIE_2, name="rtx-pro-2", shows="rtx-pro-6000-2", flavour="open", driver="580.95.05"),
    "guest": GUEST,
}


@cache
def document(name: str) -> Document:
    """Return the bundle of a machine in good health; what workloads recorded is left out. Not to be changed."""
    return bundle(MACHINES[name]) | {"results": []}
