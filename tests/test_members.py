"""Who takes part: graphs over the living, and skipped exchanges that keep the mean. By enumeration and in numbers, nothing is run."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from still import layout, seat_of, setting

from gossamer.core.errors import BadInput
from gossamer.core.members import Roll, over
from gossamer.core.spread import ahead, spread
from gossamer.core.topology import Complete, Graph, OnePeer, OnePeerExp, Ring, Topology, TwoPeer
from gossamer.recipes import Setting, diloco, gasloc
from gossamer.worker.exchange import _row_weights
from gossamer.worker.packet import Header, Packet

WHEEL = Graph.of(7, [(0, j) for j in range(1, 7)] + [(j, j % 6 + 1) for j in range(1, 7)])
TOPOLOGIES: list[Topology] = [
    Ring(7), Complete(7), OnePeer(7, 5), TwoPeer(7, 5), OnePeerExp(7), TwoPeer(7, 5, alpha=0.6),
    OnePeer(7, 5, admissible=WHEEL), TwoPeer(7, 5, admissible=WHEEL),
]  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: type(t).__name__)
def test_the_graph_of_the_living_keeps_their_mean_and_leaves_the_dead_alone(topology: Topology) -> None:
    for absent in (frozenset(c) for k in range(7) for c in itertools.combinations(range(7), k)):
        for round in (0, 1, 9):
            w = over(topology, absent, round)
            assert w.n == 7
            assert w.is_doubly_stochastic()
            assert w.is_symmetric or isinstance(topology, OnePeerExp)
            assert all(w.row(j) == ((j, 1.0),) for j in absent)
            assert all(j not in absent for i in range(7) if i not in absent for j, _ in w.row(i))


def test_the_living_are_matched_anew_as_a_smaller_fleet_would_be() -> None:
    """Six of seven pair up without anybody sitting out; a cycle stays one cycle."""
    living = [0, 1, 2, 4, 5, 6]
    for round in range(20):
        pairs, cycle = over(OnePeer(7, 5), frozenset({3}), round), over(TwoPeer(7, 5), frozenset({3}), round)
        small = TwoPeer(6, 5).at(round)
        for k, i in enumerate(living):
            assert len(pairs.inn(i)) == 1 and len(cycle.inn(i)) == 2
            assert cycle.row(i) == tuple((living[j], w) for j, w in small.row(k))
    assert over(OnePeer(7, 5), frozenset(), 3) is OnePeer(7, 5).at(3)


def test_an_exchange_skipped_by_both_sides_keeps_the_mean() -> None:
    """The law: where i and j skip their exchange, W_ij and W_ji go to the own weights. Any set of pairs, every round."""
    rng = random.Random(1)
    for name, alpha, round in itertools.product(("ring", "one_peer", "two_peer", "complete"), (1.0, 0.5), range(6)):
        method = gasloc(setting(6, 8), topology=name, alpha=alpha)
        pairs = {frozenset(p) for p in itertools.combinations(range(6), 2) if rng.random() < 0.4}
        w = np.zeros((6, 6))
        for i in range(6):
            heard = {j: Packet(Header(7, round, j, 0, 1, 1, 0, 0, 0), 64, None) for j in range(6) if frozenset((i, j)) not in pairs}
            for j, weight in _row_weights(seat_of(i, method), round, heard).items():
                w[i, j] = weight
        assert np.abs(w.sum(0) - 1).max() < 1e-7 and np.abs(w.sum(1) - 1).max() < 1e-7
        one_sided = w.copy()
        one_sided[0] = np.eye(6)[0]
        if np.abs(w[0, 1:]).sum() > 0.1:
            assert np.abs(one_sided.sum(0) - 1).max() > 1e-3, "skipped by one side alone it would not"


def test_a_roll_grows_at_its_end() -> None:
    roll = Roll()
    roll.enter(4, {2})
    roll.enter(9, {2, 5})
    assert [sorted(roll.absent(t)) for t in (3, 4, 8, 9, 99)] == [[], [2], [2], [2, 5], [2, 5]]
    roll.enter(9, {2, 6})  # agreed on anew, before anybody got there
    roll.enter(12, {6})
    roll.enter(13, {6})
    assert roll.epochs == [(4, {2}), (9, {2, 6}), (12, {6})]


def test_links_follow_the_roll_and_past_exchanges_stay_what_they_were() -> None:
    seat = seat_of(0, gasloc(setting(5, 40), topology="ring"))
    seat.roll.enter(6, {1})
    assert (seat.links(5), seat.links(6)) == (((1, 4), (1, 4)), ((2, 4), (2, 4)))
    seat.roll.unheard = (6, frozenset({4}))
    seat._links.clear()
    assert (seat.links(5)[0], seat.links(6)[0]) == ((1,), (2, 4))
    assert layout()


@pytest.mark.parametrize(
    ("topology", "worst"), [(Complete(9), 0), (Ring(9), 3), (Ring(10), 4), (OnePeer(32, 1), 12), (TwoPeer(32, 1), 6), (TwoPeer(256, 1), 9)]
)
def test_how_far_apart_workers_can_be(topology: Topology, worst: int) -> None:
    """The natural bound: it grows like the ring's half, or like a logarithm. The sets grow, each from the one before."""
    found = []
    for round in range(0, 60, 7):
        sets = list(spread(topology, 2, round))
        assert 2 in sets[0] and all(a <= b for a, b in itertools.pairwise(sets)) and len(sets[-1]) == topology.n
        factor = 2 if isinstance(topology, OnePeer) else 3
        assert all(len(b) <= factor * len(a) for a, b in itertools.pairwise(sets)) or isinstance(topology, Complete)
        assert ahead(topology, 2, round) == len(sets) - 1
        assert ahead(topology, 2, round, lag=1) >= ahead(topology, 2, round)
        found.append(len(sets) - 1)
    assert max(found) <= worst and (max(found) > 0 or worst == 0)


def test_deadlines_are_for_gossip_in_both_directions() -> None:
    from dataclasses import replace

    small: Setting = setting(4, 4)
    assert replace(gasloc(small), deadline_s=2.0).outlives
    for method in (diloco(small), gasloc(small, topology="one_peer_exp")):
        assert not method.outlives
        with pytest.raises(BadInput, match="whom a worker hears is who hears it"):
            replace(method, deadline_s=2.0)
    with pytest.raises(BadInput, match="expected more than 0"):
        replace(gasloc(small), deadline_s=0.0)
