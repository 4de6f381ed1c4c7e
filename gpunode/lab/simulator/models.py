"""What the tools print of a GPU model beyond the hardware description, by PCI device id.

From captures of real machines with that model; what no capture told is left out, and is then printed as N/A. A key
that the hardware description has goes before the one here.
"""

from __future__ import annotations

from typing import Any

HOPPER = {
    "inforom": {"image": "G520.0200.00.05", "oem": "2.1", "ecc": "7.16"},
    "bar1_mib": 131072,
    "remap_banks": 2560,
    "tlimit_base_c": 87,
    "tlimits_c": {"shutdown": -8, "slowdown": -2, "max_operating": 0, "memory": 0},
    "video_clock_mhz": 1545,
    "idle_clocks_mhz": {"graphics": 345, "video": 765},
    "idle_power_w": 71.5,
    "memory_power_w": 30.8,
    "atomic_caps": "FETCHADD_32 FETCHADD_64 SWAP_32 SWAP_64 CAS_32 CAS_64 ",
    "c2c_mode": "Disabled",
    "bbx": True,
    "edpp_multiplier": "100.00%",
}

MODELS: dict[str, dict[str, Any]] = {
    "10de:2330": {
        **HOPPER,
        "board_part_number": "692-2G520-0200-000",
        "gpu_part_number": "2330-885-A1",
        "vbios_version": "96.00.A5.00.01",
        "memory_reserved_mib": 479,
    },
    "10de:2335": {
        **HOPPER,
        "board_part_number": "695-2G520-0280-001",
        "gpu_part_number": "2335-895-A1",
        "vbios_version": "96.00.A5.00.03",
        "inforom": {"image": "G520.0280.02.02", "oem": "2.1", "ecc": "7.16"},
        "memory_reserved_mib": 614,
        "bar1_mib": 262144,
        "remap_banks": 3072,
    },
    "10de:2901": {
        "remap_banks": 4096,
        "tlimit_base_c": 85,
        "tlimits_c": {"shutdown": -5, "slowdown": -2, "max_operating": 0, "memory": 0},
        "idle_power_w": 140.0,
    },
    "10de:20b2": {
        "board_part_number": "692-2G506-0212-002",
        "gpu_part_number": "20B2-895-A1",
        "vbios_version": "92.00.36.00.02",
        "inforom": {"image": "G506.0212.00.01", "oem": "2.0", "ecc": "6.16"},
        "bar1_mib": 131072,
        "remap_banks": 640,
        "temperatures_c": {"shutdown": 92, "slowdown": 89, "max_operating": 85, "memory": 95},
        "video_clock_mhz": 1290,
        "idle_clocks_mhz": {"graphics": 210, "video": 795},
        "idle_power_w": 61.0,
        "memory_reserved_mib": 869,
        "application_clock_mhz": 1275,
        "bbx": True,
    },
    "10de:20b5": {
        "bar1_mib": 131072,
        "remap_banks": 640,
        "temperatures_c": {"shutdown": 92, "slowdown": 89, "max_operating": 85, "memory": 95},
        "idle_clocks_mhz": {"graphics": 210, "video": 795},
        "idle_power_w": 44.0,
    },
    "10de:26b9": {
        "board_part_number": "900-2G133-0080-000",
        "gpu_part_number": "26B9-896-A1",
        "vbios_version": "95.02.66.00.02",
        "inforom": {"image": "G133.0242.00.03", "oem": "2.1", "ecc": "6.16"},
        "bar1_mib": 65536,
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
        "gpu_part_number": "900-2G183-0000-001",
        "vbios_version": "90.04.84.00.06",
        "inforom": {"image": "G183.0200.00.02", "oem": "1.1", "ecc": "5.0"},
        "bar1_mib": 256,
        "temperatures_c": {"shutdown": 96, "slowdown": 93, "max_operating": 85},
        "video_clock_mhz": 1470,
        "idle_clocks_mhz": {"graphics": 300, "memory": 405, "video": 540},
        "idle_power_w": 10.4,
        "idle_pstate": "P8",
        "memory_reserved_mib": 388,
        "application_clock_mhz": 585,
        "pages": True,
    },
    "10de:1db6": {
        "bar1_mib": 32768,
        "temperatures_c": {"shutdown": 90, "slowdown": 87, "max_operating": 83, "memory": 85},
        "idle_clocks_mhz": {"graphics": 135, "video": 555},
        "idle_power_w": 25.0,
        "application_clock_mhz": 1230,
        "pages": True,
    },
}
