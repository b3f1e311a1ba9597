"""Mixing matrices and topologies: what must hold in every round, and the moments of GASLoC, exactly."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gossamer.core.consensus import moments
from gossamer.core.errors import BadInput
from gossamer.core.mixing import Mixing
from gossamer.core.topology import (
    Complete,
    Graph,
    OnePeer,
    OnePeerExp,
    Ring,
    Topology,
    TwoPeer,
    cycle,
    greedy_matching,
    matching,
    nearest_two,
    topology,
)

STAR = Graph.of(6, [(0, i) for i in range(1, 6)])
LADDER = Graph.of(8, [(i, i + 1) for i in range(7)] + [(0, 4), (1, 5), (7, 3)])


def all_of(n: int, seed: int = 3, alpha: float = 1.0) -> list[Topology]:
    return [
        Ring(n, alpha),
        Complete(n, alpha),
        OnePeer(n, seed, alpha),
        TwoPeer(n, seed, alpha),
        OnePeerExp(n, alpha),
    ]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 17), seed=st.integers(0, 2**40), round=st.integers(0, 10**6), alpha=st.sampled_from([0.25, 0.7, 1.0]))
def test_every_round_preserves_the_mean(n: int, seed: int, round: int, alpha: float) -> None:
    for t in all_of(n, seed, alpha):
        m = t.at(round)
        m.validate()
        w = m.dense()
        assert m.n == t.n == n
        assert w.shape == (n, n)
        assert (w >= 0).all()
        np.testing.assert_allclose(w.sum(1), 1.0, atol=1e-12)
        np.testing.assert_allclose(w.sum(0), 1.0, atol=1e-12)
        assert m.is_doubly_stochastic()
        assert m.is_symmetric == np.allclose(w, w.T, atol=1e-12)
        x = np.random.default_rng(0).normal(size=(n, 3))
        np.testing.assert_allclose((w @ x).mean(0), x.mean(0), atol=1e-12)
        np.testing.assert_allclose(m.apply(x), w @ x, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 99), alpha=st.sampled_from([0.5, 1.0]))
def test_rows_and_neighbours_are_those_of_the_dense_matrix(n: int, seed: int, alpha: float) -> None:
    for t in all_of(n, seed, alpha):
        m, w = t.at(2), t.at(2).dense()
        for i in range(n):
            assert m.row(i) == tuple((j, float(w[i, j])) for j in range(n) if w[i, j] != 0)
            assert m.inn(i) == tuple(j for j in range(n) if j != i and w[i, j] != 0)
            assert m.out(i) == tuple(j for j in range(n) if j != i and w[j, i] != 0)
            assert all(type(j) is int and type(v) is float for j, v in m.row(i))


def test_published_weights_are_exact() -> None:
    assert Ring(5).at(7).row(0) == ((0, 0.5), (1, 0.25), (4, 0.25))
    assert all(row == Complete(6).at(0).row(0) for row in map(Complete(6).at(0).row, range(6)))
    assert {v for _, v in Complete(6).at(0).row(3)} == {1 / 6}
    for i in range(8):
        assert [v for _, v in OnePeer(8, 1).at(4).row(i)] == [0.5, 0.5]
        assert sorted(v for _, v in TwoPeer(8, 1).at(4).row(i)) == [0.25, 0.25, 0.5]
    # Small fleets: alone, and a cycle of two, whose two edges are one.
    for t in all_of(1):
        assert t.at(3).row(0) == ((0, 1.0),)
        assert t.at(3).inn(0) == t.at(3).out(0) == ()
    for t in all_of(2):
        assert t.at(0).row(1) == ((0, 0.5), (1, 0.5))


def test_of_an_odd_number_one_sits_out_and_not_always_the_same() -> None:
    out = set()
    for r in range(40):
        alone = [i for i in range(5) if OnePeer(5, 9).at(r).inn(i) == ()]
        assert len(alone) == 1
        out.update(alone)
    assert out == set(range(5))


def test_the_graph_is_a_pure_function_of_the_round() -> None:
    for make in (lambda: OnePeer(9, 5), lambda: TwoPeer(9, 5), lambda: TwoPeer(8, 5, admissible=LADDER)):
        t = make()
        assert hash(t) == hash(make())
        assert t == make()
        assert t == pickle.loads(pickle.dumps(t))
        assert t.at(12) is t.at(12)  # memoised
        first = t.at(12).dense()
        for r in range(100):  # pushes round 12 out of the memo
            t.at(r)
        np.testing.assert_array_equal(make().at(12).dense(), first)
        assert any((t.at(r).dense() != first).any() for r in range(5))
    assert any((OnePeer(9, 5).at(r).dense() != OnePeer(9, 6).at(r).dense()).any() for r in range(3))


def mean_moments(n: int, draw: Callable[[NDArray[np.int64]], Mixing]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """E[Lambda] and E[Lambda^2] over all n! permutations; the sums are of multiples of 1/16, so exact."""
    lam = [np.eye(n) - draw(np.array(p)).dense() for p in itertools.permutations(range(n))]
    return sum(lam) / len(lam), sum(a @ a for a in lam) / len(lam)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_moments_of_one_peer(n: int) -> None:
    pi = np.eye(n) - 1 / n
    first, second = mean_moments(n, matching)
    want = n / (2 * (n - 1)) if n % 2 == 0 else 0.5
    np.testing.assert_allclose(first, want * pi, rtol=0, atol=1e-14)
    np.testing.assert_allclose(second, want * pi, rtol=0, atol=1e-14)
    assert moments(OnePeer(n, 0)) == (want, want)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_moments_of_two_peer(n: int) -> None:
    pi = np.eye(n) - 1 / n
    first, second = mean_moments(n, cycle)
    want = (n / (2 * (n - 1)), 3 * n / (8 * (n - 1)) if n >= 3 else 1.0)
    np.testing.assert_allclose(first, want[0] * pi, rtol=0, atol=1e-14)
    np.testing.assert_allclose(second, want[1] * pi, rtol=0, atol=1e-14)
    assert moments(TwoPeer(n, 0)) == want


def test_the_schedule_draws_what_the_moments_assume() -> None:
    for t, pure in ((OnePeer(3, 1), matching), (TwoPeer(4, 1), cycle)):
        possible = {m.dense().tobytes() for m in (pure(np.array(p)) for p in itertools.permutations(range(t.n)))}
        seen = [t.at(r).dense().tobytes() for r in range(300)]
        assert set(seen) == possible
        share = [seen.count(s) / 300 * len(possible) for s in possible]
        assert all(0.7 < part < 1.3 for part in share)


def test_alpha_scales_lambda() -> None:
    for full, half in zip(all_of(7), all_of(7, alpha=0.5), strict=True):
        want = np.eye(7) - 0.5 * (np.eye(7) - full.at(1).dense())
        np.testing.assert_allclose(half.at(1).dense(), want, atol=1e-15)
        np.testing.assert_allclose(full.at(1).damped(0.5).dense(), want, atol=1e-15)
        np.testing.assert_allclose(full.at(1).damped(0.0).dense(), np.eye(7), atol=0)
    # The own weight may vanish, and is then left out of the row.
    assert OnePeer(2, 0, alpha=2.0).at(0).row(0) == ((1, 1.0),)
    assert Complete(4, alpha=4 / 3).at(0).row(1) == ((0, 1 / 3), (2, 1 / 3), (3, 1 / 3))


def test_exponential_graph_reaches_the_mean_in_log2_n_rounds() -> None:
    w = np.eye(8)
    for r in range(3, 6):
        w = OnePeerExp(8).at(r).dense() @ w
    np.testing.assert_allclose(w, 1 / 8, atol=0)
    assert not OnePeerExp(8).at(0).is_symmetric
    assert OnePeerExp(6).at(2).inn(0) == (2,)
    assert OnePeerExp(6).at(2).out(0) == (4,)


def test_matchings_on_an_admissible_graph_are_maximal() -> None:
    for graph in (STAR, LADDER):
        used = set()
        for r in range(60):
            m = OnePeer(graph.n, 4, admissible=graph).at(r)
            pairs = {(i, j) for i in range(graph.n) for j in m.inn(i) if i < j}
            ends = [k for pair in pairs for k in pair]
            assert pairs <= graph.edges
            assert len(ends) == len(set(ends))
            assert all(i in ends or j in ends for i, j in graph.edges)
            assert m.is_symmetric
            assert m.is_doubly_stochastic()
            used |= pairs
        assert used == graph.edges
    first = greedy_matching(LADDER, np.arange(len(LADDER.edges)))
    assert first.row(0) == ((0, 0.5), (1, 0.5))
    assert first.inn(2) == (3,)


def test_two_peer_on_an_admissible_graph() -> None:
    for graph in (STAR, LADDER):
        used = set()
        for r in range(60):
            m = TwoPeer(graph.n, 4, admissible=graph).at(r)
            degree = [len(m.inn(i)) for i in range(graph.n)]
            links = [sum(i in e for e in graph.edges) for i in range(graph.n)]
            for i in range(graph.n):
                assert degree[i] >= min(2, links[i])
                for j, w in m.row(i):
                    assert i == j or (min(i, j), max(i, j)) in graph.edges
                    assert i == j or w == 1 / (1 + max(degree[i], degree[j]))
            assert m.is_symmetric
            assert m.is_doubly_stochastic()
            used |= {(i, j) for i in range(graph.n) for j in m.inn(i) if i < j}
        assert used == graph.edges
    # Where everything is allowed the two nearest are the two neighbours on the cycle, with Metropolis weight 1/3.
    everything, perm = Graph.of(6, itertools.combinations(range(6), 2)), np.array([3, 0, 5, 1, 4, 2])
    assert all(nearest_two(everything, perm).inn(i) == cycle(perm).inn(i) for i in range(6))
    assert nearest_two(everything, perm).row(0)[1] == (3, 1 / 3)


def test_ten_thousand_workers_stay_sparse() -> None:
    m = TwoPeer(10_000, 1).at(0)
    assert sum(len(m.row(i)) for i in range(m.n)) == 30_000
    assert len(pickle.dumps(m)) < 1e6
    assert len(pickle.dumps(Complete(10_000).at(0))) < 1e3


def test_from_dense_and_from_edges_agree() -> None:
    w = np.array([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.0, 0.0, 1.0]])
    m = Mixing.from_dense(w)
    np.testing.assert_array_equal(m.dense(), w)
    assert not m.is_symmetric
    assert not m.is_doubly_stochastic()
    assert (m.inn(1), m.out(1), m.out(2)) == ((2,), (0,), (1,))
    again = Mixing.from_edges(3, [(0, 1), (1, 2), (1, 1), (0, 1)], [0.25, 0.8, 0.9, 0.25])
    np.testing.assert_allclose(again.dense(), w, atol=1e-15)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: OnePeer(5, 0, perfect=True), "odd number"),
        (lambda: OnePeer(6, 0, perfect=True, admissible=STAR), "may leave workers out"),
        (lambda: Ring(0), "at least 1"),
        (lambda: Ring(4, alpha=0.0), "0 < alpha"),
        (lambda: TwoPeer(4, 0, alpha=2.5), "alpha = 2.5"),
        (lambda: Complete(4, alpha=1.5), "1.33333"),
        (lambda: Complete(4, alpha=float("nan")), "alpha = nan"),
        (lambda: OnePeer(7, 0, admissible=STAR), "must agree"),
        (lambda: Graph.of(3, [(0, 1)]), "worker 2 may talk to nobody"),
        (lambda: Graph.of(4, [(0, 1), (2, 3)]), "not connected.*never worker 2"),
        (lambda: Graph.of(2, [(0, 2)]), r"\(0, 2\)"),
        (lambda: Graph.from_adjacency([[0, 1], [0, 0]]), "one direction"),
        (lambda: OnePeer(4, 0).at(-1), "counted from 0"),
        (lambda: Ring(4).at(0).row(4), "worker 4 does not exist"),
        (lambda: Complete(4).at(0).inn(-1), "worker -1 does not exist"),
        (lambda: Mixing.from_dense([[0.5, 0.4], [0, 1]]), "row 0 of W sums to 0.9"),
        (lambda: Mixing.from_dense([[1.5, -0.5], [0, 1]]), r"W\[0, 1\] = -0.5"),
        (lambda: Mixing.from_dense([[1.0, 0.0]]), "shape"),
        (lambda: Mixing.from_edges(2, [(0, 1)], 1.5), "lower alpha"),
        (lambda: Mixing.from_edges(2, [(0, 2)], 0.5), "worker 2"),
        (lambda: Mixing.from_edges(2, [(0, 1)], float("nan")), "nan"),
        (lambda: Ring(4).at(0).damped(3.0), "lower alpha"),
        (lambda: topology("two-peers", 4), "did you mean 'two_peer'"),
        (lambda: topology("ring", 4, perfect=True), "belongs to one_peer"),
        (lambda: topology("complete", 6, admissible=STAR), "no admissible graph"),
    ],
)
def test_bad_input_is_named(make: Callable[[], object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make()


def test_topologies_by_name() -> None:
    assert topology("ring", 4, alpha=0.5) == Ring(4, 0.5)
    assert topology("complete", 4) == Complete(4)
    assert topology("one_peer", 4, 7, perfect=True) == OnePeer(4, 7, perfect=True)
    assert topology("two_peer", 6, 7, admissible=STAR) == TwoPeer(6, 7, admissible=STAR)
    assert topology("one_peer_exp", 5) == OnePeerExp(5)
    assert [t.random for t in all_of(4)] == [False, False, True, True, False]
    adjacency = np.zeros((6, 6))
    adjacency[0, 1:] = adjacency[1:, 0] = 1
    assert Graph.from_adjacency(adjacency) == STAR
