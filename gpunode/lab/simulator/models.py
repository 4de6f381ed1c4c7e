"""What the tools print of a GPU model beyond the hardware description, by PCI device id.

H100, H200, A100 SXM4, L40S and T4 are as recorded on real machines with that model, but for what an idle GPU of theirs
draws and runs at, which is typical. Of B200, A100 PCIe and V100 there is no whole recording: their figures are ours, so
that the model has what its architecture has. A key that the hardware description has goes before the one here.
"""

from __future__ import annotations

from typing import Any

HOPPER = {
    "inforom": {"oem": "2.1", "ecc": "7.16"},
    "remap_banks": 2560,
    "tlimit_base_c": 87,
    "tlimits_c": {"shutdown": -8, "slowdown": -2, "max_operating": 0, "memory": 0},
    "video_clock_mhz": 1545,
    "idle_clocks_mhz": {"graphics": 345, "video": 765},
    "idle_power_w": 71.5,
    "memory_power_w": 30.8,
    "atomic_caps": "FETCHADD_32 FETCHADD_64 SWAP_32 SWAP_64 CAS_32 CAS_64 ",
    "c2c_mode": "Disabled",
    "edpp_multiplier": "100.00%",
}

MODELS: dict[str, dict[str, Any]] = {
    "10de:2330": {
        **HOPPER,
        "memory_reserved_mib": 479,
    },
    "10de:2335": {
        **HOPPER,
        "inforom": {"oem": "2.1", "ecc": "7.16"},
        "memory_reserved_mib": 614,
        "remap_banks": 3072,
    },
    "10de:2901": {
        "remap_banks": 4096,
        "tlimit_base_c": 85,
        "tlimits_c": {"shutdown": -5, "slowdown": -2, "max_operating": 0, "memory": 0},
        "idle_power_w": 140.0,
    },
    "10de:20b2": {
        "inforom": {"oem": "2.0", "ecc": "6.16"},
        "remap_banks": 640,
        "temperatures_c": {"shutdown": 92, "slowdown": 89, "max_operating": 85, "memory": 95},
        "video_clock_mhz": 1290,
        "idle_clocks_mhz": {"graphics": 210, "video": 795},
        "idle_power_w": 61.0,
        "memory_reserved_mib": 869,
    },
    "10de:20b5": {
        "remap_banks": 640,
        "temperatures_c": {"shutdown": 92, "slowdown": 89, "max_operating": 85, "memory": 95},
        "idle_clocks_mhz": {"graphics": 210, "video": 795},
        "idle_power_w": 44.0,
    },
    "10de:26b9": {
        "inforom": {"oem": "2.1", "ecc": "6.16"},
        "remap_banks": 192,
        "tlimit_base_c": 88,
        "tlimits_c": {"shutdown": -5, "slowdown": -2, "max_operating": 0},
        "video_clock_mhz": 1965,
        "idle_clocks_mhz": {"graphics": 210, "memory": 405, "video": 1185},
        "idle_power_w": 34.0,
        "idle_pstate": "P8",
        "memory_reserved_mib": 609,
    },
    "10de:1eb8": {
        "brand": "NVIDIA",
        "inforom": {"oem": "1.1", "ecc": "5.0"},
        "temperatures_c": {"shutdown": 96, "slowdown": 93, "max_operating": 85},
        "video_clock_mhz": 1470,
        "idle_clocks_mhz": {"graphics": 300, "memory": 405, "video": 540},
        "idle_power_w": 10.4,
        "idle_pstate": "P8",
        "memory_reserved_mib": 388,
        "pages": True,
    },
    "10de:1db6": {
        "temperatures_c": {"shutdown": 90, "slowdown": 87, "max_operating": 83, "memory": 85},
        "idle_clocks_mhz": {"graphics": 135, "video": 555},
        "idle_power_w": 25.0,
        "pages": True,
    },
}
