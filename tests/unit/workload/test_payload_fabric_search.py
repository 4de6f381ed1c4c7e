"""The search between nodes: random faults of a simulated fabric are named, in rounds that grow with log n."""

import math
import random
import sys
from pathlib import Path

import pytest
from effort import effort

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from fabric_search import Faults, SimulatedFabric, fault, outcomes, searched

from gpunode.workload.payload.fabric_search import (
    MOST_CONFIRMATIONS,
    FabricSearch,
    LateLimits,
    Position,
    Trial,
    all_rounds,
    halves,
)


@pytest.mark.parametrize(("nodes", "rails", "rack_size"), [(16, 1, 4), (27, 3, 9), (40, 2, 8)])
def test_random_faults_are_named_and_nothing_else(nodes: int, rails: int, rack_size: int) -> None:
    cases = list(outcomes(nodes, rails, rack_size, effort(30, 1000), seed=nodes))
    at_times = ("bad cable", "two at once", "slow uplink")
    steady = [outcome for kind, outcome in cases if kind not in at_times]
    assert [(outcome.expected, outcome.found) for outcome in steady if outcome.found != outcome.expected] == []
    # What is slow at times may be named by its links; of two faults one may hide the other's links.
    hard = [outcome for kind, outcome in cases if kind in at_times]
    assert sum(outcome.found != outcome.expected for outcome in hard) <= max(1, len(hard) // 20)
    most = 2 + math.ceil(math.log2(nodes)) + MOST_CONFIRMATIONS
    assert all(0 < outcome.rounds <= most for _, outcome in cases)


@pytest.mark.parametrize("kind", ["slow NIC", "wrong MTU", "hanging rank", "slow GPU"])
@pytest.mark.parametrize("nodes", [3, 4, 7])
def test_few_nodes_are_enough_to_name_one(nodes: int, kind: str) -> None:
    for number in range(effort(4, 200)):
        made, expected = fault(kind, random.Random(number), nodes, 1, nodes)  # noqa: S311
        outcome = searched(SimulatedFabric(nodes, 1, nodes, made, seed=number), expected)
        assert outcome.found == expected


def test_of_two_nodes_the_pair_is_named() -> None:
    search = FabricSearch([Position(0), Position(1)], LateLimits())
    while search.next_round() is not None:
        search.take({0: 1.0, 1: 1.0, (0, 1): Trial(None)})
    (cause,) = search.causes()
    assert (cause.kind, cause.ranks, cause.only_large, cause.share) == ("link", (0, 1), True, None)


def test_a_slow_fabric_is_late_against_its_expectation() -> None:
    fabric = SimulatedFabric(4, 1, 4, Faults(slow_rail={0: 0.3}), seed=1)
    rate_s = 256 * 2**20 / 48e9
    for limits, late in ((LateLimits(), 0), (LateLimits(expected_s=rate_s), 6)):
        search = FabricSearch(fabric.positions, limits)
        while (tried := search.next_round()) is not None:
            search.take(*fabric.run(tried))
        assert len(search.late_links()) == late


def test_a_slow_spine_is_one_cause() -> None:
    racks = {f"r{number:03}": 0.5 for number in range(4)}
    fabric = SimulatedFabric(16, 2, 4, Faults(slow_uplink=racks), seed=1)
    outcome = searched(fabric, {("between", "all racks")})
    assert outcome.found == outcome.expected


@pytest.mark.parametrize("nodes", range(2, 20))
def test_rounds_are_disjoint_and_reach_every_node(nodes: int) -> None:
    names = list(range(100, 100 + nodes))
    few, every = list(halves(names)), list(all_rounds(names))
    assert len(few) == math.ceil(math.log2(nodes))
    assert {frozenset(pair) for pairs in every for pair in pairs} == {
        frozenset((node, other)) for node in names for other in names if node != other
    }
    assert sum(len(pairs) for pairs in every) == nodes * (nodes - 1) // 2
    for pairs in few + every:
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met))
    assert {node for pairs in few for pair in pairs for node in pair} == set(names)


def causes(late: dict[tuple[int, int], set[int]], at_times: float = 1.0, seed: int = 0) -> list[tuple[str, str]]:
    """What the search names of 4 nodes with 4 ranks in two racks: pairs of nodes are late on these rails, at times."""
    chance = random.Random(seed)  # noqa: S311 (repeatable)
    search = FabricSearch([Position(node, rail, f"r{node // 2}") for node in range(4) for rail in range(4)], LIMITS)
    while (tried := search.next_round()) is not None:
        now: dict[tuple[int, int], bool] = {}
        outcome: dict[object, object] = {}
        for link in tried.links:
            node, other = sorted(rank // 4 for rank in link)
            slow = now.setdefault((node, other), chance.random() < at_times)
            outcome[link] = Trial(5.0 if slow and link[0] % 4 in late.get((node, other), ()) else 0.1)
        search.take(outcome or dict.fromkeys(tried.ranks, 0.01))
    assert search.rounds <= 4 + MOST_CONFIRMATIONS
    return [(cause.kind, cause.name) for cause in search.causes()]


LIMITS = LateLimits(factor=4.0, least_s=0.05, alone_factor=4.0, alone_least_s=0.05)
RAILS = {0, 1, 2, 3}


def test_ranks_that_share_a_cable_are_one_node() -> None:
    # Late with both nodes of the other rack, in time with its neighbour: the path between the racks is not the cause.
    assert causes({(0, 3): RAILS, (1, 3): RAILS}) == [("node", "3")]
    # As measured on four namespaces: one pair late on all rails, two on some.
    assert causes({(1, 3): RAILS, (0, 3): {0, 1}, (2, 3): {0, 3}}) == [("node", "3")]
    # Of one rank alone it is that rank.
    assert causes({(node, 3): {2} for node in (0, 1, 2)}) == [("rank", "14")]


def test_a_slow_pair_is_not_one_of_its_nodes() -> None:
    named = causes({(0, 3): RAILS})
    assert {kind for kind, _ in named} == {"link"}
    assert {tuple(int(rank) // 4 for rank in name.split("-")) for _, name in named} == {(0, 3)}


def test_a_cable_that_is_in_time_every_third_time_is_named() -> None:
    bad = {(node, 3): RAILS for node in (0, 1, 2)}
    runs = [causes(bad, 2 / 3, seed) for seed in range(effort(60, 1000))]
    named = sum(run == [("node", "3")] for run in runs)
    assert named >= 0.8 * len(runs)
    # Whatever else is named is a part of it.
    names = {name for run in runs for kind, name in run if kind in ("node", "rank") for name in [name]}
    assert names <= {"3", "12", "13", "14", "15"}
