"""What NCCL reports of its ranks, compared with the nodes' facts, and its rate with the nodes' adapters. Pure."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpunode.checks import Expectation, Finding, Status
from gpunode.checks.figures import judged
from gpunode.checks.machine_shape import shape_of
from gpunode.expectations import Figure, Shape
from gpunode.expectations.limits import Where
from gpunode.fabric.model import CollectiveRates, RankConnections, RankView
from gpunode.fabric.preflight import finding
from gpunode.facts import NodeFacts
from gpunode.names import fold
from gpunode.text import counted, number_ranges, one_line
from gpunode.workload.payload.nccl import bus_factor

DISTANCES = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
"""Paths between a GPU and an adapter, the shortest first: legend of ``nvidia-smi topo -m``."""
IN_WORDS = {"PHB": "through the processor", "NODE": "across host bridges", "SYS": "across the sockets"}
SMALLEST_BYTES = 1024
"""Up to this size a message's time is latency."""
_SOCKET = re.compile(r"socket", re.IGNORECASE)


@dataclass(frozen=True)
class RankPlace:
    """A rank on its node."""

    rank: int
    node: str
    facts: NodeFacts | None
    view: RankView

    @property
    def gpu(self) -> int | None:
        """Return nvidia-smi's index of its GPU; None if no GPU has its bus id."""
        gpus = () if self.facts is None else self.facts.smi_gpus
        return next((gpu.index for gpu in gpus if gpu.pci_bus_id == self.view.gpu and gpu.pci_bus_id), None)

    @property
    def component(self) -> str:
        """Return its component in findings."""
        return f"rank {self.rank}" if self.gpu is None else f"gpu{self.gpu}"


def view_findings(
    views: Sequence[RankView],
    node_of: Callable[[int], str],
    facts: Mapping[str, NodeFacts],
    connections: RankConnections = RankConnections(),  # noqa: B008 (frozen)
) -> Iterator[tuple[str, Finding]]:
    """Yield what is wrong with a rank's connections, with its node."""
    seats = [(rank, node_of(rank), view) for view in views for rank in view.ranks]
    places = [RankPlace(rank, name, facts.get(name), view) for rank, name, view in seats]
    places.sort(key=lambda one: one.rank)
    yield from _sockets(places)
    yield from _direct(places)
    yield from _nvls(places)
    for place in places:
        yield from _adapter(place)
    by_rank = {place.rank: place for place in places}
    yield from _within(by_rank, connections)
    yield from _entered(len(by_rank), node_of, connections)


def _within(places: Mapping[int, RankPlace], connections: RankConnections) -> Iterator[tuple[str, Finding]]:
    """Yield pairs of GPUs of one node that are connected over the network, or not over their NVLink."""
    bad: dict[tuple[str, str], list[str]] = {}
    for one, other, way in connections.pairs:
        here, there = places.get(one), places.get(other)
        if here is None or there is None or here.node != there.node or way >= len(connections.ways):
            continue
        name, joined = one_line(connections.ways[way])[:40], _nvlink(here, there)
        if name.startswith("NET/"):
            bad.setdefault((here.node, name), []).append(f"rank {one} and {other}")
        elif joined is not None and not name.startswith("P2P"):
            text = f"{name}, not by their NVLink ({joined})"
            bad.setdefault((here.node, text), []).append(f"{here.component} and {there.component}")
    for (node, name), pairs in sorted(bad.items()):
        more = f", and {counted(len(pairs) - 1, 'other pair')}" if len(pairs) > 1 else ""
        text = f"NCCL connects {pairs[0]} of this node by {name}{more}"
        remedy = REMEDIES["network within"] if name.startswith("NET/") else REMEDIES["no peer access"]
        yield node, finding("nodes.pairs", Status.FAIL, "node", text, remedy)


def _nvlink(one: RankPlace, other: RankPlace) -> str | None:
    """Return the NVLink between two GPUs of a node, as ``NV18``; None if there is none, or if it is unknown."""
    document = one.facts.topology.document if one.facts is not None and one.facts.topology else None
    if document is None or one.gpu is None or other.gpu is None:
        return None
    link = document.links.get(f"GPU{one.gpu}", {}).get(f"GPU{other.gpu}")
    return link if link is not None and re.fullmatch(r"NV\d+", link) else None


def _entered(ranks: int, node_of: Callable[[int], str], connections: RankConnections) -> Iterator[tuple[str, Finding]]:
    """Yield nodes that a ring, or the first tree, enters more than once over the network: their adapters then carry the
    same data several times.
    """
    network = {(one, other) for one, other, way in connections.pairs if _is_network(connections, way)}
    graphs = [
        ("ring", list(zip(ring, (*ring[1:], ring[0]), strict=True)))
        for ring in connections.rings
        if len(set(ring)) == len(ring) == ranks
    ]
    parents = [(parent, rank) for rank, parent in enumerate(connections.tree) if parent is not None and parent >= 0]
    graphs.append(("tree", parents))
    most: dict[str, tuple[int, str]] = {}
    for kind, pairs in graphs:
        entries = Counter(node_of(two) for one, two in pairs if network & {(one, two), (two, one)})
        for node, number in entries.items():
            most[node] = max(most.get(node, (0, kind)), (number, kind))
    for node, (number, kind) in sorted(most.items()):
        if number > 1:
            text = f"a {kind} of NCCL enters this node {number} times over the network, once is enough"
            yield node, finding("nodes.rings", Status.WARN, "node", text, REMEDIES["nodes.rings"])


def _is_network(connections: RankConnections, way: int) -> bool:
    return way < len(connections.ways) and connections.ways[way].startswith("NET/")


def active_ports(node: NodeFacts | None) -> dict[str, list[float]]:
    """Return the rates in Gbit/s of a node's active RDMA ports by device; 0 for an unknown rate."""
    found: dict[str, list[float]] = {}
    for device in (node.infiniband if node is not None else None) or ():
        for port in device.ports:
            if port.state == "ACTIVE":
                found.setdefault(device.name, []).append(port.rate_gbit_per_s or 0.0)
    return found


def nic_gb_per_s(node: NodeFacts) -> float | None:
    """Return the sum of a node's active RDMA ports in GB/s; None if there is none, or a rate is unknown."""
    rates = [rate for several in active_ports(node).values() for rate in several]
    return sum(rates) / 8 if rates and all(rates) else None


def _sockets(places: Sequence[RankPlace]) -> Iterator[tuple[str, Finding]]:
    by_node: dict[str, list[RankPlace]] = {}
    for place in places:
        if place.view.network is not None and _SOCKET.search(place.view.network) and active_ports(place.facts):
            by_node.setdefault(place.node, []).append(place)
    for name, several in by_node.items():
        reasons = [one_line(text)[:200] for place in several for text in place.view.fallbacks]
        why = f": {reasons[0]}" if reasons else ""
        text = f"NCCL falls back to TCP (NET/{one_line(str(several[0].view.network))}), and the node has active RDMA "
        text += f"ports{why}"
        yield name, finding("nodes.transport", Status.FAIL, "node", text, REMEDIES["nodes.transport"])


def _direct(places: Sequence[RankPlace]) -> Iterator[tuple[str, Finding]]:
    over_rdma = [place for place in places if (place.view.direct or place.view.staged) and not _by_socket(place)]
    without = [place for place in over_rdma if not place.view.direct]
    if not without:
        return
    if len(without) == len(over_rdma):
        for name in dict.fromkeys(place.node for place in without):
            text = "no rank uses GPUDirect RDMA: messages are copied through the host's memory"
            yield name, finding("nodes.gpudirect", Status.WARN, "node", text, REMEDIES["nodes.gpudirect"])
        return
    for place in without:
        reason = next((one_line(text)[:200] for text in place.view.fallbacks if "GPU Direct" in text), None)
        text = f"rank {place.rank} uses no GPUDirect RDMA, {len(over_rdma) - len(without)} of {len(over_rdma)} ranks do"
        text += f": {reason}" if reason else ""
        yield place.node, finding("nodes.gpudirect", Status.FAIL, place.component, text, REMEDIES["nodes.gpudirect"])


def _by_socket(place: RankPlace) -> bool:
    return place.view.network is not None and _SOCKET.search(place.view.network) is not None


def _nvls(places: Sequence[RankPlace]) -> Iterator[tuple[str, Finding]]:
    known = [place for place in places if place.view.nvls is not None]
    using = {place.node for place in known if place.view.nvls}
    without = {place.node for place in known} - using
    if not using or not without:
        return
    for name in sorted(without):
        text = f"NCCL uses no NVLS (sums in the NVSwitches) on this node, on {counted(len(using), 'node')} it does"
        yield name, finding("nodes.nvls", Status.WARN, "node", text, REMEDIES["nodes.nvls"])


def _adapter(place: RankPlace) -> Iterator[tuple[str, Finding]]:
    """Yield an adapter that is farther from its GPU than another active one."""
    document = place.facts.topology.document if place.facts is not None and place.facts.topology else None
    if document is None or place.gpu is None or place.view.relayed:
        return
    row = document.links.get(f"GPU{place.gpu}", {})
    labels = {document.nic_names.get(label, label): label for label in document.nics}
    distance = {name: DISTANCES[row[label]] for name, label in labels.items() if row.get(label) in DISTANCES}
    active = {name for name in distance if name in active_ports(place.facts)}
    used = {name for several in place.view.adapters for name in several.split("+") if name in distance}
    if not active or not used:
        return
    nearest = min(active, key=lambda name: (distance[name], name))
    for name in sorted(used):
        if distance[name] > max(distance[nearest], DISTANCES["PXB"]):
            path = next(word for word, number in DISTANCES.items() if number == distance[name])
            near = next(word for word, number in DISTANCES.items() if number == distance[nearest])
            text = f"uses {name} {IN_WORDS[path]} ({path}); {nearest} is nearer ({near})"
            yield place.node, finding("nodes.adapter", Status.WARN, place.component, text, REMEDIES["nodes.adapter"])


REMEDIES = {
    "nodes.transport": "gpunode env prints NCCL_IB_HCA; look for NCCL WARN, and for /dev/infiniband in the container.",
    "nodes.gpudirect": "gpunode checks rdma.gpudirect: DMA-BUF needs the open kernel modules; without them load "
    "nvidia_peermem.",
    "nodes.nvls": "gpunode checks fabric.state: compare the fabric manager and the fabric's state with another node.",
    "network within": "NCCL takes the ranks for those of two nodes: give their containers one host name and one "
    "/dev/shm, or set NCCL_HOSTID.",
    "no peer access": "Remove NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; gpunode validate compares NVLink and peer access.",
    "nodes.rings": "Remove NCCL_GRAPH_FILE and NCCL_TOPO_FILE; compare the host names of the node's containers.",
    "nodes.adapter": "Remove NCCL_IB_HCA, NCCL_TOPO_FILE and NCCL_CROSS_NIC; in containers and guests compare "
    "nvidia-smi topo -m with another node.",
}


def summary(rates: CollectiveRates) -> str | None:
    """Return NCCL's view of all ranks in one line; None without one."""
    views = rates.views
    if not views:
        return None
    networks = sorted({one_line(view.network)[:40] for view in views if view.network})
    adapters = sorted({name for view in views for name in view.adapters})
    ranks = {rank for view in views for rank in view.ranks}
    direct = sorted(rank for view in views for rank in view.ranks if view.direct)
    parts = [f"NCCL {rates.nccl_version or ''}".strip(), " + ".join(networks) or "no network"]
    if adapters:
        parts[-1] += f" by {fold(one_line(name)[:60] for name in adapters)}"
    if direct:
        who = "" if len(direct) == len(ranks) else f" on ranks {number_ranges(direct)}"
        parts.append(f"GPUDirect RDMA{who}")
    within = sorted({one_line(name)[:40] for view in views for name in view.transports})
    if within:
        parts.append(f"within nodes {', '.join(within)}")
    if rates.channels:
        parts.append(counted(rates.channels, "channel"))
    if any(view.nvls for view in views):
        parts.append("NVLS")
    return ", ".join(parts)


def shape_together(nodes: Sequence[NodeFacts]) -> Shape | None:
    """Return the shape of equal nodes, with the least sum of their adapters' rates; None without nodes of hardware."""
    if not nodes or any(node.simulated for node in nodes):
        return None
    sums = [nic_gb_per_s(node) for node in nodes]
    known = [one for one in sums if one is not None]
    rate = min(known) if len(known) == len(nodes) else None
    return dataclasses.replace(shape_of(nodes[0]), network_gb_per_s=rate)


def rate_finding(name: str, rates: CollectiveRates, shape: Shape, expect: Expectation) -> Finding | None:
    """Return the bus bandwidth of the largest message, compared with site, baseline, catalog, and the adapters' rates.

    None: it is not NCCL's.
    """
    rows = sorted(rates.rows, key=lambda row: row.size_bytes)
    if rates.backend != "nccl" or not rows:
        return None
    largest, smallest = rows[-1], rows[0]
    size, busbw = largest.size_bytes, largest.busbw_gb_per_s
    source = None
    adapters = shape.network_gb_per_s
    if adapters is not None:
        moved = size * bus_factor(name, rates.ranks)
        latency_s = smallest.time_us / 1e6 if smallest.size_bytes <= SMALLEST_BYTES else 0.0
        reachable = moved / (moved / adapters / 1e9 + latency_s) / 1e9
        shape = dataclasses.replace(shape, network_gb_per_s=reachable)
        source = (
            f"limit: {moved:.4g} bytes / ({moved:.4g} bytes / {adapters:.4g} GB/s of a node's active ports + "
            f"{latency_s * 1e6:.4g} us of the smallest message over {rates.ranks} ranks); NVIDIA/nccl-tests, "
            "doc/PERFORMANCE.md"
        )
    metric = f"fabric_{name.replace('-', '_')}_busbw"
    algorithm = "nvls" if "NVLS" in rates.kinds else None
    figure = Figure(metric, busbw, Where(ranks=rates.ranks, nodes=rates.nodes), size, algorithm)
    what = f"{name} over {rates.ranks} ranks, {size / 2**20:.0f} MiB"
    result = judged(figure, shape, expect, "node", what=what)
    return Finding(
        check="nodes.busbw",
        status=result.status,
        component="node",
        message=result.message,
        expected=result.expected,
        measured=result.measured,
        unit=result.unit,
        source="; ".join(text for text in (result.source, source) if text) or None,
        figure=result.figure,
    )
