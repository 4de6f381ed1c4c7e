"""What NCCL reports of its ranks, read from its log, and compared with a node of eight GPUs with eight adapters."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from captured import FOLDER, each
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx

from gpunode.checks import Expectation, Status
from gpunode.expectations import Shape
from gpunode.fabric.model import CollectiveRates, RankConnections, RankView, RateRow
from gpunode.fabric.nccl_view import rate_finding, shape_together, summary, view_findings
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.probe import Bundle
from gpunode.workload.payload.nccl_log import MOST_PAIRS, bus_id_of, connections, folded, views

HEAD = "node0:71:80 [{device}] NCCL INFO "
LOG = """\
comm 0x5f rank {rank} nranks 16 cudaDev {device} nvmlDev {device} busId {bus} commId 0x1 - Init START
NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]={{[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}} [RO]; OOB eth0:10.0.0.1<0>
Using network IB
Channel 00/16 :    0   1   2   3
Trees [0] 1/-1/-1->{rank}->-1 [1] -1/-1/-1->{rank}->1
16 coll channels, 0 collnet channels, 8 nvls channels, 16 p2p channels
Channel 00/0 : {rank}[{device}] -> 1[1] via P2P/CUMEM
Channel 00/0 : {rank}[{device}] -> 8[0] [send] via NET/IB/1/GDRDMA
Channel 01/0 : 8[0] -> {rank}[{device}] [receive] via NET/IB/2(3)/GDRDMA/Shared
Channel 02/0 : 8[0] -> {rank}[{device}] [receive] via NET/IB/0
NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)
"""


def log(rank: int = 0, device: int = 0, bus: str = "1b000") -> str:
    head = HEAD.format(device=device)
    return "".join(head + line + "\n" for line in LOG.format(rank=rank, device=device, bus=bus).splitlines())


def test_a_log_is_read_by_rank() -> None:
    first, second = views(log(3, 1, "d4000") + "noise\n" + log())
    assert first == {
        "rank": 0,
        "host": "node0",
        "gpu": "0000:1b:00.0",
        "network": "IB",
        "adapters": {"mlx5_1": 1, "mlx5_0": 1},
        "transports": {"P2P/CUMEM": 1},
        "direct": 2,
        "staged": 1,
        "relayed": 1,
        "channels": 16,
        "nvls": 8,
        "fallbacks": ["GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"],
        "peers": [[1, "P2P/CUMEM"], [8, "NET/IB"]],
        "rings": [[0, 1, 2, 3]],
        "parent": -1,
    }
    assert (second["rank"], second["gpu"]) == (3, "0000:d4:00.0")
    assert bus_id_of("10000101c0") == "10000:10:1c.0"


def test_merged_adapters_and_older_texts() -> None:
    old = (
        "a:1:2 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} ; OOB br0:10.1.1.1<0>\n"
        "a:1:2 [0] NCCL INFO Ring 00 : 15[41000] -> 0[1b000] [receive] via NET/IB/0\n"
        "a:1:2 [0] NCCL INFO Ring 00 : 0[1b000] -> 7[41000] via direct shared memory\n"
    )
    (view,) = views(old)
    assert (view["gpu"], view["adapters"]) == ("0000:1b:00.0", {"mlx5_2+mlx5_3": 1})
    assert (view["transports"], view["staged"], view["direct"]) == ({"direct shared memory": 1}, 1, 0)
    assert views("") == views("a:1:2 [0] NCCL INFO Launch mode Parallel\n") == []


def test_equal_ranks_are_reported_once() -> None:
    every = [views(log(rank, 0, "1b000"))[0] for rank in (0, 8, 16)]
    (view,) = folded([*every, None])
    assert view["ranks"] == [0, 1, 2]
    assert "host" not in view
    assert folded([]) == []


@pytest.mark.parametrize(
    ("name", "ranks", "adapters", "direct"),
    each([("nccl/aws-p4d-eks-2node-tagged-old-error-col-ncclinfo.log", 16, {"0", "1", "2", "3"}, 64)]),
)
def test_a_recorded_log(name: str, ranks: int, adapters: set[str], direct: int) -> None:
    parsed = views((FOLDER / name).read_text(encoding="utf-8", errors="replace"))
    assert [view["rank"] for view in parsed] == list(range(ranks))
    assert {view["network"] for view in parsed} == {"AWS Libfabric"}
    assert {name for view in parsed for name in view["adapters"]} == adapters
    assert (sum(view["direct"] for view in parsed), sum(view["staged"] for view in parsed)) == (direct, 0)
    # Eight GPUs of each of two equal nodes.
    assert len({view["gpu"] for view in parsed}) == 8


@pytest.mark.parametrize("name", each([("nccl/aws-p4d-eks-2node-tagged-old-error-col-ncclinfo.log",)]))
def test_recorded_rings_and_trees_of_two_nodes(name: str, node: NodeFacts) -> None:
    """Eight GPUs of each of two nodes: each ring and the first tree enter a node once."""
    every = views((FOLDER / name).read_text(encoding="utf-8", errors="replace"))
    known = connections(every)
    assert len(known["rings"]) == 4
    assert all(sorted(ring) == list(range(16)) for ring in known["rings"])
    assert known["tree"].count(-1) == 1
    assert {known["ways"][way] for _, _, way in known["pairs"]} == {"P2P/IPC/read", "NET/AWS Libfabric"}
    rank_connections = RankConnections.model_validate(json.loads(json.dumps(known)))
    ranks = [RankView(ranks=(view["rank"],)) for view in every]
    assert list(view_findings(ranks, lambda rank: f"n{rank // 8}", {}, rank_connections)) == []
    # The same ranks in another order on the nodes.
    named = {
        node: finding.check for node, finding in view_findings(ranks, lambda rank: f"n{rank % 2}", {}, rank_connections)
    }
    assert set(named.values()) & {"nodes.pairs", "nodes.rings"}


@given(st.text(max_size=300), st.integers(0, 400))
def test_any_text_is_read(noise: str, at: int) -> None:
    text = log()
    views(text[:at] + noise + text[at:])


# --- compared with the node


@pytest.fixture(scope="module")
def node() -> NodeFacts:
    return facts_from_bundle(Bundle.model_validate({**hgx(), "simulated": False}))


def rank_views(node: NodeFacts, **changes: dict[str, Any]) -> list[RankView]:
    """Eight ranks of a node, each with the adapter beside its GPU; ``changes`` by ``gpuN``."""
    ranks = []
    for gpu in node.smi_gpus:
        fields: dict[str, Any] = {
            "ranks": [gpu.index],
            "gpu": gpu.pci_bus_id,
            "network": "IB",
            "adapters": [f"mlx5_{gpu.index}"],
        }
        fields |= {"direct": True, "staged": False, "nvls": 16, "transports": ["P2P/CUMEM"]}
        ranks.append(RankView.model_validate({**fields, **changes.get(f"gpu{gpu.index}", {})}))
    return ranks


def found(node: NodeFacts, every: list[RankView]) -> list[tuple[str, Status, str]]:
    results = view_findings(every, lambda _: "n", {"n": node})
    return [(finding.check, finding.status, finding.component) for _, finding in results]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"gpu3": {"adapters": ["mlx5_4"]}}, [("nodes.adapter", Status.WARN, "gpu3")]),
        ({"gpu3": {"adapters": ["mlx5_2"]}}, [("nodes.adapter", Status.WARN, "gpu3")]),
        ({"gpu3": {"adapters": ["mlx5_4"], "relayed": True}}, []),
        (
            {
                "gpu5": {
                    "direct": False,
                    "staged": True,
                    "fallbacks": ["GPU Direct RDMA Disabled for HCA 5 (no module)"],
                }
            },
            [("nodes.gpudirect", Status.FAIL, "gpu5")],
        ),
        (
            {f"gpu{number}": {"direct": False, "staged": True} for number in range(8)},
            [("nodes.gpudirect", Status.WARN, "node")],
        ),
        (
            {
                f"gpu{number}": {"network": "Socket", "adapters": ["eth0"], "direct": False, "staged": True}
                for number in range(8)
            },
            [("nodes.transport", Status.FAIL, "node")],
        ),
    ],
)
def test_what_differs_from_the_topology_is_named(
    node: NodeFacts, changes: dict[str, dict[str, Any]], expected: list[tuple[str, Status, str]]
) -> None:
    assert found(node, rank_views(node, **changes)) == expected


WAYS = ("P2P/CUMEM", "SHM/direct/direct", "NET/IB", "NET/Socket")
P2P, SHM, IB, SOCKET = range(4)


@pytest.mark.parametrize(
    ("pairs", "rings", "tree", "expected"),
    [
        ([(0, 1, P2P), (1, 8, IB), (8, 9, P2P), (9, 0, IB)], [], [], []),
        ([(0, 1, P2P), (2, 3, SHM)], [], [], [("n0", "nodes.pairs")]),
        ([(8, 9, SOCKET), (9, 10, SOCKET)], [], [], [("n1", "nodes.pairs")]),
        # Each ring crosses between the nodes once in each direction, or at every step.
        ([(7, 8, IB), (15, 0, IB)], [list(range(16))], [], []),
        (
            [(rank, (rank + 8) % 16, IB) for rank in range(16)] + [(rank + 8, rank + 1, IB) for rank in range(7)],
            [[rank for gpu in range(8) for rank in (gpu, gpu + 8)]],
            [],
            [("n0", "nodes.rings"), ("n1", "nodes.rings")],
        ),
        # A ring of some ranks, and one with a rank twice, are no rings of all.
        ([(rank, rank + 8, IB) for rank in range(8)], [[0, 8, 1, 9], [0] * 16], [], []),
        # The first tree: one rank of the second node has its parent on the first one, or each of them has.
        ([(0, 8, IB)], [], [-1, *range(7), 0, *range(8, 15)], []),
        ([(rank, rank + 8, IB) for rank in range(8)], [], [-1, *range(7), *range(8)], [("n1", "nodes.rings")]),
        # NVLink over several nodes is not the network.
        ([(rank, rank + 8, P2P) for rank in range(8)], [], [-1, *range(7), *range(8)], []),
        ([(0, 99, IB), (99, 1, 77)], [[99]], [99, None], []),
    ],
)
def test_pairs_rings_and_trees_are_compared_with_the_nodes(
    node: NodeFacts,
    pairs: list[tuple[int, int, int]],
    rings: list[list[int]],
    tree: list[int | None],
    expected: list[tuple[str, str]],
) -> None:
    rank_connections = RankConnections.model_validate({"ways": WAYS, "pairs": pairs, "rings": rings, "tree": tree})
    other = [view.model_copy(update={"ranks": (view.ranks[0] + 8,)}) for view in rank_views(node)]
    every = [*rank_views(node), *other]
    results = view_findings(every, lambda rank: f"n{rank // 8}", {"n0": node, "n1": node}, rank_connections)
    assert [(name, finding.check) for name, finding in results] == expected


def test_gpus_without_nvlink_may_use_shared_memory(node: NodeFacts) -> None:
    rank_connections = RankConnections.model_validate({"ways": WAYS, "pairs": [(2, 3, SHM)]})
    assert list(view_findings(rank_views(node), lambda _: "n", {}, rank_connections)) == []
    ((_, finding),) = view_findings(rank_views(node), lambda _: "n", {"n": node}, rank_connections)
    assert all(word in finding.message for word in ("gpu2", "gpu3", "SHM", "NVLink (NV18)"))


def test_connections_of_many_ranks_are_left_out() -> None:
    (view,) = views(log())
    assert connections([view, None])["pairs"] == [[0, 1, 1], [0, 8, 0]]
    many = connections([view] * MOST_PAIRS)
    assert (many["pairs"], len(many["tree"])) == ([], MOST_PAIRS)
    assert connections([]) == {"ways": [], "pairs": [], "rings": [], "tree": []}


def test_an_adapter_across_the_sockets_is_named_with_the_nearer_one(node: NodeFacts) -> None:
    every = rank_views(node, gpu3={"adapters": ["mlx5_4"]})
    ((_, finding),) = view_findings(every, lambda _: "node7", {"node7": node})
    assert all(word in finding.message for word in ("mlx5_4", "sockets", "mlx5_3", "PIX"))


def test_a_node_without_nvls_beside_others_is_named(node: NodeFacts) -> None:
    other = [view.model_copy(update={"ranks": (view.ranks[0] + 8,), "nvls": 0}) for view in rank_views(node)]
    results = view_findings([*rank_views(node), *other], lambda rank: f"n{rank // 8}", {"n0": node, "n1": node})
    assert [(name, finding.check) for name, finding in results] == [("n1", "nodes.nvls")]


def test_the_summary_has_network_adapters_and_channels(node: NodeFacts) -> None:
    rates = CollectiveRates(ranks=8, backend="nccl", views=tuple(rank_views(node)), channels=16, nccl_version="2.27.7")
    text = summary(rates)
    assert text is not None
    assert all(word in text for word in ("2.27.7", "IB by mlx5_[0-7]", "GPUDirect RDMA", "16 channels", "NVLS"))
    assert summary(CollectiveRates(ranks=8, backend="nccl")) is None


# --- the rate


def rates(busbw: float, latency_us: float = 30.0) -> CollectiveRates:
    rows = (
        RateRow(size_bytes=8, time_us=latency_us, busbw_gb_per_s=0.0, wrong=0),
        RateRow(size_bytes=2**30, time_us=1.0, busbw_gb_per_s=busbw, wrong=0),
    )
    return CollectiveRates(ranks=16, nodes=2, backend="nccl", rows=rows, kinds=("IB",), max_busbw_gb_per_s=busbw)


@pytest.mark.parametrize(("busbw", "status"), [(187.22, Status.PASS), (3.15, Status.FAIL), (140.0, Status.WARN)])
def test_the_rate_is_compared_with_the_adapters(busbw: float, status: Status) -> None:
    """Azure/aks-rdma-infiniband, tests/expected-output.md: two ND A100 v4 with eight ports of 200 Gbit/s each reach
    187 GB/s with RDMA, 3 GB/s in their fallback.
    """
    finding = rate_finding("all-reduce", rates(busbw), Shape(None, 8, network_gb_per_s=200.0), Expectation())
    assert finding is not None
    assert finding.status is status
    assert "200 GB/s" in str(finding.source)
    assert finding.figure is not None
    assert finding.figure.metric == "fabric_all_reduce_busbw"


def test_latency_over_many_ranks_lowers_what_is_expected() -> None:
    shape = Shape(None, 8, network_gb_per_s=200.0)
    near, far = (rate_finding("all-reduce", rates(150.0, us), shape, Expectation()) for us in (30.0, 4000.0))
    assert near is not None
    assert far is not None
    assert isinstance(near.expected, float)
    assert isinstance(far.expected, float)
    assert near.expected > 150.0 > far.expected
    assert (near.status, far.status) == (Status.WARN, Status.PASS)


def test_the_sites_reference_wins() -> None:
    shape = Shape(None, 8, network_gb_per_s=200.0)
    site = Expectation(figures={"fabric_all_reduce_busbw": 190.0})
    finding = rate_finding("all-reduce", rates(187.22), shape, site)
    assert finding is not None
    assert (finding.status, finding.expected) == (Status.FAIL, 190.0)


def test_the_shape_is_that_of_the_least_node(node: NodeFacts) -> None:
    shape = shape_together([node, node])
    assert shape is not None
    assert shape.network_gb_per_s == 400.0
    assert shape_together([]) is None
    assert shape_together([node.model_copy(update={"simulated": True})]) is None
