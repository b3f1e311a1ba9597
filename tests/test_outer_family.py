"""The gossip family with any outer optimizer, and on graphs on which not all may talk."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import Lockstep
from test_convergence import Kick, layout
from toy import ToyBody, toy_start

from gossamer.app.config import dump, load, parse
from gossamer.app.footprint import outer_copies
from gossamer.core.errors import BadInput
from gossamer.core.matching import Rates
from gossamer.core.method import Method
from gossamer.core.outer import Average, CombineWhileAdapt, Gossip, OuterSGD
from gossamer.core.outer_torch import OuterTorch, TorchName
from gossamer.core.plan import Plan, uniform
from gossamer.core.rng import Stream, normal
from gossamer.core.schedule import Constant
from gossamer.core.topology import OnePeer, TwoPeer
from gossamer.core.tree import Tree
from gossamer.recipes import Setting, dadam, diloco, gasloc, local_dadam, noloco
from gossamer.recipes.graph import admissible_graph

N = 4
SETTING = Setting(Plan((1, 2, 3, 5), (3, 2, 1, 2), ToyBody.LENGTH), rounds=5, seed=3, schedule=Constant())
TORCH: dict[TorchName, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.95, eps=1e-6, momentum=0.8),
}


def rule_of(name: TorchName) -> OuterTorch:
    return OuterTorch(name, 0.01, 0.8, 0.95, 1e-6, 0.1 if name == "adamw" else 0.0)


def final(method: Method) -> list[Tree]:
    return [state.x for state in Lockstep(method).run()]


def distance(a: Tree, b: Tree) -> float:
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in b)


# ---- any outer optimizer


@pytest.mark.parametrize("name", TORCH)
def test_an_outer_optimizer_of_torch_has_torch_s_bits(name: TorchName) -> None:
    """Against one optimizer that lives through all steps; ours is built anew at each from the state that it returned."""
    start = toy_start()
    params = {k: torch.nn.Parameter(v.clone()) for k, v in start.items()}
    whole = TORCH[name](list(params.values()))
    rule, x = rule_of(name), {k: v.clone() for k, v in start.items()}
    state = rule.init(x)
    for t in range(7):
        d = {k: torch.sin(v * (t + 1)) for k, v in start.items()}
        before = {k: v.clone() for k, v in d.items()}
        for k, p in params.items():
            p.grad = d[k].clone()
        whole.step()
        x, state = rule.step(x, {}, {}, d, state)
        assert all(torch.equal(d[k], before[k]) for k in d), "the mean is not written to"
    assert all(torch.equal(x[k], params[k].data) and x[k].grad is None for k in x)
    assert {k: float(v) for k, v in state["step"].items()} == dict.fromkeys(start, 7.0)


@pytest.mark.parametrize("name", TORCH)
def test_on_the_complete_graph_gossip_is_diloco_with_that_optimizer(name: TorchName) -> None:
    rule = replace(rule_of(name), eps=1e-3)  # where a mean drift is zero but for rounding, a small eps makes a step of it
    want = final(replace(diloco(SETTING), outer=rule))[0]
    method = gasloc(
        SETTING, topology="complete", outer=name, outer_lr=rule.lr, outer_momentum=rule.momentum, outer_beta2=rule.beta2,
        outer_eps=rule.eps, outer_decay=rule.decay,
    )  # fmt: skip
    assert isinstance(method.outer, Gossip) and method.outer.rule == rule
    assert distance(want, toy_start()) > 1e-4
    for x in final(method):
        assert distance(x, want) < 1e-4


def test_the_named_rules_are_what_they_are_called() -> None:
    assert gasloc(SETTING, outer="nesterov") == gasloc(SETTING, outer="auto") == gasloc(SETTING)
    assert gasloc(SETTING, outer="heavy_ball") == gasloc(SETTING, nesterov=False)
    assert gasloc(SETTING, outer="sgd") == gasloc(SETTING, outer_momentum=0.0)
    pairs = gasloc(SETTING, topology="one_peer", outer="heavy_ball", outer_lr=0.7, outer_momentum=0.5)
    assert replace(noloco(SETTING), name="gasloc") == pairs
    given = replace(gasloc(SETTING), outer=Gossip(form="outer", rule=OuterSGD(0.8, 0.7, True)))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(final(given), final(gasloc(SETTING)), strict=True) for k in b)


@pytest.mark.parametrize("name", ["sgd", "nesterov", "heavy_ball"])
def test_torch_s_own_sgd_on_disagreement_plus_drift_is_ours(name: Any) -> None:
    """D = x - W y as the gradient of torch.optim.SGD, worker by worker, to the last bit but for the order of sums in W y."""
    s = replace(SETTING, plan=uniform(N, 3, 2, ToyBody.LENGTH))
    momentum = 0.0 if name == "sgd" else 0.5
    method = gasloc(s, outer=name, outer_momentum=momentum)
    bodies = [ToyBody(i, method.inner) for i in range(N)]
    params = [{k: torch.nn.Parameter(v.clone()) for k, v in toy_start().items()} for _ in bodies]
    outer = [torch.optim.SGD(list(p.values()), lr=0.8, momentum=momentum, nesterov=name == "nesterov") for p in params]
    for t in range(s.rounds):
        for body, p in zip(bodies, params, strict=True):
            body.load({k: v.data for k, v in p.items()})
            for _ in range(3):
                body.gradient(2)
                body.take()
        for i, p in enumerate(params):
            for k, v in p.items():
                v.grad = v.data - sum(w * bodies[j].params[k].data for j, w in method.topology.at(t).row(i))
        for optimizer in outer:
            optimizer.step()
    for x, p in zip(final(method), params, strict=True):
        assert distance(x, {k: v.data for k, v in p.items()}) < 1e-5


@pytest.mark.parametrize("overlap", [0.0, 0.4])
@pytest.mark.parametrize("name", TORCH)
def test_resume_at_any_round_is_the_uninterrupted_run(name: Any, overlap: float) -> None:
    method = gasloc(SETTING, outer=name, outer_lr=0.01, overlap=overlap)
    whole = Lockstep(method)
    want = whole.run()
    for t in (1, 3):
        got = Lockstep(method).run(resume=whole.snapshots[t])
        assert all(torch.equal(a.x[k], b.x[k]) for a, b in zip(got, want, strict=True) for k in b.x)


def test_adaptive_optimizers_keep_workers_a_share_of_a_step_apart() -> None:
    """Why there is no rate to refuse: however little workers disagree, a step has the size of the learning rate. So the disagreement ends
    at a tenth to a third of that, where SGD's goes on to nothing; and as a step is not linear, it moves the mean over workers."""
    first = torch.from_numpy(normal(6 * 64, 0, Stream.INIT)).float().reshape(6, 64) * 0.01
    for rule in (OuterSGD(0.8, 0.5), *(OuterTorch("adam", lr, 0.7, 0.95) for lr in (0.1, 0.01, 0.001))):
        x = {"x": first.clone()}
        state, graph = rule.init(x), TwoPeer(6, 0)
        for t in range(300):
            w = torch.from_numpy(graph.at(t).dense()).float()
            x, state = rule.step(x, {}, {}, {"x": x["x"] - w @ x["x"]}, state)
        apart = float((x["x"] - x["x"].mean(0)).square().mean().sqrt())
        moved = float((x["x"].mean(0) - first.mean(0)).abs().mean())
        if isinstance(rule, OuterSGD):
            assert apart < 1e-6 and moved < 1e-6
        else:
            assert 0.05 * rule.lr < apart < 0.4 * rule.lr and moved > 3e-4


def test_copies_do_not_count_a_count_of_steps() -> None:
    assert [outer_copies(gasloc(SETTING, outer=o)) for o in ("sgd", "nesterov", "adamw")] == [1, 2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"outer": "nesterov", "nesterov": False}, "leave nesterov out"),
        ({"outer": "heavy_ball", "momentum": "mixed"}, "form 'outer'"),
        ({"outer": "adam", "momentum": "local"}, "form 'outer'"),
        ({"outer_beta2": 0.9}, "outer_beta2 = 0.9 belongs to outer adam"),
        ({"outer": "adam", "outer_decay": 0.1}, "belongs to adamw"),
        ({"outer": "adam", "outer_beta2": 1.0}, "beta2"),
        ({"outer": "adam", "outer_eps": 0.0}, "eps"),
        ({"outer": "adamw", "outer_decay": -1.0}, "weight decay"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        gasloc(SETTING, **options)


def test_rules_that_have_no_drift_to_step_on_are_refused() -> None:
    for rule in (Average(), CombineWhileAdapt()):
        with pytest.raises(BadInput, match="does not step on a drift"):
            Gossip(rule=rule)
    with pytest.raises(BadInput, match="not one of torch's"):
        OuterTorch("lion")  # type: ignore[arg-type]


# ---- restricted graphs

PATH = ((0, 1), (1, 2), (3, 2))
LINKS = Rates(
    up=(1000.0,) * N, down=(1000.0,) * N, place=(0, 0, 1, 2), link=((900.0, 50.0, 200.0), (50.0, 900.0, 60.0), (200.0, 60.0, 900.0))
)


@pytest.mark.parametrize("make", [gasloc, local_dadam, dadam])
@pytest.mark.parametrize("graph", ["one_peer", "two_peer"])
def test_restricted_gossip_keeps_the_mean_and_stays_on_its_pairs(make: Any, graph: Any) -> None:
    setting = replace(SETTING, plan=uniform(N, 3, 2, ToyBody.LENGTH))
    method = make(setting, topology=graph, admissible=PATH)
    allowed = {(0, 1), (1, 2), (2, 3)}
    used = set()
    for t in range(40):
        mixing = method.topology.at(t)
        assert mixing.is_symmetric and mixing.is_doubly_stochastic()
        w = mixing.dense()
        met = {(i, j) for i in range(N) for j in range(i + 1, N) if w[i, j]}
        used |= met
        if graph == "two_peer":  # Metropolis
            degree = (w > 0).sum(1) - 1
            assert all(np.isclose(w[i, j], 1 / (1 + max(degree[i], degree[j]))) for i, j in met)
    assert used == allowed


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("graph", ["one_peer", "two_peer"])
def test_on_a_restricted_graph_workers_come_together_where_their_mean_is(graph: Any, overlap: float) -> None:
    s = Setting(uniform(N, 1, 1, 1), rounds=80, seed=1)
    method = gasloc(s, topology=graph, admissible=PATH, outer_lr=1.0, outer_momentum=0.0, overlap=overlap, force=True)
    bodies = [Kick(i, 16, 0.0) for i in range(N)]
    want = torch.stack([Kick(i, 16, 0.0).noise() for i in range(N)]).double().mean(0)
    run = Lockstep(method, bodies, x0=[{"x": torch.zeros(16)} for _ in bodies], layout=layout(16))
    for state in run.run():
        torch.testing.assert_close(state.x["x"].double(), want, rtol=0, atol=2e-3)


def test_who_may_talk_is_told_by_pairs_by_region_or_by_rate() -> None:
    s = replace(SETTING, regions=(0, 0, 1, 1), rates=lambda: LINKS)
    assert admissible_graph(s, "all", 0.0) is None
    assert gasloc(s, admissible="all", min_mbps=0.0) == gasloc(s)

    def edges(admissible: Any, min_mbps: float = 0.0) -> set[tuple[int, int]]:
        graph = admissible_graph(s, admissible, min_mbps)
        assert graph is not None
        return set(graph.edges)

    assert edges(PATH) == {(0, 1), (1, 2), (2, 3)}
    assert edges("regions") == {(0, 1), (2, 3), (0, 2)}
    assert edges("all", 60.0) == {(0, 1), (0, 3), (1, 3), (2, 3)}  # what is slower in one direction than 60 is left out
    assert edges(PATH, 50.0) == {(0, 1), (1, 2), (2, 3)}
    method = gasloc(s, admissible="regions")
    assert isinstance(method.topology, TwoPeer) and method.topology.admissible is not None
    assert isinstance(gasloc(s, topology="one_peer", min_mbps=60.0).topology, OnePeer)
    alone = replace(s, plan=uniform(1, 3, 2, 4), regions=(0,))
    assert admissible_graph(alone, (), 100.0) is None


@pytest.mark.parametrize(
    "options, words",
    [
        ({"admissible": ((0, 1), (2, 3))}, "admissible pairs: the admissible graph is not connected: worker 0 reaches 2 of 4"),
        ({"admissible": ((0, 1), (1, 2))}, "worker 3 may talk to nobody"),
        ({"admissible": ((0, 1), (1, 4))}, r"pair \[1, 4\]: expected two unlike workers from 0 to 3"),
        ({"admissible": ((1, 1),)}, r"pair \[1, 1\]"),
        ({"admissible": ()}, "names no pair"),
        ({"admissible": "sites"}, "all, regions, or pairs"),
        ({"admissible": PATH, "topology": "ring"}, "use one_peer or two_peer"),
        ({"admissible": PATH, "prefer": 1.0}, "set prefer to 0"),
        ({"min_mbps": 100.0}, r"min_mbps = 100 has left links out\): worker 2 may talk to nobody"),
        ({"min_mbps": -1.0}, "expected 0"),
        ({"admissible": PATH, "alpha": 1.5}, "alpha"),
    ],
)
def test_graphs_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        gasloc(replace(SETTING, rates=lambda: LINKS), **options)
    with pytest.raises(BadInput, match="does not know the rates"):
        gasloc(SETTING, min_mbps=10.0)


def test_pairs_can_be_written_in_a_configuration_and_come_back_from_it() -> None:
    config = load(sets=["method.name=gasloc", "method.admissible=[[0,1],[1,2],[2,3]]", "fleet.name=uniform-4"])
    assert parse(tomllib.loads(dump(config))) == config
    with pytest.raises(BadInput, match=r"method.admissible = \[\[\[0\]\]\]"):
        load(sets=["method.name=gasloc", "method.admissible=[[[0]]]"])
