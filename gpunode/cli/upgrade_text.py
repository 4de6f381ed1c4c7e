"""The plan of ``gpunode upgrade`` on one page, and its report."""

from collections.abc import Iterator

from gpunode.change.journal import NodeRecord, RunRecord
from gpunode.change.states import FINAL, OUT_OF_SERVICE, ChangeState
from gpunode.names import fold
from gpunode.stack import Plan
from gpunode.text import counted, listed, moment

RESTARTS = {
    "none": "nothing restarts",
    "load-module": "the module is loaded; no reboot",
    "reload-module": "a reboot, or with nvidia_driver_reload an exchange of the module on the idle node",
    "reboot": "a reboot",
}


def plan_lines(record: RunRecord, document: Plan, drain_s: float, scheduler: str) -> Iterator[str]:
    """Yield the plan: per group from, to, packages, restart and way back; then the waves, and what is left out."""
    yield f"run {record.run}: {counted(len(record.nodes), 'node')}, scheduler {scheduler}"
    for group in document.groups:
        names = [name for name in group.hosts if name in record.nodes]
        if not names or group.stack is None:
            continue
        stack = group.stack
        from_ = sorted({record.nodes[name].before or "no driver" for name in names})
        yield f"{fold(names)}: driver {', '.join(from_)} -> {stack.driver.version} ({listed(stack.gpus)}, {stack.os})"
        packages = [choice.name for choice in stack.packages]
        yield f"  packages    {len(packages)}: {listed(packages, 6)}"
        yield f"  restart     {RESTARTS[stack.restart.kind]}"
        yield f"  way back    {', '.join(from_)} from the same repositories; the preparation asks whether they offer it"
        for warning in stack.warnings:
            yield f"  warning     {warning.text}"
    for wave in sorted({node.wave for node in record.nodes.values()}):
        names = [name for name, node in record.nodes.items() if node.wave == wave]
        yield f"wave {wave + 1}      {fold(names)}{' (canary)' if wave == 0 else ''}"
    if record.nodes:
        yield f"out of service: up to {drain_s / 60:.0f} minutes until idle, and the change; measured in the report"
    for why in sorted(set(record.left_out.values())):
        yield f"left out    {fold(name for name, one in record.left_out.items() if one == why)}: {why}"


def report_lines(record: RunRecord, *, verbose: bool) -> Iterator[str]:
    """Yield a line for each node, and with ``verbose`` its time line."""
    for name, node in record.nodes.items():
        out = minutes_out(node)
        took = "" if out is None else f", {out:.0f} min out of service"
        yield f"{name}: {node.state}, {node.before or 'no driver'} -> {node.target}{took}{_because(node)}"
        if verbose and node.times:
            yield f"  {', '.join(f'{at[11:19]} {what}' for what, at in node.times)}"
    counts = [(state, sum(node.state is state for node in record.nodes.values())) for state in ChangeState]
    yield f"run {record.run}: {', '.join(f'{number} {state}' for state, number in counts if number) or 'no node'}"


def _because(node: NodeRecord) -> str:
    if node.reason:
        return f": {node.reason}"
    return "" if node.state in FINAL or node.state is ChangeState.PLANNED else ": the same command continues"


def minutes_out(node: NodeRecord) -> float | None:
    """Return how long a node was out of service; None if it was not, or the clock was set back."""
    began = next((at for what, at in node.times if what == "drain"), None)
    if began is None:
        return None
    ended = node.times[-1][1] if node.state not in OUT_OF_SERVICE else None
    first, last = moment(began), moment(ended)
    if first is None or last is None or last < first:
        return None
    return (last - first).total_seconds() / 60
