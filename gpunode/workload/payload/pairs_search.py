"""Search for bad links between ranks: the links of each round, and the conclusion from its outcome. No ranks, no clock.

A round tries a set of links at the same time; each rank reports whether its part of it was in time. A link is good if
both of its ranks were in time: a sender need not notice what its receiver waits for. The rest is split, links with two
late ranks first, until the links to try have no rank in common: then each outcome is that of one link alone, which
names it. One bad link takes O(log n) rounds, k of them O(k log n); no number of bad links is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable


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
