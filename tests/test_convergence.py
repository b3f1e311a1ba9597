"""Gossip on a stochastic quadratic, real programs in lockstep, against what can be worked out exactly.

    f(x) = curvature / 2 |x - b|^2,   gradients with noise of variance sigma^2 a coordinate,   inner steps of plain SGD, rate lr

Let q = 1 - lr curvature and a = q^H. The drift of a round is g = (a - 1)(x - b) + eps, Var eps = v = lr^2 sigma^2 (1 - a^2) / (1 - q^2).

*The mean* over workers does not see W (it is doubly stochastic): with the outer rule it follows u+ = (A0 + (1 - a) A1) u + noise, the noise
having variance v / n. For plain averaging (outer lr 1, no momentum) that is SGD with variance sigma^2 / n, whose stationary error is

    E |xbar - b|^2 = lr sigma^2 / (n curvature (2 - lr curvature))   a coordinate:

in proportion to lr and to 1 / n, whatever H and the graph (the terms f0 / (lr H T) and lr sigma^2 / n of decentralised SGD with local
updates, Koloskova et al. 2020, arXiv 2003.10422; GASLoC's bound has the same two). Before that it falls by a = q^H a round.

*The disagreement* of random peers with E Lambda = l1 pi, E Lambda^2 = l2 pi has second moments C (of the state of
`gossamer.core.consensus.transition`, a worker and a coordinate, times n / (n - 1)) that obey a closed system; see `Moments`. Its floor is
of order lr^2 sigma^2 H / gap: the third term of that bound, which H and sparse graphs make worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import Lockstep
from numpy.typing import NDArray

from gossamer.core.consensus import Form, moments, rate, transition
from gossamer.core.plan import uniform
from gossamer.core.rng import Stream, normal
from gossamer.core.topology import Topology
from gossamer.core.tree import Layout, Tree, layout_of
from gossamer.recipes import Setting, gasloc
from gossamer.recipes.gossip import TopologyName
from gossamer.worker.effects import Done, Work

Array = NDArray[np.float64]
CURVATURE, SIGMA = 1.0, 0.5


class Quadratic:
    """A Body: SGD on curvature / 2 |x - b|^2 with noise that depends on (seed, worker, step)."""

    def __init__(self, worker: int, size: int, lr: float, sigma: float = SIGMA, curvature: float = CURVATURE, seed: int = 0) -> None:
        self.worker, self.lr, self.sigma, self.curvature, self.seed = worker, lr, sigma, curvature, seed
        self.x = torch.zeros(size)
        self.cursor = 0

    def compute(self, work: Work) -> Done:
        for _ in range(work.steps):
            self.x -= self.lr * (self.curvature * (self.x - 1.0) + self.sigma * self.noise())
            self.cursor += 1
        return Done({"x": self.x}, work.steps * work.batch, 0.0)

    def noise(self) -> torch.Tensor:
        return torch.from_numpy(normal(len(self.x), self.seed, Stream.DATA, self.worker, self.cursor)).float()

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        self.x.copy_(tree["x"])

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


class Kick(Quadratic):
    """Moves once, in the first round, by noise; never again."""

    def compute(self, work: Work) -> Done:
        if not self.cursor:
            self.x += self.noise()
            self.cursor = 1
        return Done({"x": self.x}, work.steps * work.batch, 0.0)


def layout(size: int) -> Layout:
    return layout_of({"x": torch.empty(size)})


def trajectory(
    make: Callable[[int], Quadratic], n: int, rounds: int, *, steps: int = 1, seed: int = 0, **options: Any
) -> tuple[Array, Topology]:
    """x of each worker after each round, shape [rounds, n, size], and the topology, of gasloc with these options."""
    method = gasloc(Setting(uniform(n, steps, 1, 1), rounds=rounds, seed=seed), force=True, **options)
    bodies = [make(i) for i in range(n)]
    size = len(bodies[0].x)
    world = Lockstep(method, bodies, x0=[{"x": torch.zeros(size)} for _ in range(n)], layout=layout(size))
    world.run()
    xs = [[state.x["x"].double().numpy() for state, _ in world.snapshots[t + 1]] for t in range(rounds)]
    return np.array(xs), method.topology


def disagreement(xs: Array) -> Array:
    """Mean square deviation from the fleet's mean by round, times n / (n - 1)."""
    n = xs.shape[1]
    return np.square(xs - xs.mean(axis=1, keepdims=True)).mean(axis=(1, 2)) * n / (n - 1)


@dataclass(frozen=True)
class Moments:
    """Second moments of the state, shape [2, 2]: C+ = E[(P + Q Lambda) C (P + Q Lambda)^T] + v E[(p + q Lambda)(p + q Lambda)^T].

    P, Q: the state's own motion, the pull c = 1 - a of the quadratic included; p, q: how eps enters. For the mean, Lambda = 0.
    """

    P: Array
    Q: Array
    p: Array
    q: Array
    l1: float
    l2: float

    @staticmethod
    def of(form: Form, graph: Topology | None, lr: float, momentum: float, a: float = 1.0) -> Moments:
        """`graph` None: of the mean over workers."""
        a0, a1 = transition(form, lr, momentum)
        law = moments(graph) if graph else (0.0, 0.0)
        assert law is not None
        l1, l2 = law
        if form == "outer":  # D = x - W (x + g) = (1 - a) x + a Lambda x - (I - Lambda) eps
            return Moments(a0 + (1 - a) * a1, a * a1, -a1[:, 0], a1[:, 0], l1, l2)
        c = np.diag([1 - lr * (1 - a), 1.0])  # z = x + lr g = (1 - lr (1 - a)) x + lr eps
        return Moments(a0 @ c, a1 @ c, lr * a0[:, 0], lr * a1[:, 0], l1, l2)

    def next(self, c: Array, v: float) -> Array:
        def mean(x: Array, y: Array, m: Array) -> Array:
            cross = x @ m @ y.T
            return np.array(x @ m @ x.T + self.l1 * (cross + cross.T) + self.l2 * y @ m @ y.T)

        return mean(self.P, self.Q, c) + mean(self.p[:, None], self.q[:, None], np.array([[v]]))

    def floor(self, v: float) -> float:
        """Of the parameters, in the long run."""
        c = np.zeros((2, 2))
        for _ in range(4000):
            c = self.next(c, v)
        return float(c[0, 0])


def drift_variance(lr: float, steps: int) -> tuple[float, float]:
    """(a, v)."""
    q = 1 - lr * CURVATURE
    a = q**steps
    return a, lr**2 * SIGMA**2 * (1 - a**2) / (1 - q**2)


@pytest.mark.parametrize(
    "form, topology, momentum, published",
    [
        ("local", "one_peer", 0.7, 0.977),
        ("mixed", "one_peer", 0.7, 0.914),
        ("outer", "one_peer", 0.7, 0.839),
        ("mixed", "two_peer", 0.9, 0.782),
    ],
)
def test_real_programs_agree_at_the_exact_mean_square_rate(form: Form, topology: TopologyName, momentum: float, published: float) -> None:
    """One kick, then no drift: the mean square over schedules follows the closed moments, whose growth is the published rate."""
    n, rounds, schedules = 8, 12, 24
    runs = []
    for seed in range(schedules):
        xs, graph = trajectory(
            lambda i, seed=seed: Kick(i, 64, 0.0, seed=seed),
            n, rounds, seed=seed, topology=topology, momentum=form, outer_lr=0.8, outer_momentum=momentum,
        )  # fmt: skip
        runs.append(disagreement(xs))
    law = Moments.of(form, graph, 0.8, momentum)
    c, want = np.zeros((2, 2)), []
    for t in range(rounds):
        c = law.next(c, 1.0 if t == 0 else 0.0)
        want.append(c[0, 0])
    a_round = (np.mean(runs, axis=0) / want) ** (1 / (2 * np.arange(1, rounds + 1)))
    np.testing.assert_allclose(a_round, 1.0, atol=0.03)
    for _ in range(400):
        c = law.next(c / c[0, 0], 0.0)
    growth = math.sqrt(c[0, 0])
    assert growth == pytest.approx(rate(form, graph, lr=0.8, momentum=momentum), rel=1e-3)
    assert growth == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize(
    "n, lr, steps, topology", [(2, 0.2, 1, "one_peer"), (8, 0.2, 1, "two_peer"), (8, 0.1, 1, "ring"), (8, 0.2, 4, "one_peer")]
)
def test_the_error_of_the_mean_falls_with_workers_and_step_size(n: int, lr: float, steps: int, topology: TopologyName) -> None:
    rounds, warm = 120 // steps, 40 // steps
    xs, _ = trajectory(lambda i: Quadratic(i, 512, lr), n, rounds, steps=steps, topology=topology, outer_lr=1.0, outer_momentum=0.0)
    found = np.square(xs.mean(axis=1) - 1.0)[warm:].mean()
    assert found == pytest.approx(lr * SIGMA**2 / (n * CURVATURE * (2 - lr * CURVATURE)), rel=0.12)


@pytest.mark.parametrize("form", ["outer", "mixed"])
def test_an_outer_optimizer_with_momentum_has_the_floor_of_its_recursion(form: Form) -> None:
    n, lr, steps, rounds = 4, 0.2, 2, 150
    xs, _ = trajectory(
        lambda i: Quadratic(i, 512, lr), n, rounds, steps=steps, topology="two_peer", momentum=form, outer_lr=0.8, outer_momentum=0.7
    )
    a, v = drift_variance(lr, steps)
    want = Moments.of(form, None, 0.8, 0.7, a).floor(v / n)
    assert np.square(xs.mean(axis=1) - 1.0)[60:].mean() == pytest.approx(want, rel=0.12)


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_more_inner_steps_a_round_get_further_in_a_round(steps: int) -> None:
    """Without noise the error falls by (1 - lr curvature)^H a round."""
    lr = 0.05
    xs, _ = trajectory(lambda i: Quadratic(i, 3, lr, sigma=0.0), 4, 6, steps=steps, outer_lr=1.0, outer_momentum=0.0)
    error = np.abs(xs.mean(axis=1) - 1.0).max(axis=1)
    np.testing.assert_allclose(error, [(1 - lr) ** (steps * (t + 1)) for t in range(6)], rtol=1e-4)


@pytest.mark.parametrize("topology, steps, lr", [("one_peer", 1, 0.1), ("one_peer", 6, 0.1), ("two_peer", 6, 0.1), ("two_peer", 6, 0.05)])
def test_the_floor_of_disagreement_grows_with_inner_steps_and_sparseness(topology: TopologyName, steps: int, lr: float) -> None:
    n, rounds = 8, 200
    xs, graph = trajectory(lambda i: Quadratic(i, 64, lr), n, rounds, steps=steps, topology=topology, outer_lr=0.8, outer_momentum=0.5)
    a, v = drift_variance(lr, steps)
    want = Moments.of("outer", graph, 0.8, 0.5, a).floor(v)
    assert disagreement(xs)[40:].mean() == pytest.approx(want, rel=0.12)


def test_floors_order_as_the_bound_says() -> None:
    """To first order in lr the error of the mean goes with lr / n and not with H; disagreement goes with lr^2 H."""
    one, two = (gasloc(Setting(uniform(8, 1, 1, 1), rounds=1), topology=t).topology for t in ("one_peer", "two_peer"))

    def floors(lr: float, steps: int, graph: Topology) -> tuple[float, float]:
        a, v = drift_variance(lr, steps)
        return Moments.of("outer", None, 1.0, 0.0, a).floor(v / 8), Moments.of("outer", graph, 1.0, 0.0, a).floor(v)

    error, apart = floors(1e-4, 10, one)
    assert floors(2e-4, 10, one)[0] / error == pytest.approx(2, rel=0.01)
    assert floors(1e-4, 20, one)[0] / error == pytest.approx(1, rel=0.01)
    assert floors(2e-4, 10, one)[1] / apart == pytest.approx(4, rel=0.03)
    assert floors(1e-4, 20, one)[1] / apart == pytest.approx(2, rel=0.03)
    left = {graph: rate("outer", graph) ** 2 for graph in (one, two)}  # of the mean square, in a round of plain averaging
    ratio = floors(1e-4, 10, two)[1] / apart
    assert ratio == pytest.approx(left[two] / (1 - left[two]) / (left[one] / (1 - left[one])), rel=0.03) and ratio < 1
