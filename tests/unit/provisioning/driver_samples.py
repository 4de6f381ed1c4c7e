"""Nodes and settings for the tests of the driver's policy."""

from datetime import date
from pathlib import Path
from typing import Any

from gpunode.facts import facts_from_bundle
from gpunode.probe import Bundle
from gpunode.provisioning.documents import node_of
from gpunode.provisioning.node_stack import NodeStack, resolved

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


def resolved_of(facts: dict[str, Any], **requests: Any) -> NodeStack:
    """The resolver's answer for a node of these facts, with the roles' defaults but for the requests."""
    return resolved(node_of(facts), {**WISHES, **requests}, today=date.fromisoformat(DAY))


def stack_of(facts: dict[str, Any], **requests: Any) -> dict[str, Any]:
    """The stack of a node, as a document."""
    answer = resolved_of(facts, **requests)
    assert answer.problems == ()
    assert answer.stack is not None
    return answer.stack.model_dump(mode="json", by_alias=True)


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
