"""Bad links by name: every set of bad links is named, exactly, in a number of rounds that grows with log n."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.workload.payload.pairs import Search, alone, links_of, matching_of

PAGE = Path(__file__).parents[3] / "docs" / "measurements.md"
Link = tuple[int, int]
Outcome = Callable[[frozenset[Link], set[Link]], set[int]]


def both(tried: frozenset[Link], bad: set[Link]) -> set[int]:
    """Both ranks of a bad link are late: a slow link."""
    return {rank for link in tried & bad for rank in link}


def receiver(tried: frozenset[Link], bad: set[Link]) -> set[int]:
    """The receiver alone is late: a link that is slow in one direction."""
    return {link[1] for link in tried & bad}


def component(tried: frozenset[Link], bad: set[Link]) -> set[int]:
    """All ranks that hang together with a bad link in this round are late: a collective."""
    late = both(tried, bad)
    while True:
        more = {rank for link in tried if set(link) & late for rank in link} - late
        if not more:
            return late
        late |= more


def searched(ranks: int, bad: Iterable[Link], outcome: Outcome) -> Search:
    search, wrong = Search(ranks), set(bad)
    while tried := search.next_links():
        search.take(outcome(tried, wrong))
        assert search.rounds <= ranks * ranks
    return search


def most_rounds(ranks: int, bad: int) -> int:
    """A calibration, a round for all, and for each bad link a search and another round for all."""
    return 2 + bad * (2 * math.ceil(math.log2(ranks)) + 2)


@pytest.mark.parametrize("ranks", range(2, 34))
def test_links_of_a_matching_have_no_rank_in_common(ranks: int) -> None:
    links = links_of(ranks)
    numbers = {matching_of(link, ranks) for link in links}
    assert numbers == set(range(ranks - 1 + ranks % 2))
    for number in numbers:
        assert alone(link for link in links if matching_of(link, ranks) == number)


@pytest.mark.parametrize("outcome", [both, receiver, component])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_each_single_link_is_named(ranks: int, outcome: Outcome) -> None:
    for link in links_of(ranks):
        search = searched(ranks, [link], outcome)
        assert search.bad == {link}
        assert search.cleared == set(links_of(ranks)) - {link}
        assert search.rounds <= most_rounds(ranks, 1)


@pytest.mark.parametrize("outcome", [both, receiver, component])
def test_each_two_of_eight_ranks_links_are_named(outcome: Outcome) -> None:
    links = links_of(8)
    for number, link in enumerate(links):
        for other in links[number + 1 :]:
            search = searched(8, [link, other], outcome)
            assert search.bad == {link, other}
            assert search.rounds <= most_rounds(8, 2)


@given(st.integers(2, 40), st.data(), st.sampled_from([both, receiver, component]))
@settings(max_examples=effort(50, 300), deadline=None)
def test_any_number_of_bad_links_is_named(ranks: int, data: st.DataObject, outcome: Outcome) -> None:
    bad = data.draw(st.sets(st.sampled_from(links_of(ranks)), max_size=6))
    search = searched(ranks, bad, outcome)
    assert search.bad == bad
    assert search.cleared | search.bad == set(links_of(ranks))
    assert search.rounds <= most_rounds(ranks, len(bad))


@given(st.integers(2, 16), st.data())
@settings(max_examples=effort(30, 100), deadline=None)
def test_it_ends_whatever_is_answered(ranks: int, data: st.DataObject) -> None:
    """Noise: ranks that are late for no reason name nothing forever."""
    search = Search(ranks)
    while search.next_links():
        search.take(data.draw(st.sets(st.integers(0, ranks - 1))))
        assert search.rounds <= ranks * ranks


@pytest.mark.parametrize(("ranks", "one_link", "two_links"), [(8, 4, 7), (64, 4, 7)])
def test_rounds_are_those_of_the_page(ranks: int, one_link: int, two_links: int) -> None:
    """docs/measurements.md; of 64 ranks' two million pairs of links a part."""
    links = links_of(ranks)
    assert searched(ranks, [], both).rounds == 2
    assert max(searched(ranks, [link], both).rounds for link in links[:: ranks // 4]) == one_link
    some = [(first, other) for number, first in enumerate(links[:60]) for other in links[number + 1 :: ranks // 4]]
    assert max(searched(ranks, pair, both).rounds for pair in some[::13]) <= two_links
    assert f"| {ranks} | {len(links)} | 2 | at most {one_link} | at most {two_links} |" in PAGE.read_text(
        encoding="utf-8"
    )


def test_a_rank_that_is_bad_itself_is_distinguished_from_its_links() -> None:
    search = searched(6, [link for link in links_of(6) if 4 in link], both)
    assert search.bad_ranks == [4]
    assert searched(6, [(1, 4)], both).bad_ranks == []
