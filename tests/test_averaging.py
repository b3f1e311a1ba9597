"""Gossip with a mean over all workers now and then."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.core.averaging import Averaged
from gossamer.core.consensus import exact, rate, transition
from gossamer.core.errors import BadInput
from gossamer.core.members import over
from gossamer.core.plan import Plan
from gossamer.core.topology import Complete, OnePeer, Ring, TwoPeer
from gossamer.recipes import Setting, gasloc


@pytest.mark.parametrize("every", [2, 3, 5])
def test_every_so_many_rounds_the_mean_and_else_the_graph_below(every: int) -> None:
    base = TwoPeer(7, seed=3)
    topology = Averaged(base, every)
    for t in range(12):
        here = topology.at(t).dense()
        assert np.array_equal(here, (Complete(7) if (t + 1) % every == 0 else base).at(t).dense())
        assert topology.at(t).is_symmetric and topology.at(t).is_doubly_stochastic()


@pytest.mark.parametrize("form", ["local", "mixed", "outer"])
@pytest.mark.parametrize("base", [OnePeer(6, seed=1), TwoPeer(6, seed=1)])
def test_the_rate_is_that_of_a_simulation(form, base) -> None:
    topology, lr, gamma = Averaged(base, 3), 0.8, 0.6
    r = rate(form, topology, lr=lr, momentum=gamma)
    assert exact(topology)
    # E|u|^2 over whole periods, by averaging over many schedules: exact moments are what `rate` claims.
    a0, a1 = transition(form, lr, gamma)
    periods, schedules, k = 8, 300, 4
    sizes = np.zeros(periods + 1)
    rng = np.random.default_rng(0)
    for s in range(schedules):
        schedule = Averaged(type(base)(6, seed=s), 3)
        u = np.stack([rng.standard_normal((6, k)), rng.standard_normal((6, k))])
        for t in range(3 * periods):
            u = u - u.mean(axis=1, keepdims=True)
            if t % 3 == 0:
                sizes[t // 3] += (u**2).sum()
            lu = np.stack([v - schedule.at(t).apply(v) for v in u])
            u = np.tensordot(a0, u, 1) + np.tensordot(a1, lu, 1)
        sizes[periods] += (u**2).sum()
    measured = (sizes[periods] / sizes[2]) ** (1 / (2 * 3 * (periods - 2)))
    assert measured == pytest.approx(r, rel=0.05)


def test_plain_averaging_agrees_in_its_round() -> None:
    assert rate("local", Averaged(OnePeer(8, seed=0), 4)) == pytest.approx(0.0, abs=1e-6)


def test_the_living_go_on_with_it() -> None:
    topology = Averaged(OnePeer(6, seed=2), 2)
    mean = over(topology, frozenset({1}), 1).dense()
    living = [0, 2, 3, 4, 5]
    assert np.allclose(mean[np.ix_(living, living)], 0.2) and mean[1, 1] == 1.0


def test_bad_settings_are_refused() -> None:
    setting = Setting(Plan((2,) * 4, (1,) * 4, 8), rounds=3)
    with pytest.raises(BadInput, match="every 1 rounds"):
        gasloc(setting, average_every=1)
    with pytest.raises(BadInput, match="leave it out"):
        gasloc(setting, topology="complete", average_every=4)
    assert gasloc(setting, topology="ring", average_every=4).topology == Averaged(Ring(4), 4)
