"""Outer steps that know how much work they stand for, within a round (FedNova) and between rounds (r steps of torch's SGD in one)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lockstep import Lockstep
from toy import ToyBody, toy_start

from gossamer.core.errors import BadInput
from gossamer.core.inner import SGD, AdamW
from gossamer.core.outer import OuterSGD
from gossamer.core.plan import Plan, proportional, uniform
from gossamer.core.schedule import Constant
from gossamer.core.tree import Tree
from gossamer.core.work import drift_scale, outer_step, round_work
from gossamer.recipes import Setting, diloco
from gossamer.worker.effects import Work

N = 4
FIRST = uniform(N, steps=6, batch=2, sequence=ToyBody.LENGTH)
SETTING = Setting(FIRST, rounds=10, seed=3, inner=AdamW(lr=1e-2), schedule=Constant())


def random_tree(seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=g), "b": torch.randn(7, generator=g)}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("work", [1, 2, 5])
def test_a_round_of_r_units_is_r_steps_of_torch(nesterov: bool, work: int) -> None:
    """Each on D / r: torch.optim.SGD, with a momentum from before. r = 1 has torch's bits."""
    rule = OuterSGD(lr=0.6, momentum=0.8, nesterov=nesterov, correction="work")
    x, D0, D = random_tree(0), random_tree(1), random_tree(2)
    params = {k: torch.nn.Parameter(v.clone()) for k, v in x.items()}
    torch_sgd = torch.optim.SGD(params.values(), lr=0.6, momentum=0.8, nesterov=nesterov)
    for drift, steps in ((D0, 1), (D, work)):
        for _ in range(steps):
            for k, p in params.items():
                p.grad = drift[k] / steps
            torch_sgd.step()
    s = rule.init(x)
    kept = {k: v.clone() for k, v in D.items()}
    x, s = rule.step(x, {}, {}, D0, s)
    x, s = outer_step(rule, float(work), x, D, s)
    assert all(torch.equal(D[k], kept[k]) for k in D)
    for k, p in params.items():
        buffer = torch_sgd.state[p]["momentum_buffer"]
        if work == 1:
            assert torch.equal(x[k], p.data) and torch.equal(s["momentum"][k], buffer)
        torch.testing.assert_close(x[k], p.data, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(s["momentum"][k], buffer, rtol=1e-5, atol=1e-6)


def test_what_is_moved_per_unit_of_work_does_not_depend_on_the_round() -> None:
    """Under a constant drift, rounds of any length, mixed, move as far as rounds of unit length, once the momentum has settled."""
    rule = OuterSGD(lr=0.5, momentum=0.7)
    moved = []
    for lengths in ([1.0] * 60, [2.5] * 24, [0.5, 1.5] * 30):
        x, s = {"w": torch.zeros(1, dtype=torch.float64)}, {"momentum": {"w": torch.zeros(1, dtype=torch.float64)}}
        for r in lengths:
            x, s = outer_step(rule, r, x, {"w": torch.full((1,), r, dtype=torch.float64)}, s)
        moved.append(float(x["w"]))
    assert moved[1:] == pytest.approx([moved[0]] * 2, rel=1e-9)


def test_equal_work_is_left_alone_bit_for_bit() -> None:
    want, got = (Lockstep(diloco(SETTING, correction=c)).run() for c in ("none", "work"))
    assert all(torch.equal(a.x[k], b.x[k]) for a, b in zip(got, want, strict=True) for k in b.x)
    for by_tokens in (True, False):
        assert [drift_scale(FIRST, i, by_tokens) for i in range(N)] == [1.0] * N
        odd = Plan((1, 2, 3, 5), (3, 2, 1, 2), 4)
        assert round_work(odd, odd, by_tokens) == 1.0


@pytest.mark.parametrize("weights", ["uniform", "tokens"])
def test_unequal_steps_are_averaged_as_fednova_does(weights: Any) -> None:
    """x <- x - eta * tau_eff * sum_i p_i (x - y_i) / tau_i, tau_eff = sum_i p_i tau_i (Wang et al. 2020, equation 6 with SGD inside)."""
    plan = Plan((1, 2, 3, 6), (3, 2, 1, 2), ToyBody.LENGTH)
    inner = SGD(lr=0.05, momentum=0.0, weight_decay=0.0, clip=None)
    setting = Setting(plan, rounds=1, inner=inner, schedule=Constant())
    got = Lockstep(diloco(setting, outer_lr=0.9, outer_momentum=0.0, weights=weights, correction="work")).run()[0].x
    p = [plan.tokens(i) / plan.tokens_per_round if weights == "tokens" else 1 / N for i in range(N)]
    tau_eff = sum(w * h for w, h in zip(p, plan.steps, strict=True))
    x = toy_start()
    want = {k: v.clone() for k, v in x.items()}
    for i in range(N):
        body = ToyBody(i, inner)
        y = body.compute(Work(plan.steps[i], plan.batch[i], 0.0, 1.0)).tree
        for k in want:
            want[k] -= 0.9 * tau_eff * p[i] * (x[k] - y[k]) / plan.steps[i]
    for k in want:
        torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


def test_the_work_of_a_round_is_its_mean_steps() -> None:
    even, odd = uniform(2, 30, 8, 4), proportional([2.0, 1.0], 30, 8, 4)
    assert odd.steps == (40, 20)
    assert round_work(odd, even, by_tokens=False) == 1.0
    assert round_work(odd, even, by_tokens=True) == pytest.approx((40 * 40 + 20 * 20) / 60 / 30)
    assert drift_scale(odd, 1, by_tokens=False) == 1.5
    with pytest.raises(BadInput, match="correction"):
        OuterSGD(correction="tokens")  # type: ignore[arg-type]


def test_who_does_not_take_part_has_no_say_in_the_mean() -> None:
    plan = Plan((30, 10, 20), (1, 1, 1), 4)
    few = Plan((30, 10), (1, 1), 4)
    for by_tokens in (True, False):
        assert drift_scale(plan, 1, by_tokens, (0, 1)) == drift_scale(few, 1, by_tokens)
        assert round_work(few, few, by_tokens) == 1.0
        assert round_work(FIRST, FIRST, by_tokens, (0, 2)) == 1.0, "equal work is left alone"
    assert round_work(plan, plan, False, (0, 2)) == 25 / 20
