"""Search for what is slow between nodes: a GPU, a NIC, a node, a rail, a rack's uplink, one pair. No ranks, no clock.

A round tries links that have no node in common, all at the same time; on each pair of nodes every rail by itself. The
first rounds pair the two halves of the nodes, then the halves of each half, so that log2(n) rounds try each node with
log2(n) others, and each level of the network. What was late is explained by as few causes as possible: what a cause
contains is late with all its partners, and its partners are in time with others. Each cause is then confirmed with
partners that it did not have before. Independent faults are found together, because a good pair clears both ends.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    Link: TypeAlias = "tuple[int, int]"
    """Two ranks of the same rail, the smaller first."""
ALONE, EXCHANGE = "alone", "exchange"
SHARE, SHARE_AT_TIMES, SHARE_OF_MANY = 0.6, 0.3, 0.9
"""A rank is a cause if this share of its links is late: a bad cable is late at times, and then links count that were
late more than once. A node, a rail and a rack contain several ranks, which are all affected. Ranks of a node that share
one cable are all affected too, with this share of the other nodes."""
SHARE_OF_RACKS = 0.5
"""Flows share an uplink unequally: some of them are in time. Links of nodes that are late in their own rack do not
count."""
RACKS = frozenset({"between", "racks", "rack"})
FEW = 8
"""Up to this number of nodes every pair is tried."""
PARTNERS = 3
"""Partner nodes with which a suspect is tried, where there are as many."""
TRIALS, TRIALS_OF_LINK = 5, 3
"""Measurements of a link that is late without another cause, the second before its ends are tried with others."""
RETRIES = 2
"""Partners with which each end of such a link is tried again."""
SAMPLE = 8
"""Links of a rail or a rack that are tried again."""
MOST_CONFIRMATIONS = 12
"""Rounds of confirmation: no search is endless."""
DEAD = 2
"""Partners with which a rank failed, without one in time, before it takes no further part."""
PREFERENCE = ("between", "racks", "node", "rank", "rail", "rack", "link")
"""Kinds of causes; of those that explain equally many late links the first one is reported."""


@dataclass(frozen=True)
class Position:
    """The place of a rank: its node, and its number there, which is that of its rail."""

    node: int
    rail: int = 0
    rack: str | None = None


@dataclass(frozen=True)
class LateLimits:
    """When a link is late, and a GPU slow: more than ``factor`` times the usual time, and ``least_s`` longer."""

    factor: float = 1.5
    least_s: float = 0.0005
    alone_factor: float = 1.25
    alone_least_s: float = 0.002
    expected_s: float | None = None
    """Seconds of a good link, if they are known: links that are all slow are no reference."""


@dataclass(frozen=True)
class Round:
    """What is tried next: each of ``ranks`` alone, or all ``links`` at the same time."""

    kind: str
    links: tuple[Link, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trial:
    """The outcome of one link: seconds of a large message; None if it failed."""

    seconds: float | None
    corrupt: bool = False
    small: bool = True
    """A small message arrived."""


@dataclass(frozen=True)
class Suspect:
    """One cause of what was late."""

    kind: str
    """``gpu``, ``rank`` (its NIC or cable), ``node``, ``rail``, ``rack`` (its uplink), ``racks`` (the path between
    two), ``between`` (the paths between all racks), ``link`` (one pair of ranks), ``stopped``."""
    ranks: tuple[int, ...]
    name: str
    late: int
    tried: int
    partners: int
    """Partner nodes with which it was late."""
    share: float | None
    """Median rate of its late links, as a share of the others'; None if they failed."""
    corrupt: bool = False
    only_large: bool = False
    """Small messages arrive, large ones fail: the sign of a wrong MTU."""
    confirmed: bool = False
    """Tried again with other partners."""


@dataclass
class _Evidence:
    trials: dict[Link, list[Trial]] = field(default_factory=dict)
    members: dict[tuple[str, str], set[Link]] = field(default_factory=dict)
    """The links that were tried, of each possible cause by kind and name."""
    again: Counter[Link] = field(default_factory=Counter)
    """Trials in rounds of confirmation."""


class FabricSearch:
    """The search; deterministic, so that every rank computes the same next round."""

    def __init__(self, positions: Sequence[Position], limits: LateLimits) -> None:
        self.positions, self.limits = tuple(positions), limits
        self.rounds = 0
        self._at = {(position.node, position.rail): rank for rank, position in enumerate(self.positions)}
        self._rails: dict[int, list[int]] = {}
        for position in self.positions:
            self._rails.setdefault(position.node, []).append(position.rail)
        racks = {position.node: position.rack or "" for position in self.positions}
        self._racks, self._sizes = racks, Counter(racks.values())
        self._several_rails = len({position.rail for position in self.positions}) > 1
        # Neighbours of a rack are neighbours here, so that the halves follow the racks.
        self.nodes = sorted(racks, key=lambda node: (racks[node], node))
        self._planned = list(all_rounds(self.nodes) if len(self.nodes) <= FEW else halves(self.nodes))
        self._alone: dict[int, list[float | None]] = {}
        self._evidence = _Evidence()
        self.stopped: list[int] = []
        self._dead: set[int] = set()
        self._confirmations = 0
        self._now = Round(ALONE)
        self._tried_with: dict[int, set[int]] = {}
        self._again_with: dict[int, set[int]] = {}

    # --- rounds

    def next_round(self) -> Round | None:
        """Return what to try next; None if everything is explained."""
        self._now = self._next() or Round("end")
        return None if self._now.kind == "end" else self._now

    def _next(self) -> Round | None:
        if not self.rounds:
            return Round(ALONE, ranks=tuple(self._present(range(len(self.positions)))))
        if self.rounds == 1:
            slow = [rank for rank in self._slow_alone() if rank not in self.stopped]
            if slow:
                return Round(ALONE, ranks=tuple(slow))
        while self._planned:
            links = tuple(link for pair in self._planned.pop(0) for link in self._links(*pair))
            if links:
                return Round(EXCHANGE, links)
        if self._confirmations < MOST_CONFIRMATIONS:
            links = self._to_confirm()
            if links:
                self._confirmations += 1
                return Round(EXCHANGE, links)
        return None

    def take(self, outcome: Mapping[Any, Any], stopped: Iterable[int] = ()) -> None:
        """Record the outcome of the round: a Trial for each link, or seconds for each rank alone.

        ``stopped``: ranks that no longer answer; they take no further part.
        """
        self.rounds += 1
        self.stopped += [rank for rank in stopped if rank not in self.stopped]
        self._dead |= {self.positions[rank].node for rank in self.stopped}
        if self._now.kind == ALONE:
            for rank in self._now.ranks:
                if rank not in self.stopped:
                    self._alone.setdefault(rank, []).append(outcome.get(rank))
            return
        for link in self._now.links:
            if not set(link) & set(self.stopped):
                if link not in self._evidence.trials:
                    for key in self._keys(link):
                        self._evidence.members.setdefault(key, set()).add(link)
                self._evidence.trials.setdefault(link, []).append(outcome[link])
                self._evidence.again[link] += 1 if self._confirmations else 0
                node, other = (self.positions[rank].node for rank in link)
                for met in (self._tried_with, *([self._again_with] if self._confirmations else [])):
                    met.setdefault(node, set()).add(other)
                    met.setdefault(other, set()).add(node)
        self._bury()

    def _bury(self) -> None:
        """Let nodes take no further part that failed with several partners and with none succeeded."""
        failed: dict[int, set[int]] = {}
        alive: set[int] = set()
        for link, trials in self._evidence.trials.items():
            nodes = [self.positions[rank].node for rank in link]
            if any(trial.seconds is not None for trial in trials):
                alive |= set(nodes)
            else:
                failed.setdefault(nodes[0], set()).add(nodes[1])
                failed.setdefault(nodes[1], set()).add(nodes[0])
        self._dead |= {node for node, partners in failed.items() if node not in alive and len(partners) >= DEAD}

    def _present(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self.positions[rank].node not in self._dead]

    def _links(self, node: int, other: int) -> Iterator[Link]:
        """Yield the links between two nodes, one on each rail that both have."""
        if {node, other} & self._dead:
            return
        for rail in self._rails[node]:
            if rail in self._rails[other]:
                first, second = sorted((self._at[node, rail], self._at[other, rail]))
                yield first, second

    # --- what was late

    def reference(self) -> float | None:
        """Return the seconds of a good link: the lower quartile over all links of their fastest trial.

        Not the median: of few nodes, a bad one has most of the links.
        """
        best = sorted(
            min(trial.seconds for trial in trials if trial.seconds is not None)
            for trials in self._evidence.trials.values()
            if any(trial.seconds is not None for trial in trials)
        )
        if not best:
            return self.limits.expected_s
        usual = max(best[(len(best) - 1) // 4], 1e-9)
        return usual if self.limits.expected_s is None else min(usual, self.limits.expected_s)

    def late_links(self) -> set[Link]:
        """Return the links that were late, corrupt or failed in most of their trials."""
        usual = self.reference()
        late = set()
        for link, trials in self._evidence.trials.items():
            wrong = sum(self._late(trial, usual) for trial in trials)
            if wrong * 2 > len(trials) or (wrong * 2 == len(trials) and len(trials) < TRIALS):
                late.add(link)
        return late

    def _late(self, trial: Trial, usual: float | None) -> bool:
        if trial.seconds is None or trial.corrupt:
            return True
        if usual is None:
            return False
        return trial.seconds > usual * self.limits.factor and trial.seconds > usual + self.limits.least_s

    def _slow_alone(self) -> list[int]:
        known = [seconds for trials in self._alone.values() for seconds in trials[:1] if seconds is not None]
        if not known:
            return []
        usual = statistics.median_low(known)
        limit_s = max(usual * self.limits.alone_factor, usual + self.limits.alone_least_s)
        return [
            rank
            for rank, trials in sorted(self._alone.items())
            if all(seconds is not None and seconds > limit_s for seconds in trials)
        ]

    # --- causes

    def causes(self) -> list[Suspect]:
        """Return the causes of everything that was late, the one that explains most first."""
        known = [seconds for trials in self._alone.values() for seconds in trials if seconds is not None]
        usual = statistics.median_low(known) if known else 1.0
        suspects = [
            Suspect("stopped", (rank,), f"rank {rank}", 0, 0, 0, None, confirmed=True) for rank in sorted(self.stopped)
        ]
        for rank in self._slow_alone():
            took = [seconds for seconds in self._alone[rank] if seconds is not None]
            share = round(usual / statistics.median(took), 3)
            suspects.append(
                Suspect("gpu", (rank,), f"rank {rank}", len(took), len(took), 0, share, confirmed=len(took) > 1)
            )
        return suspects + [self._described(*cause) for cause in self._explained()]

    def _explained(self) -> list[tuple[str, str, frozenset[Link]]]:
        """Return kind, name and late links of the causes: the greedy cover of what was late."""
        left = self.late_links()
        explained: set[Link] = set()
        best: tuple[str, str] | None
        covered: frozenset[Link]
        members = self._evidence.members
        of_link = {link: self._keys(link) for link in left}
        late_at_home = self._late_at_home(left)
        causes = []
        while left:
            best_rank: tuple[float, float, int, str] | None = None
            best, covered = None, frozenset()
            for key in {key for link in left for key in of_link[link]}:
                late = frozenset(members[key] & left)
                tried = members[key] - (explained - late)
                if key[0] in RACKS:
                    late = frozenset(link for link in late if not self._nodes(link) & late_at_home)
                    tried = {link for link in tried if not self._nodes(link) & late_at_home}
                if key[0] == "rank" or (key[0] == "node" and self._single(key[1])):
                    late = self._late_at_times([[link] for link in tried], late)
                elif len(late) < max((SHARE_OF_RACKS if key[0] in RACKS else SHARE_OF_MANY) * len(tried), 2):
                    late = self._late_at_times(self._pairs(tried), late) if key[0] == "node" else frozenset()
                if not late:
                    continue
                rank = (-len(late), -len(late) / len(tried), PREFERENCE.index(key[0]), key[1])
                if best_rank is None or rank < best_rank:
                    best, covered, best_rank = key, late, rank
            if best is None:
                link = min(left)
                best, covered = ("link", f"{link[0]}-{link[1]}"), frozenset({link})
            causes.append((*best, covered))
            left -= covered
            explained |= covered
        return self._of_one_node(causes)

    def _of_one_node(
        self, causes: Sequence[tuple[str, str, frozenset[Link]]]
    ) -> list[tuple[str, str, frozenset[Link]]]:
        """Return the causes with the node in place of its ranks where most of these are causes: they share a cable."""
        number = Counter(self.positions[int(name)].node for kind, name, _ in causes if kind == "rank")
        nodes = {node for node, ranks in number.items() if ranks >= max(SHARE * len(self._rails[node]), 2)}
        links_by_cause: dict[tuple[str, str], frozenset[Link]] = {}
        for kind, name, late in causes:
            ranks = {int(name)} if kind == "rank" else set(min(late)) if kind == "link" else set()
            suspect_nodes = nodes & {self.positions[rank].node for rank in ranks}
            key = ("node", str(min(suspect_nodes))) if suspect_nodes else (kind, name)
            links_by_cause[key] = links_by_cause.get(key, frozenset()) | late
        return [(*key, late) for key, late in links_by_cause.items()]

    def _late_at_times(self, parts: Sequence[Sequence[Link]], late: frozenset[Link]) -> frozenset[Link]:
        """Return the late links of a cause if enough of its parts are late; a part is late with almost all its links.

        Fewer are enough if they were late more than once.
        """
        several = [links for links in parts if sum(link in late for link in links) >= SHARE_OF_MANY * len(links)]
        share = SHARE
        if len(several) < SHARE * len(parts):
            several = [links for links in several if all(len(self._evidence.trials[link]) > 1 for link in links)]
            share = SHARE_AT_TIMES
        if len(several) < max(share * len(parts), 2):
            return frozenset()
        return frozenset(link for links in several for link in links if link in late)

    def _pairs(self, links: Iterable[Link]) -> list[list[Link]]:
        """Return the links of each pair of nodes: all its rails."""
        pairs: dict[frozenset[int], list[Link]] = {}
        for link in links:
            pairs.setdefault(frozenset(self._nodes(link)), []).append(link)
        return list(pairs.values())

    def _nodes(self, link: Link) -> set[int]:
        return {self.positions[rank].node for rank in link}

    def _late_at_home(self, late: set[Link]) -> set[int]:
        """Return the nodes that are late with most partners of their own rack."""
        tried: Counter[int] = Counter()
        wrong: Counter[int] = Counter()
        for link in self._evidence.trials:
            nodes = self._nodes(link)
            if len({self._racks[node] for node in nodes}) == 1:
                tried.update(nodes)
                wrong.update(nodes if link in late else ())
        return {node for node, number in wrong.items() if 2 * number > tried[node]}

    def _single(self, node: str) -> bool:
        return len(self._rails[int(node)]) == 1

    def _keys(self, link: Link) -> list[tuple[str, str]]:
        """Return the possible causes of a late link, by kind and name."""
        ends = [self.positions[rank] for rank in link]
        keys = [("node", str(end.node)) for end in ends]
        keys += [("rank", str(rank)) for rank in link if not self._single(str(self.positions[rank].node))]
        if self._several_rails:
            keys.append(("rail", str(ends[0].rail)))
        racks = sorted(self._racks[end.node] for end in ends)
        if racks[0] != racks[1]:
            keys += [("rack", rack) for rack in racks if self._sizes[rack] > 1]
            if min(self._sizes[rack] for rack in racks) > 1:
                keys.append(("racks", " - ".join(racks)))
            if len(self._sizes) > 2:
                keys.append(("between", "all racks"))
        return keys

    def _described(self, kind: str, name: str, late: frozenset[Link]) -> Suspect:
        usual = self.reference()
        if kind == "link":
            (link,) = late
            ranks: tuple[int, ...] = link
            tried = self._evidence.trials[link]
            late_number, number = sum(self._late(trial, usual) for trial in tried), len(tried)
        else:
            links = self._evidence.members[kind, name]
            late_number, number = len(late), len(links)
            ranks = self._of(kind, name, late)
        trials = [trial for link in late for trial in self._evidence.trials[link]]
        rates = [usual / trial.seconds for trial in trials if trial.seconds and usual]
        failed = [trial for trial in trials if trial.seconds is None]
        nodes = {self.positions[rank].node for rank in ranks}
        partners = {self.positions[rank].node for link in late for rank in link} - nodes
        return Suspect(
            kind,
            tuple(ranks),
            name,
            late_number,
            number,
            len(partners),
            round(statistics.median(rates), 3) if len(rates) > len(failed) else None,
            any(trial.corrupt for trial in trials),
            bool(failed) and all(trial.small for trial in failed),
            any(self._evidence.again[link] for link in late),
        )

    def _of(self, kind: str, name: str, late: Iterable[Link]) -> tuple[int, ...]:
        if kind == "rank":
            return (int(name),)
        if kind == "node":
            return tuple(rank for rank, position in enumerate(self.positions) if str(position.node) == name)
        return tuple(sorted({rank for link in late for rank in link}))

    # --- confirmation

    def _to_confirm(self) -> tuple[Link, ...]:
        """Return disjoint links that distinguish each suspect from its partners; empty if every cause is confirmed."""
        causes = self._explained()
        if not causes:
            return ()
        suspects = {node for kind, name, late in causes for node in self._nodes_of(kind, name, late)}
        good = [node for node in self.nodes if node not in suspects and node not in self._dead]
        taken: set[int] = set()
        links: list[Link] = []

        def use(first: int, second: int) -> None:
            taken.update((first, second))
            links.extend(self._links(first, second))

        for kind, name, late in causes:
            if kind in ("node", "rank"):
                node = int(name) if kind == "node" else self.positions[int(name)].node
                self._swap(node, good, taken, use, again=not any(self._evidence.again[link] for link in late))
            elif kind == "link":
                (link,) = late
                ends = [self.positions[rank].node for rank in link]
                fresh = [self._swap(node, good, taken, use, again=False) for node in ends if node not in taken]
                number = len(self._evidence.trials[link])
                if not any(fresh) and number >= TRIALS_OF_LINK and not set(ends) & taken:
                    # Of two ends that are in time with others one may be late at times.
                    fresh = [self._retry(node, ends, good, taken, use) for node in ends]
                if not any(fresh) and number < TRIALS and not set(ends) & taken:
                    use(ends[0], ends[1])
            elif not any(self._evidence.again[link] for link in late):
                for link in sorted(late)[:SAMPLE]:
                    ends = [self.positions[rank].node for rank in link]
                    if not set(ends) & taken:
                        use(ends[0], ends[1])
        return tuple(dict.fromkeys(links))

    def _swap(self, node: int, good: Sequence[int], taken: set[int], use: Any, *, again: bool) -> bool:
        """Try a node with a good partner that it did not have; return whether it is tried."""
        tried = self._tried_with.get(node, set())
        if node in taken or node in self._dead or (len(tried) >= PARTNERS and not again):
            return False
        # Near first: a path between racks is not the node's fault.
        near = sorted(
            (peer for peer in good if peer not in taken and peer != node),
            key=lambda peer: (peer in tried, self._racks[peer] != self._racks[node]),
        )
        if not near or (near[0] in tried and not again):
            return False
        use(node, near[0])
        return True

    def _retry(self, node: int, ends: Sequence[int], good: Sequence[int], taken: set[int], use: Any) -> bool:
        """Try an end of a late link again with a good partner; return whether it is tried."""
        again = self._again_with.get(node, set()) - set(ends)
        near = [peer for peer in good if peer not in taken | again | set(ends) and peer in self._tried_with[node]]
        if node in taken or len(again) >= RETRIES or not near:
            return False
        use(node, min(near, key=lambda peer: self._racks[peer] != self._racks[node]))
        return True

    def _nodes_of(self, kind: str, name: str, late: Iterable[Link]) -> set[int]:
        if kind == "node":
            return {int(name)}
        if kind == "rank":
            return {self.positions[int(name)].node}
        return {self.positions[rank].node for link in late for rank in link} if kind == "link" else set()

    # --- figures

    def rows(self) -> Iterator[tuple[int, int, float | None]]:
        """Yield each pair of nodes that was tried, with the median seconds of its slowest rail; None: one failed."""
        pairs: dict[tuple[int, int], list[float | None]] = {}
        for link, trials in self._evidence.trials.items():
            node, other = sorted(self.positions[rank].node for rank in link)
            took = [trial.seconds for trial in trials]
            known = [seconds for seconds in took if seconds is not None]
            pairs.setdefault((node, other), []).append(statistics.median(known) if len(known) * 2 > len(took) else None)
        for (node, other), slowest in sorted(pairs.items()):
            known = [seconds for seconds in slowest if seconds is not None]
            yield node, other, max(known) if len(known) == len(slowest) else None


def halves(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round: the first half with the second, then the same within each half."""
    parts = [list(nodes)]
    while any(len(part) > 1 for part in parts):
        pairs: list[tuple[int, int]] = []
        smaller: list[list[int]] = []
        for part in parts:
            middle = len(part) // 2
            pairs += list(zip(part[:middle], part[middle:]))
            smaller += [part[:middle], part[middle:]]
        yield pairs
        parts = smaller


def all_rounds(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round of a tournament: every node with every other, n - 1 rounds."""
    ring = [*nodes, *([-1] if len(nodes) % 2 else [])]
    for _ in range(len(ring) - 1):
        middle = len(ring) // 2
        pairs = zip(ring[:middle], reversed(ring[middle:]))
        yield [pair for pair in pairs if -1 not in pair]
        ring = [ring[0], ring[-1], *ring[1:-1]]
