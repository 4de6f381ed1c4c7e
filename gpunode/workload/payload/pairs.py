"""Exchanges between pairs of ranks in rounds, until each link between two ranks is known as good or bad.

A round tries a set of links at the same time; each rank reports whether its part of it was in time. A link is good if
both of its ranks were in time: a sender need not notice what its receiver waits for. The rest is split, links with two
late ranks first, until the links to try have no rank in common: then each outcome is that of one link alone, which
names it. One bad link takes O(log n) rounds, k of them O(k log n); no number of bad links is assumed. The search knows
no ranks and no clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

from gpunode.workload.payload.group import Group, Seat
from gpunode.workload.payload.isolate import one_line
from gpunode.workload.payload.measuring import significant


def links_of(ranks: int) -> list[tuple[int, int]]:
    """Return all links, the smaller rank first."""
    return [(rank, other) for rank in range(ranks) for other in range(rank + 1, ranks)]


def matching_of(link: tuple[int, int], ranks: int) -> int:
    """Return the number of the matching that a link belongs to: links of one matching have no rank in common.

    The schedule of a round-robin tournament: the last rank of an even number plays against each in turn.
    """
    rounds = ranks - 1 + ranks % 2
    rank, other = link
    if ranks % 2 == 0 and other == ranks - 1:
        return 2 * rank % rounds
    return (rank + other) % rounds


class Search:
    """The search over all links of a group; deterministic, so that every rank computes the same next round."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rounds = 0
        self.bad: set[tuple[int, int]] = set()
        self.cleared: set[tuple[int, int]] = set()
        self._unknown = set(links_of(ranks))
        """Neither known as good nor as bad."""
        self._suspects: set[tuple[int, int]] = set()
        """A part of the unknown ones that contains a bad one."""
        self._core: set[tuple[int, int]] = set()
        """Those of the suspects with two late ranks: to be tried first."""
        self._tried: frozenset[tuple[int, int]] = frozenset()

    def next_links(self) -> frozenset[tuple[int, int]]:
        """Return the links to try in the next round; empty if every link is known."""
        if not self.rounds:
            # Each link alone: the time of a good link.
            tried = self._of_matchings(self._unknown, [matching_of((0, 1), self.ranks)])
        elif not self._suspects:
            tried = set(self._unknown)
        else:
            tried = self._core or self._suspects
            if not alone(tried):
                matchings = sorted({matching_of(link, self.ranks) for link in tried})
                tried = self._of_matchings(tried, matchings[: len(matchings) // 2])
        self._tried = frozenset(tried)
        return self._tried

    def _of_matchings(self, links: Iterable[tuple[int, int]], numbers: list[int]) -> set[tuple[int, int]]:
        return {link for link in links if matching_of(link, self.ranks) in numbers}

    def take(self, late: Iterable[int]) -> None:
        """Record the outcome of the round: the ranks that did not finish their part in time."""
        late = set(late)
        self.rounds += 1
        left = {link for link in self._tried if set(link) & late}
        self.cleared |= self._tried - left
        self._unknown -= self._tried - left
        rest = self._suspects - self._tried
        if alone(self._tried):
            self.bad |= left
            self._unknown -= left
            # One bad link explains the suspects; a later round tries the rest of them together with all others.
            self._suspects = set() if left else rest
            self._core &= self._suspects
            return
        self._suspects = left or rest
        self._core = {link for link in left if set(link) <= late} if left else self._core & rest

    @property
    def bad_ranks(self) -> list[int]:
        """Return the ranks of which all links are bad, while other ranks have good ones."""
        if self.ranks < 3 or not self.cleared:
            return []
        return [rank for rank in range(self.ranks) if sum(rank in link for link in self.bad) == self.ranks - 1]


def alone(links: Iterable[tuple[int, int]]) -> bool:
    """Return whether no two of the links have a rank in common."""
    ranks = [rank for link in links for rank in link]
    return len(ranks) == len(set(ranks))


BYTES, BYTES_ON_PROCESSOR = 256 * 2**20, 2**20
FACTORS = {"nccl": 1.5, "gloo": 4.0}
"""A link that takes this many times the median is slow. Processes on a CPU disturb each other."""
REPETITIONS = 3
WARMUPS = 1
LEAST_S = {"nccl": 0.0005, "gloo": 0.05}
"""A smaller difference comes from the scheduler, not from a link."""


class Exchange:
    """The exchange of one rank in a round: send to each partner and receive from it, all at the same time."""

    def __init__(self, group: Group, size: int | None = None) -> None:
        self._group = group
        torch, device = group.torch, group.device
        self.size = size or (BYTES if device.type == "cuda" else BYTES_ON_PROCESSOR)
        generator = torch.Generator().manual_seed(11)
        words = torch.randint(-(2**31), 2**31 - 1, (self.size // 4,), generator=generator, dtype=torch.int32)
        self._pattern = words.to(device)
        self._sent = self._pattern ^ (group.seat.rank + 1)
        self._received: dict[int, Any] = {}

    def run(self, partners: list[int]) -> dict[str, Any]:
        """Return ``seconds`` (None: it failed), ``corrupt`` partners, and ``error``."""
        torch = self._group.torch
        self._received = {partner: torch.zeros_like(self._sent) for partner in partners}
        try:
            for _ in range(WARMUPS):
                self._once(partners)
            seconds = [self._once(partners) for _ in range(REPETITIONS)]
        except Exception as err:
            return {"seconds": None, "corrupt": [], "error": one_line(f"{type(err).__name__}: {err}")}
        corrupt = [
            partner
            for partner, received in self._received.items()
            if int((received != self._pattern ^ (partner + 1)).sum())
        ]
        return {"seconds": statistics.median(seconds), "corrupt": corrupt, "error": None}

    def _once(self, partners: list[int]) -> float:
        if self._group.device.type == "cuda":
            return self._group.seconds(lambda: self._begun_together(partners), 1)[0]
        started = time.perf_counter()
        works = []
        for partner in partners:
            works += [send(self._group, self._sent, partner)]
            works += [self._group.distributed.irecv(self._received[partner], partner)]
        for work in works:
            work.wait()
        return time.perf_counter() - started

    def _begun_together(self, partners: list[int]) -> None:
        """Begin all exchanges of a round in one group, as NCCL requires: else two ranks that begin with other partners
        deadlock.
        """
        distributed = self._group.distributed
        both = []
        for partner in partners:
            both.append(distributed.P2POp(distributed.isend, self._sent, partner))
            both.append(distributed.P2POp(distributed.irecv, self._received[partner], partner))
        for work in distributed.batch_isend_irecv(both):
            work.wait()


def send(group: Group, message: Any, partner: int) -> Any:
    """Begin to send to a partner."""
    return group.distributed.isend(message, partner)


def run(seat: Seat, part: int) -> dict[str, Any]:
    """Return the values of ``nccl.pairs``, the same on all ranks."""
    search, factor = Search(seat.size), FACTORS[seat.backend]
    single_s: float | None = None
    verdicts: dict[tuple[int, int], dict[str, Any]] = {}
    with Group(seat, part) as group:
        exchange = Exchange(group)
        while True:
            links = search.next_links()
            if not links:
                break
            partners = sorted(other for link in links if seat.rank in link for other in link if other != seat.rank)
            # A round of a rank without a partner is over at once, and in time.
            answers = group.share("round", exchange.run(partners) if partners else None)
            if single_s is None:
                single_s = median_of_links(links, answers)
            search.take(late_ranks(links, answers, single_s, seat.backend))
            if alone(links):
                verdicts.update({link: verdict(link, answers, exchange.size) for link in links & search.bad})
            if any(answer is not None and answer["error"] for answer in answers):
                group.restart(search.rounds)
    rate = None if single_s is None else significant(exchange.size / single_s / 1e9)
    return {
        **group.values,
        "rounds": search.rounds,
        "size_bytes": exchange.size,
        "links": len(links_of(seat.size)),
        "cleared": len(search.cleared),
        "median_gb_per_s": rate,
        "slow_factor": factor,
        "bad": [verdicts[link] for link in sorted(search.bad)],
        "bad_ranks": search.bad_ranks,
    }


def median_of_links(links: frozenset[tuple[int, int]], answers: list[Any]) -> float | None:
    """Return the median seconds of the first round's links, each alone: of those that finished."""
    took = [link_seconds(link, answers) for link in links]
    known = [seconds for seconds in took if seconds is not None]
    return max(statistics.median_low(known), 1e-9) if known else None


def link_seconds(link: tuple[int, int], answers: list[Any]) -> float | None:
    """Return the seconds of a link that was tried alone: of the later of its two ranks; None if one of them failed."""
    took = [answers[rank]["seconds"] for rank in link]
    return None if None in took else max(took)


def late_ranks(links: frozenset[tuple[int, int]], answers: list[Any], single_s: float | None, backend: str) -> set[int]:
    """Return the ranks with exchanges that failed, arrived corrupt, or took longer than healthy links would take.

    A rank with several partners shares its own bandwidth between them: each gets the time of a link alone.
    """
    late = set()
    for rank, answer in enumerate(answers):
        if answer is None:
            continue
        healthy_s = None if single_s is None else single_s * sum(rank in link for link in links)
        slow_s = None if healthy_s is None else healthy_s + max((FACTORS[backend] - 1) * healthy_s, LEAST_S[backend])
        seconds = answer["seconds"]
        if seconds is None or answer["corrupt"] or (slow_s is not None and seconds > slow_s):
            late.add(rank)
    return late


def verdict(link: tuple[int, int], answers: list[Any], size: int) -> dict[str, Any]:
    """Return a bad link in the form of ``BadLink``."""
    seconds = link_seconds(link, answers)
    corrupt = any(answers[rank]["corrupt"] for rank in link)
    kind = "failed" if seconds is None else "corrupt" if corrupt else "slow"
    rate = None if seconds is None else significant(size / seconds / 1e9)
    return {"ranks": list(link), "verdict": kind, "bandwidth_gb_per_s": rate}
