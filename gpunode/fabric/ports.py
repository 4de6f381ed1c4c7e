"""RDMA ports between nodes by perftest, each with the same one of another node, with their error counters. Pure.

perftest prints ``#bytes #iterations BW peak BW average MsgRate`` and ``#bytes #iterations t_min t_max t_typical``:
linux-rdma/perftest, src/perftest_parameters.h. The programs run on the nodes: ``gpunode/onnode/fabric.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gpunode.checks import Finding, Status
from gpunode.fabric.model import PortMeasurement
from gpunode.fabric.nccl_view import active_ports
from gpunode.fabric.preflight import finding
from gpunode.facts import NodeFacts
from gpunode.names import fold
from gpunode.text import counted, listed
from gpunode.workload.payload.fabric_search import all_rounds

PROGRAMS = ("ib_write_bw", "ib_write_lat")
ROUNDS = 2
"""Partners of each node: two of them distinguish a slow port from a slow partner."""
SHARE = 0.9
SOURCE = (
    "Azure/azurehpc-health-checks: ib_write_bw at least 180 of 200 and 360 of 400 Gbit/s; Oracle's multi-node tests: "
    "192 of 200, 384 of 400"
)
LATENCY_FACTOR, LATENCY_LEAST_US = 3.0, 5.0
"""Our choice: a port is slow to answer beyond three times the usual latency, and 5 us more."""
REMEDY = "Compare the port's counters, cable and firmware with another one: ibqueryerrors, mlxlink, ethtool -S."


@dataclass(frozen=True)
class PortPair:
    """One port of a node, measured with the same port of another."""

    node: str
    partner: str
    device: str


def plan(nodes: Mapping[str, NodeFacts]) -> list[dict[str, tuple[str, tuple[str, ...]]]]:
    """Return the rounds: each server's name with its client and the devices that both have with an active port.

    Empty if fewer than two nodes have such a device. ``nodes``: those with perftest.
    """
    with_ports = {name: set(active_ports(facts)) for name, facts in nodes.items()}
    names = sorted(name for name, devices in with_ports.items() if devices)
    if len(names) < len(("server", "client")):
        return []
    rounds = []
    for number, pairs in enumerate(all_rounds(list(range(len(names))))):
        if number == ROUNDS:
            break
        servers = {}
        for server, client in pairs:
            shared = tuple(sorted(with_ports[names[server]] & with_ports[names[client]]))
            if shared:
                servers[names[server]] = (names[client], shared)
        rounds.append(servers)
    return rounds


def findings_of(
    measured: Sequence[tuple[PortPair, PortMeasurement]],
    counters: Mapping[str, Mapping[str, int]],
    nodes: Mapping[str, NodeFacts],
) -> Iterator[tuple[str, Finding]]:
    """Yield the verdict on each node's ports. ``counters``: how much errors increased meanwhile, by node and name."""
    slow: dict[tuple[str, str], list[tuple[PortPair, PortMeasurement]]] = {}
    fast: set[tuple[str, str]] = set()
    latencies = [reading.latency_us for _, reading in measured if reading.latency_us is not None]
    usual_us = median(latencies) if latencies else None
    for pair, reading in measured:
        ends = [(pair.node, pair.device), (pair.partner, pair.device)]
        if _slow(pair, reading, nodes, usual_us):
            for end in ends:
                slow.setdefault(end, []).append((pair, reading))
        else:
            fast.update(ends)
    # A port that is in time with another partner is not the cause.
    bad = {end: several for end, several in slow.items() if end not in fast}
    explained = set()
    for end, several in sorted(bad.items()):
        node, device = end
        partners = sorted({pair.partner if pair.node == node else pair.node for pair, _ in several})
        if all((partner, device) in bad and len(bad[partner, device]) > len(several) for partner in partners):
            continue
        explained.add(end)
        reading = min(several, key=lambda item: item[1].gbit_per_s or 0.0)[1]
        text = f"{_rate(reading, node, device, nodes)} with {fold(partners)}"
        yield node, _finding(Status.FAIL, device, text, reading, nodes.get(node))
    for node, increased in sorted(counters.items()):
        if increased:
            rows = listed([f"{name} +{number}" for name, number in sorted(increased.items())], most=5)
            text = f"error counters increased while the ports were measured: {rows}"
            yield node, finding("nodes.ports-errors", Status.WARN, "node", text, REMEDY)
    named = {node for node, _ in explained}
    for node in sorted({end for pair, _ in measured for end in (pair.node, pair.partner)} - named):
        readings = [reading for pair, reading in measured if node in (pair.node, pair.partner)]
        rates = [reading.gbit_per_s for reading in readings if reading.gbit_per_s is not None]
        slowest = f", the slowest at {min(rates):.4g} Gbit/s" if rates else ""
        delay = f", {usual_us:.3g} us" if usual_us is not None else ""
        text = f"{counted(len(readings), 'measurement')} of its ports by perftest in time{slowest}{delay}"
        yield node, finding("nodes.rdma", Status.PASS, "node", text)


def _slow(pair: PortPair, reading: PortMeasurement, nodes: Mapping[str, NodeFacts], usual_us: float | None) -> bool:
    if reading.error is not None or reading.gbit_per_s is None:
        return True
    least = min((_port_rate(nodes.get(node), pair.device) for node in (pair.node, pair.partner)), default=0.0)
    if reading.gbit_per_s < SHARE * least:
        return True
    late_us = None if usual_us is None else max(LATENCY_FACTOR * usual_us, usual_us + LATENCY_LEAST_US)
    return late_us is not None and reading.latency_us is not None and reading.latency_us > late_us


def _port_rate(node: NodeFacts | None, device: str) -> float:
    return max(active_ports(node).get(device, [0.0]))


def _rate(reading: PortMeasurement, node: str, device: str, nodes: Mapping[str, NodeFacts]) -> str:
    if reading.error is not None or reading.gbit_per_s is None:
        return f"ib_write_bw failed: {reading.error or 'no rate'}"
    delay = "" if reading.latency_us is None else f", {reading.latency_us:.3g} us"
    return f"{reading.gbit_per_s:.4g} of {_port_rate(nodes.get(node), device):.4g} Gbit/s{delay}"


def _finding(status: Status, device: str, text: str, reading: PortMeasurement, node: NodeFacts | None) -> Finding:
    expected = round(SHARE * _port_rate(node, device), 1) or None
    return Finding(
        check="nodes.rdma",
        status=status,
        component=device,
        message=text,
        expected=expected,
        measured=reading.gbit_per_s,
        unit="Gbit/s",
        source=SOURCE,
        remedy=REMEDY,
    )
