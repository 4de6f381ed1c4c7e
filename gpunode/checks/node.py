"""Checks on the node as a whole."""

from collections.abc import Iterator

from gpunode.checks.compare import passed
from gpunode.checks.declared import declare
from gpunode.checks.registry import CheckResult, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.units import NO_SYSTEMD


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


declare(
    "node.units-failed",
    fact="units[active=failed].name",
    count=True,
    comparison="equals",
    value=0,
    good="no unit is failed",
    message="{measured:failed unit}: {items}",
    nothing=NO_SYSTEMD,
    unit="failed units",
    means="No systemd unit is in state failed.",
    remedy="systemctl status UNIT and journalctl -u UNIT show the cause; run systemctl reset-failed after "
    "repairing it.",
    state="observe",
    actions=("fix_configuration",),
)


declare(
    "node.reboot-pending",
    fact="reboot_required[]",
    count=True,
    comparison="equals",
    value=0,
    status="warn",
    good="no reboot is pending",
    message="a reboot is pending: {items}",
    means="No installed package waits for a reboot.",
    remedy="Reboot the node when it is idle: gpunode provision -i INVENTORY -l HOST -e gpunode_reboot=when_needed",
    state="observe",
    actions=("restart_os",),
)
