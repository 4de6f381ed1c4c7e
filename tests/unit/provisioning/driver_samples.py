"""Nodes and settings for the tests of the driver's policy."""

from pathlib import Path
from typing import Any

from gpunode.facts import facts_from_bundle
from gpunode.probe import Bundle

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
DAY = "2026-11-20"
WISHES = {"source": "auto", "version": "keep", "flavour": "auto", "switch": False, "cuda": "", "toolkit": ""}
H100 = {"vendor_id": "10de", "device_id": "2330", "class_id": "030200", "subsystem_id": "10de:16c1", "driver": None}
SWITCH = {"vendor_id": "10de", "device_id": "22a3", "class_id": "068000", "subsystem_id": None, "driver": None}
UBUNTU = {
    "source": "nvidia-graphics-drivers-580-server",
    "maintainer": "Ubuntu Developers <ubuntu-devel-discuss@lists.ubuntu.com>",
}
HGX = [
    *({"slot": f"0000:{number:02x}:00.0", **H100} for number in range(16, 24)),
    *({"slot": f"0000:{number:02x}:00.0", **SWITCH} for number in range(4)),
]
APT: dict[str, Any] = {
    "installed": {},
    "sources": [],
    "unfinished": [],
    "held": [],
    "own_holds": [],
    "headers": [],
    "lists": False,
    "architecture": "amd64",
    "interrupted": False,
}


def facts_of(bundle: Path) -> dict[str, Any]:
    """The NodeFacts document of a saved bundle."""
    facts = facts_from_bundle(Bundle.from_json(bundle.read_text(encoding="utf-8"), "a node"))
    return facts.model_dump(mode="json")


def settings_of(stack: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "profile": "headless",
        "extra_packages": [],
        "header_packages": [],
        "persistence": True,
        "switch": False,
        "sources_file": "/etc/apt/sources.list.d/gpunode-nvidia-driver.sources",
        **changes,
    }
