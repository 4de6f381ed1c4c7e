"""What must be true before ranks meet: names, addresses, ports, MTU, clocks, versions, idle GPUs; RDMA ports. Pure.

RDMA ports are measured by perftest, each with the same one of another node, with their error counters. It prints
``#bytes #iterations BW peak BW average MsgRate`` and ``#bytes #iterations t_min t_max t_typical``: linux-rdma/perftest,
src/perftest_parameters.h. The programs run on the nodes: ``gpunode/onnode/fabric.py``.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gpunode.checks import Finding, Status
from gpunode.fabric.model import Hello, InterfaceAddress, PortMeasurement, Reached
from gpunode.facts import NodeFacts
from gpunode.names import fold
from gpunode.text import counted, listed
from gpunode.workload.payload.fabric_search import FEW, all_rounds, halves

VIRTUAL = re.compile(r"lo$|(docker|veth|br-|virbr|cni|flannel|cali|podman|lxc|tun|tap|wg|kube|nodelocaldns)")
"""Interfaces of containers, virtual machines and tunnels: no other node is reached over them."""
PORT_BASES = (29400, 29500, 29600, 29700)
PORTS = 16
"""Each part of the payload meets at a port of its own, from the base on."""
CLOCK_WARN_S = 1.0
ETHERNET_MTU, LARGEST = 1500, 65535


@dataclass(frozen=True)
class Ready:
    """A node that can take part, as far as it is known by itself."""

    name: str
    hello: Hello
    ranks: int
    gpu_model: str | None = None
    driver: str | None = None
    image: str | None = None
    """Id of the container image; None: no container."""
    clock_offset_s: float = 0.0
    """Its clock minus this machine's."""
    clock_error_s: float = 0.0


@dataclass(frozen=True)
class Meeting:
    """The address of each node for the ranks, by name."""

    addresses: Mapping[str, InterfaceAddress]


def usable(hello: Hello, interface: str | None) -> list[InterfaceAddress]:
    """Return the addresses over which other nodes may reach this one."""
    addresses = [
        address
        for address in hello.addresses
        if not ipaddress.ip_address(address.address).is_loopback
        and not ipaddress.ip_address(address.address).is_link_local
    ]
    if interface is not None:
        return [address for address in addresses if address.interface == interface]
    return [address for address in addresses if not VIRTUAL.match(address.interface)]


def network(address: InterfaceAddress) -> str:
    """Return the network of an address."""
    return str(ipaddress.ip_network(f"{address.address}/{address.prefix}", strict=False))


def chosen_addresses(nodes: Sequence[Ready], interface: str | None) -> dict[str, InterfaceAddress]:
    """Return the address of each node that ranks use: in the fastest network, of equal ones in that of most nodes.

    A node without a usable address is left out.
    """
    candidates = {node.name: usable(node.hello, interface) for node in nodes}
    shared = Counter(net for several in candidates.values() for net in {network(address) for address in several})
    names = Counter(name for several in candidates.values() for name in {address.interface for address in several})
    return {
        name: max(
            several,
            key=lambda address: (address.speed_mbit_per_s or 0, shared[network(address)], names[address.interface]),
        )
        for name, several in candidates.items()
        if several
    }


def port_base(first: Hello) -> int | None:
    """Return the first base of ports that are free on the node of rank 0; None if there is none."""
    return next((base for base in PORT_BASES if not set(range(base, base + PORTS)) & set(first.taken)), None)


def all_ports() -> list[int]:
    """Return the ports that ranks may use."""
    return [port for base in PORT_BASES for port in range(base, base + PORTS)]


def dial_plan(names: Sequence[str]) -> dict[str, list[str]]:
    """Return which nodes each node dials: a few nodes all others; of many each log2(n), and all the first one."""
    numbers = list(range(len(names)))
    dials: dict[str, set[str]] = {name: set() for name in names}
    for pairs in all_rounds(numbers) if len(names) <= FEW else halves(numbers):
        for number, other in pairs:
            dials[names[number]].add(names[other])
            dials[names[other]].add(names[number])
    for name in names[1:]:
        dials[name].add(names[0])
    return {name: sorted(others) for name, others in dials.items()}


def finding(check: str, status: Status, component: str, message: str, remedy: str | None = None) -> Finding:
    """Return a finding of the fabric."""
    return Finding(check=check, status=status, component=component, message=message, remedy=remedy)


def own_findings(node: Ready) -> Iterator[Finding]:
    """Yield what is wrong with a node by itself: its name, its ports."""
    loopback = [address for address in node.hello.resolved if address.startswith("127.")]
    name = node.hello.hostname
    if loopback:
        yield finding(
            "nodes.names",
            Status.WARN,
            "node",
            f"{name} resolves to {loopback[0]} on the node itself: jobs that publish their own name's address are not "
            "reached by other nodes",
            f"Correct the line of {name} in /etc/hosts; until then set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )
    elif not node.hello.resolved:
        yield finding(
            "nodes.names",
            Status.WARN,
            "node",
            f"{name} does not resolve on the node itself",
            "Add it to DNS or to /etc/hosts.",
        )
    if node.hello.taken:
        ports = ", ".join(map(str, node.hello.taken[:5]))
        yield finding(
            "nodes.ports", Status.NOTE, "node", f"ports in use: {ports}; ranks of other programs may be running"
        )


def differences(nodes: Sequence[Ready]) -> dict[str, list[Finding]]:
    """Return, by node, how it differs from most of them: GPU model, driver, image, clock."""
    findings: dict[str, list[Finding]] = {node.name: [] for node in nodes}
    if not nodes:
        return findings
    rows = (
        ("nodes.models", "GPU model", {node.name: node.gpu_model for node in nodes}, Status.WARN),
        ("nodes.driver", "driver", {node.name: node.driver for node in nodes}, Status.WARN),
        ("nodes.image", "container image", {node.name: node.image for node in nodes}, Status.FAIL),
    )
    for check, label, values, status in rows:
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        usual, number = counts.most_common(1)[0]
        for name, value in values.items():
            if value != usual:
                text = f"{label} {value or 'none'}, {number} of {len(nodes)} nodes have {usual or 'none'}"
                findings[name].append(finding(check, status, "node", text, REMEDIES[check]))
    usual_s = median(node.clock_offset_s for node in nodes)
    for node in nodes:
        off = node.clock_offset_s - usual_s
        if abs(off) > CLOCK_WARN_S + node.clock_error_s:
            text = f"the clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'} of the other nodes'"
            findings[node.name].append(finding("nodes.clock", Status.WARN, "node", text, REMEDIES["nodes.clock"]))
    return findings


REMEDIES = {
    "nodes.models": "Run the nodes of one model together: --limit.",
    "nodes.driver": "gpunode plan -i INVENTORY, then gpunode provision: one driver on all nodes.",
    "nodes.image": "Use one image by its digest on all nodes: --image NAME@sha256:DIGEST.",
    "nodes.clock": "Start time synchronization on the node: timedatectl, chronyc tracking.",
    "nodes.reach": "Open the ports between the nodes' data networks (firewall, security groups, routes), or name "
    "another interface: --interface.",
    "nodes.mtu": "Set one MTU on all interfaces and switch ports of the network.",
}


@dataclass(frozen=True)
class Dialed:
    """The conclusion from what nodes reached of each other."""

    findings: Mapping[str, Sequence[Finding]]
    unreachable: tuple[str, ...]
    """Nodes that do not take part."""


def judged_dials(meeting: Meeting, dials: Mapping[str, Mapping[str, Reached]]) -> Dialed:
    """Return what is wrong between nodes, attributed to as few nodes as possible."""
    failed = {
        (dialer, other): reached.tcp
        for dialer, others in dials.items()
        for other, reached in others.items()
        if reached.tcp is not None
    }
    small = {
        (dialer, other): reached.mtu
        for dialer, others in dials.items()
        for other, reached in others.items()
        if reached.tcp is None and reached.mtu is not None and reached.mtu < _expected_mtu(meeting, dialer, other)
    }
    findings: dict[str, list[Finding]] = {}
    tried = Counter(name for dialer, others in dials.items() for other in others for name in (dialer, other))
    unreachable = []
    for name, pairs in _covered(list(failed), tried):
        unreachable.append(name)
        partners = {other for pair in pairs for other in pair} - {name}
        reasons = Counter(failed[pair] for pair in pairs).most_common(1)[0][0]
        text = f"not connected with {fold(partners)} over {_where(meeting, name)}: {reasons}"
        findings.setdefault(name, []).append(finding("nodes.reach", Status.FAIL, "node", text, REMEDIES["nodes.reach"]))
    for name, pairs in _covered(list(small), tried):
        partners = {other for pair in pairs for other in pair} - {name}
        least = min(small[pair] for pair in pairs)
        text = (
            f"packets of more than {least} bytes do not pass between it and {fold(partners)} without fragmentation; "
            f"the interfaces' MTU is {_expected_mtu(meeting, *pairs[0])}"
        )
        findings.setdefault(name, []).append(finding("nodes.mtu", Status.FAIL, "node", text, REMEDIES["nodes.mtu"]))
    sizes = {name: address.mtu for name, address in meeting.addresses.items() if address.mtu is not None}
    counts = Counter(sizes.values())
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        for name, mtu in sizes.items():
            if mtu != usual:
                text = f"{meeting.addresses[name].interface} has MTU {mtu}, most other nodes have {usual}"
                findings.setdefault(name, []).append(
                    finding("nodes.mtu", Status.FAIL, meeting.addresses[name].interface, text, REMEDIES["nodes.mtu"])
                )
    return Dialed(findings, tuple(unreachable))


def _expected_mtu(meeting: Meeting, dialer: str, other: str) -> int:
    sizes = [meeting.addresses[name].mtu or ETHERNET_MTU for name in (dialer, other)]
    return min(*sizes, LARGEST)


def _where(meeting: Meeting, name: str) -> str:
    address = meeting.addresses[name]
    return f"{address.interface} ({address.address})"


def _covered(pairs: list[tuple[str, str]], tried: Counter[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield nodes with their pairs until all pairs are covered: of the node with most failed pairs first."""
    left = list(pairs)
    while left:
        counts = Counter(name for pair in left for name in pair)
        name = max(sorted(counts), key=lambda node: (counts[node], counts[node] / max(1, tried[node])))
        covered = [pair for pair in left if name in pair]
        yield name, covered
        left = [pair for pair in left if name not in pair]


PORT_PROGRAMS = ("ib_write_bw", "ib_write_lat")
PORT_ROUNDS = 2
"""Partners of each node: two of them distinguish a slow port from a slow partner."""
PORT_SHARE = 0.9
PORT_SOURCE = (
    "Azure/azurehpc-health-checks: ib_write_bw at least 180 of 200 and 360 of 400 Gbit/s; Oracle's multi-node tests: "
    "192 of 200, 384 of 400"
)
LATENCY_FACTOR, LATENCY_LEAST_US = 3.0, 5.0
"""Our choice: a port is slow to answer beyond three times the usual latency, and 5 us more."""
PORT_REMEDY = "Compare the port's counters, cable and firmware with another one: ibqueryerrors, mlxlink, ethtool -S."


@dataclass(frozen=True)
class PortPair:
    """One port of a node, measured with the same port of another."""

    node: str
    partner: str
    device: str


def active_ports(node: NodeFacts | None) -> dict[str, list[float]]:
    """Return the rates in Gbit/s of a node's active RDMA ports by device; 0 for an unknown rate."""
    rates: dict[str, list[float]] = {}
    for device in (node.infiniband if node is not None else None) or ():
        for port in device.ports:
            if port.state == "ACTIVE":
                rates.setdefault(device.name, []).append(port.rate_gbit_per_s or 0.0)
    return rates


def port_plan(nodes: Mapping[str, NodeFacts]) -> list[dict[str, tuple[str, tuple[str, ...]]]]:
    """Return the rounds: each server's name with its client and the devices that both have with an active port.

    Empty if fewer than two nodes have such a device. ``nodes``: those with perftest.
    """
    with_ports = {name: set(active_ports(facts)) for name, facts in nodes.items()}
    names = sorted(name for name, devices in with_ports.items() if devices)
    if len(names) < len(("server", "client")):
        return []
    rounds = []
    for number, pairs in enumerate(all_rounds(list(range(len(names))))):
        if number == PORT_ROUNDS:
            break
        servers = {}
        for server, client in pairs:
            shared = tuple(sorted(with_ports[names[server]] & with_ports[names[client]]))
            if shared:
                servers[names[server]] = (names[client], shared)
        rounds.append(servers)
    return rounds


def port_findings(
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
        if _slow_port(pair, reading, nodes, usual_us):
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
        text = f"{_rate_text(reading, node, device, nodes)} with {fold(partners)}"
        yield node, _port_finding(Status.FAIL, device, text, reading, nodes.get(node))
    for node, increased in sorted(counters.items()):
        if increased:
            rows = listed([f"{name} +{number}" for name, number in sorted(increased.items())], most=5)
            text = f"error counters increased while the ports were measured: {rows}"
            yield node, finding("nodes.ports-errors", Status.WARN, "node", text, PORT_REMEDY)
    named = {node for node, _ in explained}
    for node in sorted({end for pair, _ in measured for end in (pair.node, pair.partner)} - named):
        readings = [reading for pair, reading in measured if node in (pair.node, pair.partner)]
        rates = [reading.gbit_per_s for reading in readings if reading.gbit_per_s is not None]
        slowest = f", the slowest at {min(rates):.4g} Gbit/s" if rates else ""
        delay = f", {usual_us:.3g} us" if usual_us is not None else ""
        text = f"{counted(len(readings), 'measurement')} of its ports by perftest in time{slowest}{delay}"
        yield node, finding("nodes.rdma", Status.PASS, "node", text)


def _slow_port(
    pair: PortPair, reading: PortMeasurement, nodes: Mapping[str, NodeFacts], usual_us: float | None
) -> bool:
    if reading.error is not None or reading.gbit_per_s is None:
        return True
    least = min((_port_rate(nodes.get(node), pair.device) for node in (pair.node, pair.partner)), default=0.0)
    if reading.gbit_per_s < PORT_SHARE * least:
        return True
    late_us = None if usual_us is None else max(LATENCY_FACTOR * usual_us, usual_us + LATENCY_LEAST_US)
    return late_us is not None and reading.latency_us is not None and reading.latency_us > late_us


def _port_rate(node: NodeFacts | None, device: str) -> float:
    return max(active_ports(node).get(device, [0.0]))


def _rate_text(reading: PortMeasurement, node: str, device: str, nodes: Mapping[str, NodeFacts]) -> str:
    if reading.error is not None or reading.gbit_per_s is None:
        return f"ib_write_bw failed: {reading.error or 'no rate'}"
    delay = "" if reading.latency_us is None else f", {reading.latency_us:.3g} us"
    return f"{reading.gbit_per_s:.4g} of {_port_rate(nodes.get(node), device):.4g} Gbit/s{delay}"


def _port_finding(status: Status, device: str, text: str, reading: PortMeasurement, node: NodeFacts | None) -> Finding:
    expected = round(PORT_SHARE * _port_rate(node, device), 1) or None
    return Finding(
        check="nodes.rdma",
        status=status,
        component=device,
        message=text,
        expected=expected,
        measured=reading.gbit_per_s,
        unit="Gbit/s",
        source=PORT_SOURCE,
        remedy=PORT_REMEDY,
    )
