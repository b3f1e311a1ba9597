"""Peers drawn by link: what must hold in every round, the law itself, and what it does to consensus."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.core.consensus import exact, moments, rate, spectral_gap
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.matching import Preferred, Rates
from gossamer.core.members import over
from gossamer.core.plan import uniform
from gossamer.core.topology import OnePeer, TwoPeer
from gossamer.recipes import Setting, gasloc

CARD = Gpu("card", 100.0, 16.0)


def places(*of: int, far: float = 10.0, near: float = 1000.0) -> Rates:
    """Workers at places, `near` Mbit/s within one and `far` between two."""
    many = max(of) + 1
    link = tuple(tuple(near if a == b else far for b in range(many)) for a in range(many))
    return Rates((near,) * len(of), (near,) * len(of), of, link)


TWO_SITES = places(0, 0, 1, 1)


@settings(max_examples=30, deadline=None)
@given(
    place=st.lists(st.integers(0, 3), min_size=2, max_size=17),
    seed=st.integers(0, 2**40),
    round=st.integers(0, 10**6),
    peers=st.sampled_from([1, 2]),
    prefer=st.sampled_from([0.1, 1.0, 4.0]),
    alpha=st.sampled_from([0.5, 1.0]),
)
def test_every_round_is_a_matching_or_a_cycle_and_preserves_the_mean(
    place: list[int], seed: int, round: int, peers: Literal[1, 2], prefer: float, alpha: float
) -> None:
    n = len(place)
    t = Preferred(n, seed, peers, places(*place), prefer, alpha)
    mixing, again = t.at(round), Preferred(n, seed, peers, places(*place), prefer, alpha).at(round)
    w = mixing.dense()
    np.testing.assert_array_equal(w, again.dense())
    mixing.validate()
    assert mixing.is_symmetric and mixing.is_doubly_stochastic()
    heard = [len(mixing.inn(i)) for i in range(n)]
    if peers == 1:
        assert sorted(heard) == [0] * (n % 2) + [1] * (n - n % 2)
    else:
        assert heard == [min(2, n - 1)] * n
        seen = {0}  # one cycle, not several
        for _ in range(n):
            seen |= {j for i in seen for j in mixing.inn(i)}
        assert len(seen) == n


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("prefer", [0.5, 3.0])
def test_among_equal_links_it_is_the_uniform_schedule(n: int, prefer: float) -> None:
    alike = places(*[0] * n)
    for t in range(12):
        np.testing.assert_array_equal(Preferred(n, 3, 1, alike, prefer).at(t).dense(), OnePeer(n, 3).at(t).dense())
        np.testing.assert_array_equal(Preferred(n, 3, 2, alike, prefer).at(t).dense(), TwoPeer(n, 3).at(t).dense())


@pytest.mark.parametrize("prefer", [0.25, 0.5, 1.0])
def test_a_pair_is_drawn_in_proportion_to_its_weight(prefer: float) -> None:
    """Two sites of two: whoever picks first takes its neighbour with probability 1 / (1 + 2 w), w the weight of a far link."""
    w, rounds = (10 / 1000) ** prefer, 2000
    p = 1 / (1 + 2 * w)
    t = Preferred(4, 5, 1, TWO_SITES, prefer)
    near = sum(t.at(r).row(0)[1][0] == 1 for r in range(rounds))
    assert abs(near / rounds - p) < 4 * math.sqrt(p * (1 - p) / rounds)


def test_unlike_workers_are_drawn_as_often_as_their_lines_say() -> None:
    """Three workers, the last on a slow line: of the three pairs, the fast one has probability
    1/3 [first picks] ... worked out over who is first: 2/3 * 1/(1+w) + 1/3 * 0."""
    slow = Rates((100.0, 100.0, 25.0), (100.0, 100.0, 100.0), (0, 0, 0), ((1000.0,),))
    w, rounds = 0.25, 2000
    p = 2 / 3 / (1 + w)
    t = Preferred(3, 1, 1, slow, 1.0)
    fast = sum(t.at(r).inn(2) == () for r in range(rounds))
    assert abs(fast / rounds - p) < 4 * math.sqrt(p * (1 - p) / rounds)


def test_the_gap_is_that_of_the_law() -> None:
    """n = 4: three matchings, of which the near one has probability p. Against E[W (x) W] of that law."""
    p = 1 / (1 + 2 * 0.1)
    pi, law = np.eye(4) - 1 / 4, np.zeros((16, 16))
    for pairs, share in (((1, 0, 3, 2), p), ((2, 3, 0, 1), (1 - p) / 2), ((3, 2, 1, 0), (1 - p) / 2)):
        w = pi @ (np.eye(4) + np.eye(4)[list(pairs)]) / 2
        law += share * np.kron(w, w)
    known = 1 - math.sqrt(np.abs(np.linalg.eigvals(law)).max())
    assert spectral_gap(Preferred(4, 0, 1, TWO_SITES, 0.5)) == pytest.approx(known, abs=0.03)


@pytest.mark.parametrize("peers, uniform_law", [(1, OnePeer(8, 0)), (2, TwoPeer(8, 0))])
def test_preference_costs_consensus(peers: Literal[1, 2], uniform_law: OnePeer | TwoPeer) -> None:
    rates = places(0, 0, 0, 0, 1, 1, 1, 1, far=100.0)
    graphs = [Preferred(8, 0, peers, rates, prefer) for prefer in (0.01, 1.0, 2.0)]
    gaps = [spectral_gap(g) for g in graphs]
    assert gaps[0] == pytest.approx(spectral_gap(uniform_law), rel=0.05)
    assert gaps[0] > 1.05 * gaps[1] > 1.1 * gaps[2] > 0
    assert moments(graphs[0]) is None and not exact(graphs[0])
    far = [sum((j >= 4) != (i >= 4) for t in range(60) for i in range(8) for j in g.at(t).inn(i)) for g in graphs]
    assert far[0] > far[1] > far[2] > 0


def test_larger_fleets_are_measured() -> None:
    rates = places(*[i % 3 for i in range(24)], far=300.0)
    measured = rate("outer", Preferred(24, 0, 2, rates, 0.5), lr=0.8, momentum=0.7)
    assert rate("outer", TwoPeer(24, 0), lr=0.8, momentum=0.7) - 0.02 < measured < 0.9


def test_rates_of_a_fleet_are_the_slower_direction_of_lines_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = (
        Site("a", "east", CARD, up_mbps=500.0, down_mbps=900.0, workers=2),
        Site("b", "west", CARD, up_mbps=50.0, down_mbps=900.0, workers=30),
        Site("c", "west", CARD, up_mbps=800.0, down_mbps=700.0),
    )
    links = {(a, b): Link(400.0 if a == "east" else 300.0, 10.0) for a in ("east", "west") for b in ("east", "west")}
    asked, link = 0, Fleet.link

    def count(self: Fleet, i: int, j: int) -> Link:
        nonlocal asked
        asked += 1
        return link(self, i, j)

    monkeypatch.setattr(Fleet, "link", count)
    rates = Rates.of(Fleet("f", sites, links))
    assert asked == 9
    assert rates.kind == (0, 0, *[1] * 30, 2)
    np.testing.assert_array_equal(rates.between(), [[500.0, 50.0, 300.0], [50.0, 50.0, 50.0], [300.0, 50.0, 0.0]])


@pytest.mark.parametrize("peers", [1, 2])
def test_without_the_absent_it_is_the_law_of_those_who_are_left(peers: Literal[1, 2]) -> None:
    """Two sites of three, one of the second gone: a matching or cycle of five, nobody talks to the absent, near links preferred."""
    whole = Preferred(6, 3, peers, places(0, 0, 0, 1, 1, 1), 1.0)
    left = [0, 1, 2, 3, 5]
    few, near = Preferred(5, 3, peers, places(0, 0, 0, 1, 1), 1.0), 0
    for t in range(40):
        mixing = over(whole, frozenset({4}), t)
        assert mixing.row(4) == ((4, 1.0),) and mixing.is_symmetric and mixing.is_doubly_stochastic()
        np.testing.assert_array_equal(mixing.dense()[np.ix_(left, left)], few.at(t).dense())
        near += sum((i < 3) == (j < 3) for i in left for j in mixing.inn(i))
    assert near > 40 * 5 * peers * 0.55
    assert over(Preferred(2, 0, 1, places(0, 1), 1.0), frozenset({1}), 3).row(0) == ((0, 1.0),)
    assert over(Preferred(4, 0, 1, TWO_SITES, 1.0, perfect=True), frozenset({1}), 3).is_doubly_stochastic()


def test_a_link_to_oneself_does_not_count() -> None:
    """Each worker alone at its place, whatever "within a place" says: the weights are those of the links that exist."""
    alone, fast = places(0, 1, 2, near=1.0, far=1.0), places(0, 1, 2, near=1000.0, far=1.0)
    fast = Rates((1e4,) * 3, (1e4,) * 3, fast.place, fast.link)
    off = ~np.eye(3, dtype=bool)
    for rates in (alone, fast):
        assert set(Preferred(3, 0, 1, rates, 2.0).weights[off].tolist()) == {1 << 20}


def test_the_recipe_takes_rates_only_for_a_preference() -> None:
    def none() -> Rates:
        raise AssertionError("nobody needs them")

    setting = Setting(uniform(4, 2, 2, 8), rounds=3, seed=9)
    for given_rates in (None, none):
        plain = gasloc(Setting(setting.plan, 3, 9, rates=given_rates), topology="one_peer", prefer=0.0).topology
        assert plain == OnePeer(4, 9)
    drawn = gasloc(Setting(setting.plan, 3, 9, rates=lambda: TWO_SITES), topology="one_peer", prefer=0.5).topology
    assert drawn == Preferred(4, 9, 1, TWO_SITES, 0.5) and hash(drawn) == hash(Preferred(4, 9, 1, places(0, 0, 1, 1), 0.5))
    assert gasloc(Setting(uniform(1, 2, 2, 8), 3), prefer=1.0).topology == TwoPeer(1, 0)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: Preferred(4, 0, 1, TWO_SITES, 0.0), "0 is the uniform law"),
        (lambda: Preferred(4, 0, 1, TWO_SITES, math.nan), "prefer = nan"),
        (lambda: Preferred(4, 0, 3, TWO_SITES, 1.0), "peers = 3"),  # type: ignore[arg-type]
        (lambda: Preferred(4, 0, 1, TWO_SITES, 1.0, alpha=2.5), "alpha = 2.5"),
        (lambda: Preferred(5, 0, 1, TWO_SITES, 1.0), "of 4 workers for a topology of 5"),
        (lambda: Preferred(4, 0, 2, TWO_SITES, 1.0, perfect=True), "perfect=True"),
        (lambda: Preferred(4, 0, 1, TWO_SITES, 1.0).at(-1), "round = -1"),
        (lambda: Rates((1.0,), (1.0, 1.0), (0,), ((1.0,),)), "1 uplinks, 2 downlinks"),
        (lambda: Rates((1.0,), (1.0,), (1,), ((1.0,),)), "workers at places"),
        (lambda: Rates((1.0,), (0.0,), (0,), ((1.0,),)), "above 0 Mbit/s"),
        (lambda: Rates(tuple(1.0 + i for i in range(3000)), (1.0,) * 3000, (0,) * 3000, ((1.0,),)), "3000 unlike workers"),
        (lambda: gasloc(Setting(uniform(4, 2, 2, 8), 3), topology="ring", prefer=1.0), "whose peers are fixed"),
        (lambda: gasloc(Setting(uniform(4, 2, 2, 8), 3), prefer=1.0), "does not know"),
        (lambda: gasloc(Setting(uniform(4, 2, 2, 8), 3, rates=lambda: TWO_SITES), prefer=-1.0), "prefer = -1.0"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        call()
