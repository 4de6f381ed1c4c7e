"""The search of ``validate --fabric`` on a simulated fabric: rounds, wall time, and what it names, by fault.

``fabric_search.py [--nodes 1024] [--rails 8] [--faults 1000]`` prints one row for each kind of fault. After each
hundred faults it prints the table so far to stderr: an interrupted run of an hour keeps what it found.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpunode.workload.payload.fabric_search import ALONE, FabricSearch, LateLimits, Position, Round, Suspect, Trial

BYTES = 256 * 2**20
NIC_GB_PER_S = 48.0
"""Of one rail, NDR: what an exchange reaches of 50 GB/s."""
NOISE = 0.04
TRANSIENT, TRANSIENT_RATE = 0.0005, 0.3
"""Share of measurements that something else disturbs, and the rate that is left of them."""
FAIL_LIMIT_S = 15.0
ROUND_S = 0.4
"""Of each round: meeting, warm-up, repetitions, answers."""
REPETITIONS = 4
PARTIAL = 100
"""Faults after which the table so far is printed."""


@dataclass
class Faults:
    """The faults of a fabric; a rate is the share that is left."""

    slow_gpu: dict[int, float] = field(default_factory=dict)
    slow_nic: dict[int, float] = field(default_factory=dict)
    bad_cable: set[int] = field(default_factory=set)
    """Ranks with a cable that is slow, or fails, at times."""
    wrong_mtu: set[int] = field(default_factory=set)
    """Nodes with a path that carries small messages only."""
    no_gdr: dict[int, float] = field(default_factory=dict)
    """Nodes that copy through the host's memory."""
    hanging: set[int] = field(default_factory=set)
    """Ranks that stop at the first exchange."""
    slow_rail: dict[int, float] = field(default_factory=dict)
    slow_uplink: dict[str, float] = field(default_factory=dict)


@dataclass
class SimulatedFabric:
    """Nodes with one NIC for each rail, in racks; a link has the rate of its slower end."""

    nodes: int
    rails: int
    rack_size: int
    faults: Faults
    seed: int
    seconds: float = 0.0
    """Modelled wall time so far."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 (repeatable)
        self.positions = [
            Position(node, rail, f"r{node // self.rack_size:03}")
            for node in range(self.nodes)
            for rail in range(self.rails)
        ]

    def run(self, tried: Round) -> tuple[dict[int, float] | dict[tuple[int, int], Trial], set[int]]:
        """Return the outcome of a round and the ranks that stopped in it, as ``FabricSearch.take`` gets them."""
        self.seconds += ROUND_S
        if tried.kind == ALONE:
            self.seconds += 0.2
            return {rank: 0.05 / self.faults.slow_gpu.get(rank, 1.0) * self._noise() for rank in tried.ranks}, set()
        present = {rank for link in tried.links for rank in link}
        stopped = present & self.faults.hanging
        outcome = {link: self._trial(link) for link in tried.links if not stopped & set(link)}
        slowest = max((trial.seconds or FAIL_LIMIT_S for trial in outcome.values()), default=0.0)
        self.seconds += FAIL_LIMIT_S if stopped else slowest * REPETITIONS if slowest < FAIL_LIMIT_S else slowest
        return outcome, stopped

    def _noise(self) -> float:
        disturbed = 1 / TRANSIENT_RATE if self._random.random() < TRANSIENT else 1.0
        return math.exp(abs(self._random.gauss(0.0, NOISE))) * disturbed

    def _trial(self, link: tuple[int, int]) -> Trial:
        first, other = (self.positions[rank] for rank in link)
        if {first.node, other.node} & self.faults.wrong_mtu:
            return Trial(None, small=True)
        rate = min(self._rate(rank) for rank in link) * self.faults.slow_rail.get(first.rail, 1.0)
        if first.rack != other.rack:
            left = min(self.faults.slow_uplink.get(str(rack), 1.0) for rack in (first.rack, other.rack))
            # Flows share an uplink unequally.
            rate *= min(1.0, left * self._random.uniform(0.6, 1.4)) if left < 1 else 1.0
        for rank in link:
            if rank in self.faults.bad_cable:
                rate *= self._random.uniform(0.1, 0.6) if self._random.random() < 0.9 else 1.0
                if self._random.random() < 0.1:
                    return Trial(None, small=self._random.random() < 0.5)
        return Trial(BYTES / (rate * NIC_GB_PER_S * 1e9) * self._noise())

    def _rate(self, rank: int) -> float:
        return self.faults.slow_nic.get(rank, 1.0) * self.faults.no_gdr.get(self.positions[rank].node, 1.0)


Expected = set[tuple[str, object]]
"""Causes by kind and rank, node, rail or rack."""


def fault(kind: str, chance: random.Random, nodes: int, rails: int, rack_size: int) -> tuple[Faults, Expected]:
    """Return a random fault of a kind, and the causes that the search has to name."""
    node, rail = chance.randrange(nodes), chance.randrange(rails)
    rank, share = node * rails + rail, chance.uniform(0.2, 0.6)
    rack = f"r{node // rack_size:03}"
    end = ("rank", rank) if rails > 1 else ("node", node)
    last = f"r{(nodes - 1) // rack_size:03}"
    uplink = ("racks", f"r000 - {last}") if last == "r001" else ("rack", rack)
    table: dict[str, tuple[Faults, Expected]] = {
        "none": (Faults(), set()),
        "slow GPU": (Faults(slow_gpu={rank: share}), {("gpu", rank)}),
        "slow NIC": (Faults(slow_nic={rank: share}), {end}),
        "bad cable": (Faults(bad_cable={rank}), {end}),
        "wrong MTU": (Faults(wrong_mtu={node}), {("node", node)}),
        "no GPUDirect RDMA": (Faults(no_gdr={node: share}), {("node", node)}),
        "hanging rank": (Faults(hanging={rank}), {("stopped", rank)}),
        "slow rail": (Faults(slow_rail={rail: share}), {("rail", rail)}),
        "slow uplink": (Faults(slow_uplink={rack: share}), {uplink}),
    }
    return table[kind]


ONE = (
    "slow GPU",
    "slow NIC",
    "bad cable",
    "wrong MTU",
    "no GPUDirect RDMA",
    "hanging rank",
    "slow rail",
    "slow uplink",
)
OF_NODES = ONE[:6]
"""Faults of one node: two of them are independent."""


def two(chance: random.Random, nodes: int, rails: int, rack_size: int) -> tuple[Faults, Expected]:
    """Return two faults of different nodes."""
    both = Faults()
    expected: Expected = set()
    while len(expected) < 2:
        both, expected = Faults(), set()
        seen: list[int] = []
        for kind in (chance.choice(OF_NODES), chance.choice(OF_NODES)):
            faults, named = fault(kind, chance, nodes, rails, rack_size)
            ((cause, number),) = named
            seen.append(int(str(number)) if cause == "node" else int(str(number)) // rails)
            for name, value in vars(faults).items():
                getattr(both, name).update(value)
            expected |= named
        if seen[0] == seen[1]:
            expected = set()
    return both, expected


def named(causes: Iterable[Suspect]) -> Expected:
    """Return the causes that the search named, as ``fault`` returns them."""
    pairs: Expected = set()
    for cause in causes:
        if cause.kind in ("gpu", "rank", "stopped"):
            pairs.add((cause.kind, cause.ranks[0]))
        else:
            pairs.add((cause.kind, int(cause.name) if cause.name.isdigit() else cause.name))
    return pairs


@dataclass
class Outcome:
    """What the search did with one fabric."""

    expected: Expected
    found: Expected
    rounds: int
    wall_s: float


def searched(fabric: SimulatedFabric, expected: Expected) -> Outcome:
    """Return the outcome of the search on a fabric."""
    search = FabricSearch(fabric.positions, LateLimits())
    while (tried := search.next_round()) is not None:
        outcome, stopped = fabric.run(tried)
        search.take(outcome, stopped)
    return Outcome(expected, named(search.causes()), search.rounds, fabric.seconds)


def outcomes(nodes: int, rails: int, rack_size: int, faults: int, seed: int = 1) -> Iterator[tuple[str, Outcome]]:
    """Yield kind and outcome of random faults: ``faults`` of them in all, and as many of two at once as of one."""
    kinds = [*(kind for kind in ONE if rails > 1 or kind != "slow rail"), "two at once", "none"]
    for number in range(faults):
        kind = kinds[number % len(kinds)]
        chance = random.Random(seed * 1_000_003 + number)  # noqa: S311 (repeatable)
        if kind == "two at once":
            made, expected = two(chance, nodes, rails, rack_size)
        else:
            made, expected = fault(kind, chance, nodes, rails, rack_size)
        fabric = SimulatedFabric(nodes, rails, rack_size, made, seed=chance.randrange(2**31))
        yield kind, searched(fabric, expected)


def table(by_kind: dict[str, list[Outcome]]) -> list[str]:
    """Return the lines of the table of outcomes by kind."""
    heads = ("fault", "runs", "named exactly", "missed", "false suspects", "rounds, median (most)", "wall time")
    rows = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|---|"]
    for kind, runs in by_kind.items():
        exact = sum(run.found == run.expected for run in runs)
        missed = sum(len(run.expected - run.found) for run in runs)
        false = sum(len(run.found - run.expected) for run in runs)
        rounds, walls = [run.rounds for run in runs], [run.wall_s for run in runs]
        took = f"{statistics.median(rounds):g} ({max(rounds)}) | {statistics.median(walls):.0f} s ({max(walls):.0f} s)"
        rows.append(f"| {kind} | {len(runs)} | {exact} | {missed} | {false} | {took} |")
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--rails", type=int, default=8)
    parser.add_argument("--rack-size", type=int, default=16)
    parser.add_argument("--faults", type=int, default=1000)
    chosen = parser.parse_args()
    started = time.monotonic()
    by_kind: dict[str, list[Outcome]] = {}

    def lines() -> str:
        done, took = sum(map(len, by_kind.values())), time.monotonic() - started
        of = f"{done} of {chosen.faults} faults, {chosen.nodes} nodes, rails: {chosen.rails}, computed in {took:.0f} s"
        return "\n".join([*table(by_kind), of]) + "\n"

    for number, (kind, outcome) in enumerate(outcomes(chosen.nodes, chosen.rails, chosen.rack_size, chosen.faults), 1):
        by_kind.setdefault(kind, []).append(outcome)
        if outcome.expected != outcome.found:
            expected, answer = sorted(map(str, outcome.expected)), sorted(map(str, outcome.found))
            sys.stderr.write(f"fault {number}, {kind}: expected {expected}, named {answer}\n")
        if number % PARTIAL == 0 and number < chosen.faults:
            sys.stderr.write(lines())
            sys.stderr.flush()
    sys.stdout.write(lines())


if __name__ == "__main__":
    main()
