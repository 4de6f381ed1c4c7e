"""What NCCL reports of its ranks, compared with the nodes' facts, and its rate with the nodes' adapters. Pure."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpunode.checks import Expectation, Finding, Status
from gpunode.checks.measurements import judged, shape_of
from gpunode.expectations import Figure, Shape
from gpunode.expectations.limits import Where
from gpunode.fabric.model import CollectiveRates, RankConnections, RankView
from gpunode.fabric.preflight import active_ports, finding
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
    members = [RankPlace(rank, name, facts.get(name), view) for rank, name, view in seats]
    members.sort(key=lambda member: member.rank)
    yield from _sockets(members)
    yield from _direct(members)
    yield from _nvls(members)
    for member in members:
        yield from _adapter(member)
    by_rank = {member.rank: member for member in members}
    yield from _within(by_rank, connections)
    yield from _entered(len(by_rank), node_of, connections)


def _within(members: Mapping[int, RankPlace], connections: RankConnections) -> Iterator[tuple[str, Finding]]:
    """Yield pairs of GPUs of one node that are connected over the network, or not over their NVLink."""
    bad: dict[tuple[str, str], list[str]] = {}
    for rank, other, way in connections.pairs:
        member, partner = members.get(rank), members.get(other)
        if member is None or partner is None or member.node != partner.node or way >= len(connections.ways):
            continue
        name, joined = one_line(connections.ways[way])[:40], _nvlink(member, partner)
        if name.startswith("NET/"):
            bad.setdefault((member.node, name), []).append(f"rank {rank} and {other}")
        elif joined is not None and not name.startswith("P2P"):
            text = f"{name}, not by their NVLink ({joined})"
            bad.setdefault((member.node, text), []).append(f"{member.component} and {partner.component}")
    for (node, name), pairs in sorted(bad.items()):
        more = f", and {counted(len(pairs) - 1, 'other pair')}" if len(pairs) > 1 else ""
        text = f"NCCL connects {pairs[0]} of this node by {name}{more}"
        remedy = REMEDIES["network within"] if name.startswith("NET/") else REMEDIES["no peer access"]
        yield node, finding("nodes.pairs", Status.FAIL, "node", text, remedy)


def _nvlink(member: RankPlace, other: RankPlace) -> str | None:
    """Return the NVLink between two GPUs of a node, as ``NV18``; None if there is none, or if it is unknown."""
    document = member.facts.topology.document if member.facts is not None and member.facts.topology else None
    if document is None or member.gpu is None or other.gpu is None:
        return None
    link = document.links.get(f"GPU{member.gpu}", {}).get(f"GPU{other.gpu}")
    return link if link is not None and re.fullmatch(r"NV\d+", link) else None


def _entered(ranks: int, node_of: Callable[[int], str], connections: RankConnections) -> Iterator[tuple[str, Finding]]:
    """Yield nodes that a ring, or the first tree, enters more than once over the network: their adapters then carry the
    same data several times.
    """
    network = {(rank, other) for rank, other, way in connections.pairs if _is_network(connections, way)}
    graphs = [
        ("ring", list(zip(ring, (*ring[1:], ring[0]), strict=True)))
        for ring in connections.rings
        if len(set(ring)) == len(ring) == ranks
    ]
    parents = [(parent, rank) for rank, parent in enumerate(connections.tree) if parent is not None and parent >= 0]
    graphs.append(("tree", parents))
    most: dict[str, tuple[int, str]] = {}
    for kind, pairs in graphs:
        entries = Counter(node_of(end) for start, end in pairs if network & {(start, end), (end, start)})
        for node, number in entries.items():
            most[node] = max(most.get(node, (0, kind)), (number, kind))
    for node, (number, kind) in sorted(most.items()):
        if number > 1:
            text = f"a {kind} of NCCL enters this node {number} times over the network, once is enough"
            yield node, finding("nodes.rings", Status.WARN, "node", text, REMEDIES["nodes.rings"])


def _is_network(connections: RankConnections, way: int) -> bool:
    return way < len(connections.ways) and connections.ways[way].startswith("NET/")


def nic_gb_per_s(node: NodeFacts) -> float | None:
    """Return the sum of a node's active RDMA ports in GB/s; None if there is none, or a rate is unknown."""
    rates = [rate for several in active_ports(node).values() for rate in several]
    return sum(rates) / 8 if rates and all(rates) else None


def _sockets(members: Sequence[RankPlace]) -> Iterator[tuple[str, Finding]]:
    by_node: dict[str, list[RankPlace]] = {}
    for member in members:
        if member.view.network is not None and _SOCKET.search(member.view.network) and active_ports(member.facts):
            by_node.setdefault(member.node, []).append(member)
    for name, several in by_node.items():
        reasons = [one_line(text)[:200] for member in several for text in member.view.fallbacks]
        why = f": {reasons[0]}" if reasons else ""
        text = f"NCCL falls back to TCP (NET/{one_line(str(several[0].view.network))}), and the node has active RDMA "
        text += f"ports{why}"
        yield name, finding("nodes.transport", Status.FAIL, "node", text, REMEDIES["nodes.transport"])


def _direct(members: Sequence[RankPlace]) -> Iterator[tuple[str, Finding]]:
    over_rdma = [member for member in members if (member.view.direct or member.view.staged) and not _by_socket(member)]
    without = [member for member in over_rdma if not member.view.direct]
    if not without:
        return
    if len(without) == len(over_rdma):
        for name in dict.fromkeys(member.node for member in without):
            text = "no rank uses GPUDirect RDMA: messages are copied through the host's memory"
            yield name, finding("nodes.gpudirect", Status.WARN, "node", text, REMEDIES["nodes.gpudirect"])
        return
    for member in without:
        reason = next((one_line(text)[:200] for text in member.view.fallbacks if "GPU Direct" in text), None)
        text = (
            f"rank {member.rank} uses no GPUDirect RDMA, {len(over_rdma) - len(without)} of {len(over_rdma)} ranks do"
        )
        text += f": {reason}" if reason else ""
        yield member.node, finding("nodes.gpudirect", Status.FAIL, member.component, text, REMEDIES["nodes.gpudirect"])


def _by_socket(member: RankPlace) -> bool:
    return member.view.network is not None and _SOCKET.search(member.view.network) is not None


def _nvls(members: Sequence[RankPlace]) -> Iterator[tuple[str, Finding]]:
    known = [member for member in members if member.view.nvls is not None]
    using = {member.node for member in known if member.view.nvls}
    without = {member.node for member in known} - using
    if not using or not without:
        return
    for name in sorted(without):
        text = f"NCCL uses no NVLS (sums in the NVSwitches) on this node, on {counted(len(using), 'node')} it does"
        yield name, finding("nodes.nvls", Status.WARN, "node", text, REMEDIES["nodes.nvls"])


def _adapter(member: RankPlace) -> Iterator[tuple[str, Finding]]:
    """Yield an adapter that is farther from its GPU than another active one."""
    document = member.facts.topology.document if member.facts is not None and member.facts.topology else None
    if document is None or member.gpu is None or member.view.relayed:
        return
    row = document.links.get(f"GPU{member.gpu}", {})
    labels = {document.nic_names.get(label, label): label for label in document.nics}
    distance = {name: DISTANCES[row[label]] for name, label in labels.items() if row.get(label) in DISTANCES}
    active = {name for name in distance if name in active_ports(member.facts)}
    used = {name for several in member.view.adapters for name in several.split("+") if name in distance}
    if not active or not used:
        return
    nearest = min(active, key=lambda name: (distance[name], name))
    for name in sorted(used):
        if distance[name] > max(distance[nearest], DISTANCES["PXB"]):
            path = next(word for word, number in DISTANCES.items() if number == distance[name])
            near = next(word for word, number in DISTANCES.items() if number == distance[nearest])
            text = f"uses {name} {IN_WORDS[path]} ({path}); {nearest} is nearer ({near})"
            yield member.node, finding("nodes.adapter", Status.WARN, member.component, text, REMEDIES["nodes.adapter"])


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
    known = [total for total in sums if total is not None]
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
    subject = f"{name} over {rates.ranks} ranks, {size / 2**20:.0f} MiB"
    result = judged(figure, shape, expect, "node", label=subject)
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
