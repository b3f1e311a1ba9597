"""Inner optimizers: the formulas, decay on matrices only, one global norm, Muon's split, state round trips."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from gossamer.core.errors import BadInput
from gossamer.core.inner import INNERS, SGD, AdamW, Both, Lion, Muon, clip_, inner_named, set_lr

SHAPES = {"emb": (7, 6), "w": (6, 5), "v": (4, 6), "conv": (3, 2, 2), "bias": (5,), "scale": ()}
ALL = [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), Lion(lr=0.1), Muon(lr=0.1)]


def params(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {k: torch.nn.Parameter(torch.randn(s, generator=g)) for k, s in SHAPES.items()}


def give_grads(ps, seed):
    g = torch.Generator().manual_seed(seed)
    for p in ps.values():
        p.grad = torch.randn(p.shape, generator=g)


def run(inner, steps, ps=None, optimizer=None, first=0):
    ps = params() if ps is None else ps
    optimizer = inner.build(ps, by_row=("emb",)) if optimizer is None else optimizer
    for h in range(first, first + steps):
        give_grads(ps, 100 + h)
        optimizer.step()
    return ps, optimizer


@pytest.mark.parametrize("inner", ALL, ids=lambda i: type(i).__name__)
def test_decay_acts_on_matrices_and_not_on_vectors(inner):
    ps = params()
    before = {k: p.detach().clone() for k, p in ps.items()}
    optimizer = inner.build(ps, by_row=("emb",))
    for p in ps.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for k, p in ps.items():
        if p.ndim >= 2:
            torch.testing.assert_close(p.detach(), before[k] * (1 - 0.1 * 0.1))
        else:
            assert torch.equal(p, before[k]), k


@pytest.mark.parametrize("inner", ALL, ids=lambda i: type(i).__name__)
def test_every_parameter_is_stepped_once_and_factor_scales_all(inner):
    # every group moves half as far at half the factor (first step, no decay)
    moved = []
    for factor in (1.0, 0.5, 0.0):
        ps = params()
        before = {k: p.detach().clone() for k, p in ps.items()}
        optimizer = type(inner)(**{**vars(inner), "weight_decay": 0.0}).build(ps, by_row=("emb",))
        assert sorted(id(p) for g in optimizer.param_groups for p in g["params"]) == sorted(map(id, ps.values()))
        set_lr(optimizer, factor)
        give_grads(ps, 1)
        optimizer.step()
        moved.append({k: (p.detach() - before[k]) for k, p in ps.items()})
    for k in SHAPES:
        assert moved[0][k].abs().max() > 0
        torch.testing.assert_close(moved[1][k] * 2, moved[0][k], rtol=1e-4, atol=1e-6)
        assert torch.equal(moved[2][k], torch.zeros(SHAPES[k]))


@pytest.mark.parametrize("inner", ALL, ids=lambda i: type(i).__name__)
def test_is_deterministic_and_survives_its_own_state_dict(inner):
    whole, _ = run(inner, 4)
    again, _ = run(inner, 4)
    half, optimizer = run(inner, 2)
    fresh = {k: torch.nn.Parameter(p.detach().clone()) for k, p in half.items()}
    resumed = inner.build(fresh, by_row=("emb",))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(inner, 2, fresh, resumed, first=2)
    for k in SHAPES:
        assert torch.equal(whole[k], again[k]) and torch.equal(whole[k], fresh[k]), k


def test_lion_is_its_formula():
    inner = Lion(lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    ps, _ = run(inner, 3)
    for k, p0 in params().items():
        p, m = p0.detach().double(), torch.zeros(SHAPES[k], dtype=torch.float64)
        for h in range(3):
            other = params()
            give_grads(other, 100 + h)
            g = other[k].grad.double()
            step = torch.sign(0.8 * m + 0.2 * g)
            p = p - 0.01 * (step + (0.3 * p if p.ndim >= 2 else 0))
            m = 0.95 * m + 0.05 * g
        torch.testing.assert_close(ps[k].detach().double(), p, rtol=1e-6, atol=1e-6)


def test_lion_leaves_an_untouched_coordinate_alone_and_bounds_the_drift():
    ps = {"w": torch.nn.Parameter(torch.ones(3, 2))}
    optimizer = Lion(lr=0.01, weight_decay=0.0).build(ps)
    for h in range(5):
        ps["w"].grad = torch.tensor([[1.0, -1.0], [0.0, 0.0], [(-1.0) ** h, 3.0]])
        optimizer.step()
    drift = ps["w"].detach() - 1
    assert torch.equal(drift[1], torch.zeros(2))
    assert drift.abs().max() <= 5 * 0.01 + 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_and_adamw_are_torchs(nesterov):
    for inner, plain in (
        (SGD(0.1, 0.9, nesterov, 0.0), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=nesterov, foreach=False)),
        (AdamW(0.1, weight_decay=0.0), lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)),
    ):
        ours, _ = run(inner, 3)
        theirs = params()
        run(inner, 3, theirs, plain(list(theirs.values())))
        for k in SHAPES:
            torch.testing.assert_close(ours[k].detach(), theirs[k].detach(), rtol=1e-5, atol=1e-6)


def test_muon_takes_hidden_matrices_only():
    ps = params()
    optimizer = Muon(lr=0.1, adamw_lr=0.02).build(ps, by_row=("emb",))
    assert isinstance(optimizer, Both)
    muon, adamw = optimizer.parts
    assert {id(p) for g in muon.param_groups for p in g["params"]} == {id(ps["w"]), id(ps["v"])}
    assert {g["initial_lr"] for g in muon.param_groups} == {0.1} and {g["initial_lr"] for g in adamw.param_groups} == {0.02}
    run(Muon(lr=0.1), 1, ps, optimizer)
    assert set(optimizer.state[ps["w"]]) == {"momentum_buffer"} and "exp_avg_sq" in optimizer.state[ps["emb"]]
    assert not isinstance(Muon(lr=0.1).build({"b": ps["bias"]}), Both)  # no hidden matrix: AdamW alone


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clip_is_by_global_norm(limit):
    ps = params()
    ps["w"] = torch.nn.Parameter(torch.randn(300, 200))  # longer than one piece
    give_grads(ps, 3)
    grads = [p.grad for p in ps.values()]
    want = [g.clone() for g in grads]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert float(clip_(grads, limit)) == pytest.approx(norm, rel=1e-12)
    for g, w in zip(grads, want, strict=True):
        torch.testing.assert_close(g, w * min(1.0, limit / norm), rtol=1e-5, atol=0)
        assert limit < norm or torch.equal(g, w)


def test_clip_passes_what_is_not_finite_on():
    for bad in (math.inf, math.nan):
        grads = [torch.ones(3), torch.tensor([bad])]
        clip_(grads, 1.0)
        assert not all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW(lr=0.0),
        lambda: AdamW(lr=1e-3, betas=(0.9, 1.0)),
        lambda: AdamW(lr=1e-3, clip=0.0),
        lambda: SGD(lr=1e-3, momentum=1.0),
        lambda: SGD(lr=1e-3, nesterov=True),
        lambda: Lion(lr=float("nan")),
        lambda: Muon(lr=1e-3, adjust="spectral"),
        lambda: inner_named("adam", {"lr": 1}),
        lambda: inner_named("adamw"),
        lambda: inner_named("lion", {"lr": 1e-3, "beta": 1}),
    ],
)
def test_refuses(make):
    with pytest.raises(BadInput):
        make()


def test_by_name():
    assert {type(inner_named(name, {"lr": 0.1})) for name in INNERS} == {AdamW, SGD, Lion, Muon}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INNERS)
def test_every_optimizer_moves_every_tensor_of_every_dtype(name, dtype):
    generator = torch.Generator().manual_seed(0)
    ps = {k: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for k, shape in (("w", (33, 65)), ("b", (33,)))}
    before = {k: p.detach().clone() for k, p in ps.items()}
    optimizer = inner_named(name, {"lr": 0.5}).build(ps)
    for p in ps.values():
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    optimizer.step()
    assert all((p.detach() != before[k]).float().mean() > 0.9 for k, p in ps.items())
