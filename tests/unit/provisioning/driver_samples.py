"""Nodes and settings for the tests of the driver's policy."""

from datetime import date
from pathlib import Path
from typing import Any

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.probe import Bundle
from gpunode.provisioning.driver import apt as driver_apt
from gpunode.provisioning.driver import dnf as driver_dnf
from gpunode.provisioning.driver.model import DriverPlan, DriverRequest, DriverSettings, answered
from gpunode.provisioning.node_stack import NodeStack, resolved
from gpunode.provisioning.state import AptState, DnfState, NodeState
from gpunode.stack import Stack

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
DAY = "2026-11-20"
SETTINGS = {"source": "auto", "version": "keep", "flavour": "auto", "switch": False, "cuda": "", "toolkit": ""}
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
}


def resolved_of(facts: dict[str, Any], **requests: Any) -> NodeStack:
    """The resolver's answer for a node of these facts, with the roles' defaults but for the requests."""
    return resolved(NodeFacts.model_validate(facts), {**SETTINGS, **requests}, today=date.fromisoformat(DAY))


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


REST_OF_APT = {"publishers": {}, "policy_left": False, "key": None, "lock_holder": None, "runfile": False}


def apt_plan(
    facts: dict[str, Any],
    apt: dict[str, Any],
    stack: dict[str, Any],
    answer: dict[str, Any] | None = None,
    **changes: Any,
) -> DriverPlan:
    """The plan of the driver on a node with apt; ``changes`` are settings that are not defaults."""
    known = AptState.model_validate({**REST_OF_APT, **apt})
    return driver_apt.planned(_request(facts, stack, answer, changes, apt=known), known)


def _request(
    facts: dict[str, Any],
    stack: dict[str, Any],
    answer: dict[str, Any] | None,
    changes: dict[str, Any],
    *,
    apt: AptState | None = None,
    dnf: DnfState | None = None,
) -> DriverRequest:
    state = NodeState(facts=NodeFacts.model_validate(facts), apt=apt, dnf=dnf)
    settings = DriverSettings.model_validate(changes)
    return DriverRequest(state, Stack.model_validate(stack), settings, answered(answer))


def dnf_plan(
    facts: dict[str, Any],
    dnf: dict[str, Any],
    stack: dict[str, Any],
    answer: dict[str, Any] | None = None,
    **changes: Any,
) -> DriverPlan:
    """The same on a node with dnf."""
    known = DnfState.model_validate(dnf)
    return driver_dnf.planned(_request(facts, stack, answer, changes, dnf=known), known)
