"""Overlapped gossip: the mixing of a round travels under the inner steps of the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import Lockstep
from numpy.typing import NDArray
from test_convergence import Kick, Quadratic, layout, trajectory
from toy import ToyBody, toy_start

from gossamer.core.consensus import Form, drifting, rate, worst_rate
from gossamer.core.errors import BadInput
from gossamer.core.inner import SGD
from gossamer.core.plan import Plan, uniform
from gossamer.core.schedule import Constant
from gossamer.core.topology import Complete, OnePeer, OnePeerExp, Ring, Topology, TwoPeer
from gossamer.core.topology import topology as named
from gossamer.core.tree import Tree
from gossamer.recipes import Setting, diloco, gasloc
from gossamer.recipes.graph import TopologyName
from gossamer.worker.effects import Work

N = 4
PLAIN = SGD(lr=0.05, momentum=0.0, weight_decay=0.0, clip=None)
EQUAL = Setting(Plan((4,) * N, (2,) * N, ToyBody.LENGTH), rounds=6, seed=3, inner=PLAIN, schedule=Constant())
UNEQUAL = replace(EQUAL, plan=Plan((1, 2, 3, 5), (3, 2, 1, 2), ToyBody.LENGTH))
OVERLAPS = (0.3, 1.0)
FORMS: tuple[Form, ...] = ("local", "mixed", "outer")
GRAPHS: tuple[TopologyName, ...] = ("ring", "complete", "one_peer", "two_peer", "one_peer_exp")
Array = NDArray[np.float64]


def distance(a: Tree, b: Tree) -> float:
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in b)


def reference(s: Setting, form: Form, graph: TopologyName, lr: float, momentum: float, overlap: float) -> list[Tree]:
    """The definition, in plain torch, float64 anchors: one line of linear algebra a tensor over the stacked replicas."""
    n, bodies = s.n, [ToyBody(i, s.inner) for i in range(s.n)]
    top = named(graph, n, seed=s.seed)
    x = {k: torch.stack([v] * n).double() for k, v in toy_start().items()}
    kept = {k: torch.zeros_like(v) if form == "outer" else v.clone() for k, v in x.items()}
    flying: dict[str, torch.Tensor] = {}

    def work(until: float, taken: list[int]) -> None:
        for i, b in enumerate(bodies):
            steps = s.plan.steps[i]
            for _ in range(min(steps, max(1, round(until * steps))) - taken[i]):
                b.gradient(s.plan.batch[i])
                b.take()
                taken[i] += 1

    def land(t: int) -> None:
        w = torch.from_numpy(top.at(t).dense())
        for k, y in flying.items():
            if form == "outer":
                D = x[k] - torch.einsum("ij,j...->i...", w, y)
                kept[k] = momentum * kept[k] + D
                x[k] = x[k] - lr * (D + momentum * kept[k])
            else:
                z = x[k] + lr * (y - x[k])
                mixed = torch.einsum("ij,j...->i...", w, z)
                new = mixed if form == "mixed" else z
                x[k], kept[k] = mixed + momentum * (new - kept[k]), new
            for i, b in enumerate(bodies):
                b.params[k].data += (x[k][i] - y[i]).float()

    for t in range(s.rounds):
        taken = [0] * n
        if t:
            work(overlap, taken)
            land(t - 1)
        work(1.0, taken)
        flying = {k: torch.stack([b.params[k].data for b in bodies]).double() for k in x}
    land(s.rounds - 1)
    return [{k: v[i] for k, v in x.items()} for i in range(n)]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("form", FORMS)
def test_overlapped_gossip_is_its_definition(form: Form, graph: TopologyName, overlap: float) -> None:
    s = replace(UNEQUAL, rounds=4)
    got = Lockstep(gasloc(s, topology=graph, momentum=form, outer_momentum=0.4, overlap=overlap, force=True)).run()
    for state, want in zip(got, reference(s, form, graph, 0.8, 0.4, overlap), strict=True):
        assert distance(state.x, want) < 3e-5
        assert not torch.allclose(state.x["hidden"], toy_start()["hidden"])
        assert not state.streams[0].pending


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_on_the_complete_graph_it_is_overlapped_diloco(overlap: float) -> None:
    want = Lockstep(diloco(UNEQUAL, outer_lr=0.8, outer_momentum=0.7, overlap=overlap)).run()[0].x
    for form in ("mixed", "outer"):
        for state in Lockstep(gasloc(UNEQUAL, topology="complete", momentum=form, overlap=overlap)).run():
            assert distance(state.x, want) < 2e-5


@pytest.mark.parametrize("graph", ["ring", "two_peer", "one_peer_exp"])
def test_with_one_step_a_round_the_gradient_is_taken_before_the_mixing_that_it_is_added_to(graph: TopologyName) -> None:
    """Plain averaging, H = 1: x_{t+1} = W (x_t + u_t) with the update u_t taken at the unmixed x_{t-1} + u_{t-1}; x_0 at first. DAdam adds
    it after the mixing, x_{t+1} = W x_t + u_t, and moves the mean by the mean of u_t likewise."""
    s = replace(EQUAL, plan=uniform(N, 1, 2, ToyBody.LENGTH), rounds=5)
    got = Lockstep(gasloc(s, topology=graph, outer_lr=1.0, outer_momentum=0.0, overlap=1.0)).run()
    bodies, top = [ToyBody(i, s.inner) for i in range(N)], named(graph, N, seed=s.seed)
    x = y = {k: torch.stack([v] * N) for k, v in toy_start().items()}
    for t in range(s.rounds):
        for i, b in enumerate(bodies):
            b.load({k: v[i] for k, v in y.items()})
            b.gradient(2)
            b.take()
        moved = {k: torch.stack([b.params[k].data for b in bodies]) for k in x}
        y = {k: x[k] + moved[k] - y[k] for k in x}  # what is said: the anchor and the update
        w = torch.from_numpy(top.at(t).dense()).float()
        x = {k: torch.einsum("ij,j...->i...", w, v) for k, v in y.items()}
    for i, state in enumerate(got):
        assert distance(state.x, {k: v[i] for k, v in x.items()}) < 1e-5


def test_without_overlap_it_is_plain_gossip_bit_for_bit() -> None:
    assert gasloc(UNEQUAL, overlap=0.0) == gasloc(UNEQUAL)
    one = replace(UNEQUAL, plan=uniform(1, 4, 2, ToyBody.LENGTH))
    a, b = (Lockstep(gasloc(one, outer_lr=1.0, outer_momentum=0.0, overlap=o)).run()[0].x for o in (0.0, 1.0))
    assert distance(a, b) < 1e-6, "one worker alone is replaced by itself"


class Pushed(Quadratic):
    """Moves by the same amounts wherever it is."""

    def __init__(self, worker: int, push: float) -> None:
        super().__init__(worker, 3, 0.1, sigma=push, curvature=0.0)

    def noise(self) -> torch.Tensor:
        return torch.sin(torch.arange(3) + self.cursor + 1.0)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("form", FORMS)
def test_the_mean_of_the_fleet_moves_as_one_worker_would(form: Form, graph: TopologyName, overlap: float) -> None:
    """Whatever the graph and the form, and with what is in flight: under unlike pushes the mean over workers follows the recursion of one
    worker under the mean push, so mixing itself moves it nowhere."""
    pushes = [-2.0, -1.0, 0.0, 1.0, 2.0, 9.0]
    means = []
    for given in (pushes, [sum(pushes) / 6]):
        s = Setting(uniform(len(given), 4, 1, 1), rounds=5, seed=2)
        method = gasloc(s, topology=graph, momentum=form, outer_momentum=0.3, overlap=overlap, force=True)
        x0 = [{"x": torch.ones(3)} for _ in given]
        run = Lockstep(method, [Pushed(i, push) for i, push in enumerate(given)], x0=x0, layout=layout(3))
        final = run.run()
        anchors = [[s.x["x"] for s, _ in run.snapshots[t]] for t in range(1, 6)] + [[s.x["x"] for s in final]]
        said = [[s.streams[0].pending.y["x"] for s, _ in run.snapshots[t]] for t in range(1, 6)]
        means.append([torch.stack(v).double().mean(0) for v in (*anchors, *said)])
    for many, one in zip(*means, strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=3e-6)
    assert (means[0][5] - 1).abs().max() > 0.1


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("options", [{}, {"codec": "mod4"}, {"codec": "signs"}, {"momentum": "local", "outer_momentum": 0.3}], ids=str)
def test_resume_at_every_round_is_the_uninterrupted_run(options: dict[str, Any], overlap: float) -> None:
    method = gasloc(UNEQUAL, overlap=overlap, **options)
    whole = Lockstep(method)
    want = whole.run()
    for t in range(1, method.rounds):
        got = Lockstep(method).run(resume=whole.snapshots[t])
        assert all(torch.equal(a.x[k], b.x[k]) for a, b in zip(got, want, strict=True) for k in b.x)


# ---- how fast workers agree


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_without_drift_anchors_agree_as_without_overlap(form: Form, overlap: float) -> None:
    """One kick, no drift after it: the anchors are those of plain gossip, a landing later."""
    options: dict[str, Any] = {"topology": "two_peer", "momentum": form, "outer_lr": 0.8, "outer_momentum": 0.4}
    plain, _ = trajectory(lambda i: Kick(i, 16, 0.0), 6, 8, **options)
    late, _ = trajectory(lambda i: Kick(i, 16, 0.0), 6, 8, overlap=overlap, **options)
    np.testing.assert_allclose(late[1:], plain[:-1], atol=2e-6)
    assert np.abs(late[0]).max() == 0.0


@pytest.mark.parametrize("topology", [Ring(6), Complete(5), OnePeer(8, 0), OnePeer(7, 0), TwoPeer(8, 0), OnePeerExp(6)])
@pytest.mark.parametrize("form", FORMS)
def test_a_vanishing_drift_has_the_rate_of_none(form: Form, topology: Topology) -> None:
    want = rate(form, topology, lr=0.8, momentum=0.6)
    for overlap in (0.0, 0.4, 1.0):
        assert rate(form, topology, lr=0.8, momentum=0.6, overlap=overlap) == want
        assert rate(form, topology, lr=0.8, momentum=0.6, pull=1e-12, overlap=overlap) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_with_drift_real_programs_follow_the_recursion(form: Form, overlap: float) -> None:
    """Four inner steps that close `pull` of the way, noise in the first round only: anchors and what is said, round by round."""
    n, rounds, lr, momentum, inner = 6, 9, 0.8, 0.5, 0.3
    pull = 1 - (1 - inner) ** 4

    class Once(Quadratic):
        def noise(self) -> torch.Tensor:
            return super().noise() * (self.cursor < 4)

    xs, graph = trajectory(
        lambda i: Once(i, 8, inner), n, rounds, steps=4,
        topology="two_peer", momentum=form, outer_lr=lr, outer_momentum=momentum, overlap=overlap,
    )  # fmt: skip
    a0, a1 = drifting(form, lr, momentum, True, pull, overlap)
    body = [Once(i, 8, inner) for i in range(n)]
    for b in body:
        b.compute(Work(4, 1, 0.0, 1.0))
    x = np.full((n, 8), -1.0)  # distances to the optimum
    u = np.stack([x, np.zeros_like(x) if form == "outer" else x, np.stack([b.x.double().numpy() for b in body]) - 1.0])
    late = 1 if overlap else 0
    for t in range(rounds - late):
        w = graph.at(t).dense()
        u = np.tensordot(a0, u, 1) + np.tensordot(a1, np.stack([v - w @ v for v in u]), 1)
        np.testing.assert_allclose(xs[t + late] - 1.0, u[0], atol=3e-6)


@pytest.mark.parametrize("make, overlap", [(OnePeer, 1.0), (TwoPeer, 1.0), (OnePeer, 0.5)])
@pytest.mark.parametrize("form", FORMS)
def test_with_drift_the_mean_square_over_schedules_shrinks_at_the_rate(
    form: Form, make: type[OnePeer] | type[TwoPeer], overlap: float
) -> None:
    """That recursion on 200 schedules, where inner steps close 0.9 of the way and overlap slows agreement down."""
    n, options = 6, {"lr": 0.8, "momentum": 0.5, "pull": 0.9}
    a0, a1 = drifting(form, 0.8, 0.5, True, 0.9, overlap)
    first = np.random.default_rng(0).normal(size=(3, n, 8))
    first -= first.mean(axis=1, keepdims=True)
    early, late = 0.0, 0.0
    for seed in range(200):
        u, graph = first, make(n, seed)
        for t in range(14):
            w = graph.at(t).dense()
            u = np.tensordot(a0, u, 1) + np.tensordot(a1, np.stack([v - w @ v for v in u]), 1)
            early += float(np.square(u).sum()) if t == 5 else 0.0
        late += float(np.square(u).sum())
    want = rate(form, graph, overlap=overlap, **options)
    assert (late / early) ** (1 / 16) == pytest.approx(want, rel=0.05)
    assert want > rate(form, graph, **options) + 0.02


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lr, momentum", [(0.8, 0.7), (1.0, 0.7), (0.7, 0.5)])
def test_the_worst_drift_is_among_those_looked_at(form: Form, lr: float, momentum: float) -> None:
    for graph in (OnePeer(8, 0), TwoPeer(8, 0), Ring(8)):
        for overlap in (0.3, 0.9, 1.0):
            grid = [rate(form, graph, lr=lr, momentum=momentum, pull=p, overlap=overlap) for p in np.linspace(0, 0.999, 41)]
            assert worst_rate(form, graph, lr=lr, momentum=momentum, overlap=overlap) > max(grid) - 5e-3
        assert worst_rate(form, graph, lr=lr, momentum=momentum) == rate(form, graph, lr=lr, momentum=momentum)


def test_overlap_that_tears_workers_apart_is_refused() -> None:
    s = Setting(uniform(8, 2, 1, 4), rounds=2)
    options: dict[str, Any] = {"topology": "one_peer", "outer_lr": 1.0, "outer_momentum": 0.7}
    gasloc(s, **options)
    with pytest.raises(BadInput, match=r"rate of 1\.0\d\d a round where overlap 1\.0 meets a strong drift"):
        gasloc(s, overlap=1.0, **options)
    gasloc(s, overlap=1.0, force=True, **options)
    with pytest.raises(BadInput, match="from 0 to 1"):
        gasloc(s, overlap=1.2)
    with pytest.raises(BadInput, match="pull = 2"):
        rate("outer", Ring(4), pull=2.0)
