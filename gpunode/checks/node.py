"""Checks on the node as a whole."""

from collections.abc import Iterator

from gpunode.checks.registry import CheckResult, Status, registry
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
    yield CheckResult(Status.PASS, f"data collected at {node.collected_at}{simulated}")


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
    failed = sorted(unit.name for unit in node.units or () if unit.active == "failed")
    if failed:
        message = f"{counted(len(failed), 'failed unit')}: {listed(failed, most=8)}"
        yield CheckResult(Status.FAIL, message, expected=0, measured=len(failed), unit="failed units")
    else:
        yield CheckResult(Status.PASS, "no unit is failed", expected=0, measured=0, unit="failed units")
