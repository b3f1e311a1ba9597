"""Rates of consensus: the published numbers, the exact law by enumeration, and the schedules themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gossamer.core.averaging import Averaged
from gossamer.core.consensus import Form, _sampled, best_momentum, exact, moments, rate, rounds_to, spectral_gap, transition
from gossamer.core.errors import BadInput
from gossamer.core.mixing import Mixing
from gossamer.core.topology import Complete, Graph, OnePeer, OnePeerExp, Ring, Topology, TwoPeer, cycle, matching

FORMS: tuple[Form, ...] = ("local", "mixed", "outer")
Array = NDArray[np.float64]


def literal(form: Form, x: Array, ws: Iterator[Array], lr: float, gamma: float, nesterov: bool = True) -> Iterator[Array]:
    """The forms as the design writes them, at g = 0; "outer" by torch's own optimizer."""
    if form == "outer":
        p = torch.nn.Parameter(torch.from_numpy(x.copy()))
        sgd = torch.optim.SGD([p], lr=lr, momentum=gamma, nesterov=nesterov and gamma > 0)
        for w in ws:
            p.grad = p.detach() - torch.from_numpy(w) @ p.detach()
            sgd.step()
            yield p.detach().numpy().copy()
        return
    last = x
    for w in ws:
        z = x if form == "local" else w @ x
        x, last = w @ x + gamma * (z - last), z
        yield x


@pytest.mark.parametrize(
    "form, make, momentum, published",
    [
        ("local", OnePeer, 0.7, 0.977),
        ("local", OnePeer, 0.9, 1.08),
        ("mixed", OnePeer, 0.7, 0.914),
        ("mixed", OnePeer, 0.9, 1.02),
        ("outer", OnePeer, 0.7, 0.839),
        ("outer", OnePeer, 0.9, 0.939),
        ("mixed", TwoPeer, 0.7, 0.695),
        ("mixed", TwoPeer, 0.9, 0.782),
    ],
)
def test_published_rates_at_8_workers(form: Form, make: type[OnePeer] | type[TwoPeer], momentum: float, published: float) -> None:
    got = rate(form, make(8, seed=0), lr=0.8, momentum=momentum)
    assert got == pytest.approx(published, abs=0.0051 if published > 1 else 0.00051)


@pytest.mark.parametrize("n, plain, best", [(8, 44, 14), (16, 178, 32), (32, 716, 67), (64, 2866, 138), (128, 11466, 300)])
def test_momentum_on_the_fixed_ring(n: int, plain: int, best: int) -> None:
    """Published rounds to 1e-3. Those with momentum come from a grid of gammas; the optimum itself is 14.3, 31.8, 67.0, 137.3, 278.0."""
    chi = (1 - math.cos(2 * math.pi / n)) / 2
    assert round(rounds_to(rate("local", Ring(n)))) == plain
    assert spectral_gap(Ring(n)) == pytest.approx(chi)
    for form in FORMS:
        gamma, r = best_momentum(form, Ring(n))
        assert r == pytest.approx(1 - math.sqrt(chi), abs=1e-6)
        assert r == rate(form, Ring(n), momentum=gamma)
        assert best / 1.08 - 0.5 < rounds_to(r) < best + 0.5
        if form == "local":
            assert gamma == pytest.approx((1 - math.sqrt(chi)) ** 2, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_transition_is_the_written_update(form: Form, nesterov: bool) -> None:
    n, lr, gamma = 5, 0.8, 0.6
    rng = np.random.default_rng(1)
    ws = [OnePeer(n, 2, alpha=0.9).at(t).dense() for t in range(12)]
    x0 = rng.normal(size=(n, 2))
    a0, a1 = transition(form, lr, gamma, nesterov)
    x, m = x0, np.zeros_like(x0) if form == "outer" else x0
    for w, want in zip(ws, literal(form, x0, iter(ws), lr, gamma, nesterov), strict=True):
        u, lu = (x, m), x - w @ x
        x, m = (a0[k, 0] * u[0] + a0[k, 1] * u[1] + a1[k, 0] * lu for k in (0, 1))
        np.testing.assert_allclose(x, want, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make, draw", [(OnePeer, matching), (TwoPeer, cycle)])
@pytest.mark.parametrize("n, alpha", [(2, 1.0), (3, 1.0), (4, 1.0), (4, 0.6)])
def test_closed_moments_are_the_whole_law(form: Form, make: type, draw: Callable[..., Mixing], n: int, alpha: float) -> None:
    """Against E[A (x) A] over all permutations, shape [4n^2, 4n^2], nothing assumed."""
    a0, a1 = transition(form, 0.8, 0.7)
    pi = np.eye(n) - 1 / n
    step = np.zeros((4 * n * n, 4 * n * n))
    perms = list(itertools.permutations(range(n)))
    for p in perms:
        a = np.kron(a0, pi) + np.kron(a1, np.eye(n) - draw(np.array(p), alpha).dense())
        step += np.kron(a, a) / len(perms)
    exact = math.sqrt(np.abs(np.linalg.eigvals(step)).max())
    # A double eigenvalue is known to the square root of the rounding only.
    assert rate(form, make(n, 0, alpha), lr=0.8, momentum=0.7) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_rate_is_what_the_schedule_does(form: Form) -> None:
    """Mean square over 300 seeds of the real schedule, between rounds 4 and 16."""
    n, lr, gamma = 6, 0.8, 0.3
    early, late = 0.0, 0.0
    x0 = np.random.default_rng(0).normal(size=(n, 8))
    x0 -= x0.mean(0)
    for seed in range(300):
        t = TwoPeer(n, seed)
        xs = list(literal(form, x0, (t.at(r).dense() for r in range(16)), lr, gamma))
        early, late = early + float((xs[3] ** 2).sum()), late + float((xs[15] ** 2).sum())
    assert (late / early) ** (1 / 24) == pytest.approx(rate(form, TwoPeer(n, 0), lr=lr, momentum=gamma), rel=0.03)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", [Ring(7), Ring(6, alpha=1.3), Complete(5, alpha=0.7), OnePeerExp(6), OnePeerExp(8)])
def test_rate_of_a_fixed_schedule_is_its_spectral_radius(form: Form, topology: Ring | Complete | OnePeerExp) -> None:
    n = topology.n
    pi = np.eye(n) - 1 / n
    period = topology.period if isinstance(topology, OnePeerExp) else 1
    a0, a1 = transition(form, 0.8, 0.6)
    product = np.eye(2 * n)
    for t in range(period):
        product = (np.kron(a0, pi) + np.kron(a1, np.eye(n) - topology.at(t).dense())) @ product
    exact = np.abs(np.linalg.eigvals(product)).max() ** (1 / period)
    assert rate(form, topology, lr=0.8, momentum=0.6) == pytest.approx(exact, rel=1e-6)


def test_complete_graph_agrees_at_once_except_with_local_momentum() -> None:
    assert rate("mixed", Complete(8), momentum=0.9) == pytest.approx(0, abs=1e-7)
    assert rate("outer", Complete(8), lr=1.0, momentum=0.9) == pytest.approx(0, abs=1e-7)
    assert rate("local", Complete(8), momentum=0.81) == pytest.approx(0.9)
    assert spectral_gap(Complete(8)) == pytest.approx(1.0)
    assert rate("local", OnePeerExp(8)) == pytest.approx(0.0, abs=1e-5)
    for form in FORMS:
        assert rate(form, OnePeer(1, 0), momentum=0.9) == 0.0


@pytest.mark.parametrize("topology", [Ring(8), Complete(8), OnePeer(7, 0), TwoPeer(8, 0, alpha=0.5), OnePeerExp(6)])
def test_outer_at_lr_1_is_mixed(topology: Topology) -> None:
    assert rate("outer", topology, lr=1.0, momentum=0.6) == pytest.approx(rate("mixed", topology, momentum=0.6), rel=1e-7, abs=1e-7)


def test_random_peers_gain_nothing_from_momentum() -> None:
    """Design: with random peers momentum does not speed consensus up, and too much destroys it."""
    for form in FORMS:
        rates = [rate(form, OnePeer(8, 0), momentum=g) for g in (0.0, 0.3, 0.6, 0.9)]
        assert rates == sorted(rates)
    assert rate("local", OnePeer(8, 0)) == pytest.approx(math.sqrt(1 - 4 / 7))  # 1 - 2 l1 + l2
    assert spectral_gap(TwoPeer(8, 0)) == pytest.approx(1 - math.sqrt(1 - 8 / 7 + 3 / 7))


@pytest.mark.parametrize("n", [8, 24])
def test_estimates_for_admissible_graphs(n: int) -> None:
    """With everything admissible and n even the maximal matchings are the perfect ones, so the closed rate is the truth."""
    everything = Graph.of(n, itertools.combinations(range(n), 2))
    assert moments(OnePeer(n, 3, admissible=everything)) is None
    assert not exact(OnePeer(n, 3, admissible=everything))
    assert exact(OnePeer(n, 3))
    assert exact(Ring(n))
    for form, momentum in (("local", 0.0), ("mixed", 0.7)):
        free, bound = OnePeer(n, 3), OnePeer(n, 3, admissible=everything)
        assert rate(form, bound, momentum=momentum) == pytest.approx(rate(form, free, momentum=momentum), rel=0.01)
    path = Graph.of(n, [(i, i + 1) for i in range(n - 1)])
    assert rate("mixed", OnePeer(n, 3), momentum=0.3) < rate("mixed", OnePeer(n, 3, admissible=path), momentum=0.3) < 1


@pytest.mark.parametrize("every", [2, 3, 8])
def test_a_mean_every_so_many_rounds_comes_in_its_turn_in_an_estimate_too(every: int) -> None:
    """Taken for a random round it is 6 to 40 % off. Sampled: the law of the free matching, whose exact rate is known."""
    sampled = _sampled(*transition("local", 1.0, 0.9), Averaged(OnePeer(4, 0), every))
    assert sampled == pytest.approx(rate("local", Averaged(OnePeer(4, 0), every), momentum=0.9), rel=0.01)
    chain = Averaged(OnePeer(4, 0, admissible=Graph.of(4, [(0, 1), (1, 2), (2, 3)])), every)
    assert rate("local", chain) < 1e-6  # plain averaging agrees when the mean comes


def test_a_topology_of_ones_own_is_measured() -> None:
    @dataclass(frozen=True)
    class Star:
        n: int
        random: bool = False

        def at(self, round: int) -> Mixing:
            spokes = [(0, i) for i in range(1, self.n)]
            return Mixing.from_edges(self.n, spokes + [(i, 0) for _, i in spokes], 1 / self.n)

    second = sorted(np.linalg.eigvalsh(Star(6).at(0).dense()))[-2]
    assert rate("local", Star(6)) == pytest.approx(second, rel=1e-6)


def test_rounds_to() -> None:
    assert rounds_to(0.1, 1e-3) == pytest.approx(3)
    assert rounds_to(0.0) == 1.0
    assert math.isinf(rounds_to(1.0))


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: rate("global", Ring(4)), "local, mixed, outer"),  # type: ignore[arg-type]
        (lambda: rate("local", Ring(4), momentum=1.0), "momentum 1.0"),
        (lambda: rate("outer", Ring(4), lr=0.0), "learning rate 0.0"),
        (lambda: rate("outer", Ring(4), overlap=1.5), "^overlap = 1.5: expected a share"),
        (lambda: best_momentum("local", OnePeer(4, 0, admissible=Graph.of(4, [(0, 1), (1, 2), (2, 3)]))), "OnePeer has no exact rate"),
        (lambda: rounds_to(0.5, 2.0), "eps = 2.0"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        call()
