"""A fleet through a change as text for people: the plan on one page, the nodes while it runs, and the report."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from gpunode.change.journal import FINAL, OUT_OF_SERVICE, ChangeState, NodeRecord, RunRecord
from gpunode.names import fold
from gpunode.stack import Plan
from gpunode.text import counted, listed, moment

RESTARTS = {
    "none": "nothing restarts",
    "load-module": "the module is loaded; no reboot",
    "reload-module": "a reboot, or with nvidia_driver_reload an exchange of the module on the idle node",
    "reboot": "a reboot",
}


def plan_lines(
    record: RunRecord, document: Plan, drain_s: float, scheduler: str, earlier: Sequence[RunRecord] = ()
) -> Iterator[str]:
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
        domains = sorted({record.nodes[name].domain for name in names} - {""})
        together = f" (together: {listed(domains)})" if domains else ""
        yield f"wave {wave + 1}      {fold(names)}{' (canary)' if wave == 0 else ''}{together}"
    if record.nodes:
        yield f"out of service: up to {drain_s / 60:.0f} minutes until idle, then {expected_minutes(record, earlier)}"
    if record.image is not None:
        yield f"measured    before and after the change, in {record.image}"
    for why in sorted(set(record.left_out.values())):
        yield f"left out    {fold(name for name, reason in record.left_out.items() if reason == why)}: {why}"


def expected_minutes(record: RunRecord, earlier: Sequence[RunRecord]) -> str:
    """Return how long nodes take from idle to their return, as earlier runs on these nodes measured it."""
    took = [
        minutes
        for run in earlier
        for name, node in run.nodes.items()
        if name in record.nodes
        and node.state is ChangeState.RETURNED
        and (minutes := minutes_changing(node)) is not None
    ]
    if not took:
        return "the change: no earlier run has measured it on these nodes"
    of = f"median of {counted(len(took), 'return')} in earlier runs, longest {max(took):.0f}"
    return f"about {median(took):.0f} minutes ({of})"


def minutes_changing(node: NodeRecord) -> float | None:
    """Return how long a node took from idle to its end; None if it was not idle or has not ended."""
    idle = next((at for event, at in node.times if event == ChangeState.DRAINED), None)
    ended = node.times[-1][1] if node.times and node.state in FINAL else None
    return None if idle is None or ended is None else _minutes(idle, ended)


def report_lines(record: RunRecord, *, verbose: bool) -> Iterator[str]:
    """Yield a line for each node, and with ``verbose`` its time line."""
    for name, node in record.nodes.items():
        out = minutes_out(node)
        took = "" if out is None else f", {out:.0f} min out of service"
        yield f"{name}: {node.state}, {node.before or 'no driver'} -> {node.target}{took}{_because(node)}"
        if verbose and node.times:
            yield f"  {time_line(node)}"
    counts = ", ".join(f"{number} {state}" for state, number in counted_states(record))
    yield f"run {record.run}: {counts or 'no node'}"


def counted_states(record: RunRecord) -> list[tuple[ChangeState, int]]:
    """Return the number of nodes in each state that a node is in."""
    counts = [(state, sum(node.state is state for node in record.nodes.values())) for state in ChangeState]
    return [(state, number) for state, number in counts if number]


def live_lines(record: RunRecord, at: str) -> Iterator[str]:
    """Yield the nodes of a run by state and act, with how long each has been in it. ``at`` is the time."""
    yield f"run {record.run} of {record.owner}, begun {record.started_at}"
    groups: dict[tuple[ChangeState, str], list[str]] = {}
    for name, node in record.nodes.items():
        groups.setdefault((node.state, node.intent), []).append(name)
    for state in ChangeState:
        for (in_state, act), names in groups.items():
            if in_state is not state:
                continue
            since = min((record.nodes[name].times[-1][1] for name in names if record.nodes[name].times), default=None)
            minutes = _minutes(since, at) if act or state not in FINAL else None
            took = "" if minutes is None else f", for {minutes:.0f} min"
            yield f"  {state:<12} {len(names):>4}  {fold(names)}{f' ({act}{took})' if act else ''}"
            yield from (f"{'':21}{name}: {record.nodes[name].reason}" for name in names if record.nodes[name].reason)


def time_line(node: NodeRecord) -> str:
    """Return a node's states and acts, each with the minutes since the first: ``22:10:01 prepare, +2.1 prepared``."""
    began = node.times[0][1]
    words = [f"{began[11:19]} {node.times[0][0]}"]
    for event, at in node.times[1:]:
        minutes = _minutes(began, at)
        words.append(f"{at[11:19]} {event}" if minutes is None else f"+{minutes:.1f} {event}")
    return ", ".join(words)


def _because(node: NodeRecord) -> str:
    why = node.reason or (node.cause if node.state is ChangeState.ROLLED_BACK else "")
    if why:
        return f": {why}"
    return "" if node.state in FINAL or node.state is ChangeState.PLANNED else ": the same command continues"


def minutes_out(node: NodeRecord) -> float | None:
    """Return how long a node was out of service; None if it was not, or the clock was set back."""
    began = next((at for event, at in node.times if event == "drain"), None)
    if began is None:
        return None
    ended = node.times[-1][1] if node.state not in OUT_OF_SERVICE else None
    return _minutes(began, ended)


def _minutes(began: str | None, ended: str | None) -> float | None:
    first, last = moment(began), moment(ended)
    if first is None or last is None or last < first:
        return None
    return (last - first).total_seconds() / 60


def change_lines(records: Iterable[RunRecord]) -> Iterator[str]:
    """Yield a line for each run: which nodes it changed, and the release that each would go back to."""
    for record in records:
        by_release: dict[str, list[str]] = {}
        for name, release in record.changed.items():
            by_release.setdefault(release, []).append(name)
        goals = "; ".join(f"{fold(names)} back to {release}" for release, names in by_release.items())
        yield f"{record.run}  {record.started_at}  {goals}"
