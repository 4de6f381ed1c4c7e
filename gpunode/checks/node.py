"""Checks on the node as a whole."""

from collections.abc import Iterator

from gpunode.checks.compare import at_most, passed
from gpunode.checks.registry import CheckResult, registry
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed


@registry.check(
    "node.reachable",
    means="The node was reached and its data collected. An unreachable host has only this finding, as an error.",
    remedy="Try: ansible -m ping HOST",
    state="none",
    actions=("none",),
)
def reachable(node: NodeFacts) -> Iterator[CheckResult]:
    simulated = " on a simulated node" if node.simulated else ""
    yield passed(f"data collected at {node.collected_at}{simulated}")


@registry.check(
    "node.units-failed",
    needs=("units",),
    means="No systemd unit is in state failed.",
    remedy="systemctl status UNIT and journalctl -u UNIT show the cause; run systemctl reset-failed after "
    "repairing it.",
    state="observe",
    actions=("fix_configuration",),
)
def units_failed(node: NodeFacts) -> Iterator[CheckResult]:
    names = sorted(unit.name for unit in node.units or () if unit.active == "failed")
    message = f"{counted(len(names), 'failed unit')}: {listed(names, most=8)}"
    yield at_most(len(names), 0, "no unit is failed", message, unit="failed units")
