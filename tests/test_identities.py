"""The entry ticket of every method (design, section 9), against each other and against plain torch written out in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from lockstep import Lockstep
from toy import ToyBody, toy_start

from gossamer.core.codec import Fp32, TopK
from gossamer.core.combine import mean
from gossamer.core.errors import BadInput
from gossamer.core.exchange import Gather, Ring, Shard
from gossamer.core.inner import SGD, AdamW, Lion
from gossamer.core.method import Method
from gossamer.core.outer import OuterSGD
from gossamer.core.plan import Plan, proportional, uniform
from gossamer.core.schedule import Constant
from gossamer.core.topology import OnePeer, topology
from gossamer.core.tree import Tree, map_tree
from gossamer.recipes import Setting, dadam, ddp, diloco, gasloc, geomesh, local_dadam, local_sgd, noloco, sparse_loco
from gossamer.worker.state import State

PLAIN = SGD(lr=0.05, momentum=0.0, weight_decay=0.0, clip=None)
ADAM = AdamW(lr=0.01, weight_decay=0.1, clip=1.0)


def setting(n: int = 4, steps: int = 3, batch: int = 2, rounds: int = 4, inner=PLAIN) -> Setting:
    return Setting(uniform(n, steps, batch, ToyBody.LENGTH), rounds=rounds, seed=3, inner=inner, schedule=Constant())


def final(method: Method, **kw: object) -> list[Tree]:
    return [s.x for s in Lockstep(method, **kw).run()]


def close(a: Tree, b: Tree, tol: float = 2e-6) -> None:
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=tol, atol=tol, msg=lambda m, k=k: f"{k}: {m}")


def same(a: Tree, b: Tree) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def moved(a: Tree) -> None:
    assert any(not torch.equal(a[k], v) for k, v in toy_start().items()), "the run did not train"


def test_ddp_is_one_worker_on_the_joined_batch() -> None:
    for inner in (PLAIN, ADAM):
        many = final(ddp(setting(steps=2, rounds=3, inner=inner)))
        one = ddp(setting(n=1, steps=2, rounds=3, inner=inner))
        alone = final(one, bodies=[ToyBody(0, inner, workers=4)])
        moved(many[0])
        close(many[0], alone[0], 1e-5)
        assert all(same(many[0], x) for x in many)


def test_local_sgd_with_one_step_is_ddp() -> None:
    a, b = final(local_sgd(setting(steps=1))), final(ddp(setting(steps=1)))
    moved(a[0])
    close(a[0], b[0])


def test_diloco_without_outer_momentum_is_local_sgd() -> None:
    a = final(diloco(setting(inner=ADAM), outer_lr=1.0, outer_momentum=0.0, weights="tokens"))
    close(a[0], final(local_sgd(setting(inner=ADAM)))[0])


def reference_diloco(s: Setting, weights: list[float], lr: float, momentum: float) -> Tree:
    """DiLoCo in plain torch: torch.optim.SGD on the averaged drift."""
    bodies = [ToyBody(i, s.inner) for i in range(s.n)]
    x = {k: torch.nn.Parameter(v) for k, v in toy_start().items()}
    optimizer = torch.optim.SGD(list(x.values()), lr=lr, momentum=momentum, nesterov=True)
    for _ in range(s.rounds):
        for i, body in enumerate(bodies):
            body.load({k: v.data for k, v in x.items()})
            for _ in range(s.plan.steps[i]):
                body.gradient(s.plan.batch[i])
                body.take()
        for k, p in x.items():
            p.grad = sum(w * (p.data - b.params[k].data) for w, b in zip(weights, bodies, strict=True))
        optimizer.step()
    return {k: v.data for k, v in x.items()}


@pytest.mark.parametrize("inner", [PLAIN, ADAM], ids=["sgd", "adamw"])
def test_diloco_is_torch_sgd_on_the_mean_drift(inner) -> None:
    s = setting(inner=inner)
    got = final(diloco(s, outer_lr=0.7, outer_momentum=0.9))
    close(got[0], reference_diloco(s, [0.25] * 4, 0.7, 0.9))
    assert all(same(got[0], x) for x in got)


def test_outer_sgd_has_torch_bits() -> None:
    x0 = toy_start()
    for nesterov, momentum in ((True, 0.9), (False, 0.9), (False, 0.0)):
        p = {k: torch.nn.Parameter(v.clone()) for k, v in x0.items()}
        opt = torch.optim.SGD(list(p.values()), lr=0.7, momentum=momentum, nesterov=nesterov, foreach=False)
        rule, x = OuterSGD(0.7, momentum, nesterov), {k: v.clone() for k, v in x0.items()}
        s = rule.init(x)
        for t in range(4):
            d = {k: torch.sin(v * (t + 1)) for k, v in x0.items()}
            for k, q in p.items():
                q.grad = d[k].clone()
            opt.step()
            x, s = rule.step(x, d, {}, d, s)
        assert all(torch.equal(x[k], p[k].data) for k in x)


def test_look_ahead_identity() -> None:
    """z_t = x_t - lr D_t; x_{t+1} = z_t + momentum (z_t - z_{t-1}), z_{-1} = x_0, is torch's Nesterov."""
    x0 = toy_start()
    rule, x = OuterSGD(0.7, 0.9, True), {k: v.clone() for k, v in x0.items()}
    s, y, previous = rule.init(x), {k: v.clone() for k, v in x0.items()}, x0
    for t in range(5):
        d = {k: torch.cos(v + t) for k, v in x0.items()}
        x, s = rule.step(x, d, {}, d, s)
        z = map_tree(lambda a, b: a - 0.7 * b, y, d)
        y, previous = map_tree(lambda a, b: a + 0.9 * (a - b), z, previous), z
    close(x, y, 1e-5)


@pytest.mark.parametrize("form", ["mixed", "outer"])
def test_gasloc_on_the_complete_graph_is_diloco(form) -> None:
    s = setting(inner=ADAM)
    ours = final(gasloc(s, topology="complete", momentum=form, outer_lr=0.7, outer_momentum=0.9, force=True))
    want = final(diloco(s, outer_lr=0.7, outer_momentum=0.9))[0]
    moved(want)
    for x in ours:
        close(x, want, 1e-5)


def test_gasloc_local_form_keeps_a_spread_on_the_complete_graph() -> None:
    x = final(gasloc(setting(), topology="complete", momentum="local", outer_lr=0.7, outer_momentum=0.7))
    assert not all(torch.allclose(x[0][k], x[1][k], rtol=1e-4, atol=1e-5) for k in x[0])


@pytest.mark.parametrize("graph", ["ring", "complete", "one_peer", "two_peer", "one_peer_exp"])
def test_gasloc_outer_equals_mixed_at_lr_one(graph) -> None:
    a, b = (final(gasloc(setting(), topology=graph, momentum=f, outer_lr=1.0, outer_momentum=0.5, force=True)) for f in ("outer", "mixed"))
    for x, y in zip(a, b, strict=True):
        close(x, y, 1e-5)


def reference_gasloc(s: Setting, form: str, graph: str, lr: float, momentum: float) -> list[Tree]:
    """GASLoC as one line of linear algebra per tensor over the stacked replicas."""
    n, bodies = s.n, [ToyBody(i, s.inner) for i in range(s.n)]
    x = {k: torch.stack([v] * n).double() for k, v in toy_start().items()}
    z_before = {k: v.clone() for k, v in x.items()}
    buf = {k: torch.zeros_like(v) for k, v in x.items()}
    top = topology(graph, n, seed=s.seed)
    for t in range(s.rounds):
        W = torch.from_numpy(top.at(t).dense())
        for i, b in enumerate(bodies):
            b.load({k: v[i].float() for k, v in x.items()})
            for _ in range(s.plan.steps[i]):
                b.gradient(s.plan.batch[i])
                b.take()
        for k in x:
            y = torch.stack([b.params[k].data for b in bodies]).double()
            mix = lambda v, W=W: torch.einsum("ij,j...->i...", W, v)  # noqa: E731
            if form == "outer":
                D = x[k] - mix(y)
                buf[k] = momentum * buf[k] + D
                x[k] = x[k] - lr * (D + momentum * buf[k])
            else:
                z = x[k] + lr * (y - x[k])
                z_new = mix(z) if form == "mixed" else z
                x[k] = mix(z) + momentum * (z_new - z_before[k])
                z_before[k] = z_new
    return [{k: v[i].float() for k, v in x.items()} for i in range(n)]


@pytest.mark.parametrize("form", ["local", "mixed", "outer"])
@pytest.mark.parametrize("graph", ["ring", "one_peer", "two_peer", "complete"])
def test_gasloc_is_its_formula(form, graph) -> None:
    s = setting(n=5, rounds=3)
    got = final(gasloc(s, topology=graph, momentum=form, outer_lr=0.8, outer_momentum=0.5, force=True))
    for x, want in zip(got, reference_gasloc(s, form, graph, 0.8, 0.5), strict=True):
        close(x, want, 1e-5)


def test_noloco_is_its_formula() -> None:
    """phi <- (1 - lr) phi + lr W (phi + g) + momentum (phi_t - phi_{t-1})."""
    s = setting(rounds=3)
    got = final(noloco(s, outer_lr=0.6, outer_momentum=0.4))
    bodies = [ToyBody(i, s.inner) for i in range(s.n)]
    x = {k: torch.stack([v] * s.n) for k, v in toy_start().items()}
    before = x
    top = OnePeer(s.n, seed=s.seed)
    for t in range(s.rounds):
        W = torch.from_numpy(top.at(t).dense()).float()
        for i, b in enumerate(bodies):
            b.load({k: v[i] for k, v in x.items()})
            for _ in range(s.plan.steps[i]):
                b.gradient(s.plan.batch[i])
                b.take()
        y = {k: torch.stack([b.params[k].data for b in bodies]) for k in x}
        new = {k: 0.4 * x[k] + 0.6 * torch.einsum("ij,j...->i...", W, y[k]) + 0.4 * (x[k] - before[k]) for k in x}
        before, x = x, new
    for i, tree in enumerate(got):
        close(tree, {k: v[i] for k, v in x.items()}, 1e-5)


def test_noloco_is_gasloc_on_pairs_with_heavy_ball() -> None:
    a = noloco(setting(), outer_lr=0.6, outer_momentum=0.4)
    b = gasloc(setting(), topology="one_peer", momentum="outer", outer_lr=0.6, outer_momentum=0.4, nesterov=False)
    assert replace(a, name="gasloc") == b


def reference_dadam(s: Setting, graph: str) -> list[Tree]:
    """x_{t+1}^i = (W_t x_t)^i + (AdamW(x_t^i) - x_t^i), with moments that stay local."""
    n, bodies = s.n, [ToyBody(i, s.inner) for i in range(s.n)]
    top = topology(graph, n, seed=s.seed)
    xs = [toy_start() for _ in range(n)]
    for t in range(s.rounds * s.plan.steps[0]):
        W = top.at(t).dense()
        updates = []
        for b, x in zip(bodies, xs, strict=True):
            b.load(x)
            b.gradient(s.plan.batch[0])
            b.take()
            updates.append({k: b.params[k].data - x[k] for k in x})
        xs = [{k: sum(float(W[i, j]) * xs[j][k] for j in range(n)) + updates[i][k] for k in xs[i]} for i in range(n)]
    return xs


@pytest.mark.parametrize("graph", ["ring", "two_peer", "complete"])
def test_dadam_is_its_formula(graph) -> None:
    s = setting(steps=2, rounds=2, inner=ADAM)
    for x, want in zip(final(dadam(s, topology=graph)), reference_dadam(s, graph), strict=True):
        close(x, want, 1e-5)


def test_dadam_is_local_dadam_with_one_step() -> None:
    s = setting(steps=1, inner=ADAM)
    for a, b in zip(final(dadam(s)), final(local_dadam(s)), strict=True):
        assert same(a, b)


def test_dadam_moves_the_mean_by_the_mean_update() -> None:
    """mean(x_{t+1}) = mean(x_t) + mean(g_t) on any topology."""
    s = setting(steps=1, rounds=3, inner=ADAM)
    run = Lockstep(dadam(s, topology="two_peer"))
    run.run()
    for t in (1, 2):
        before, after = (mean([snap[0].x for snap in run.snapshots[k]]) for k in (t, t + 1))
        bodies = [ToyBody(i, ADAM) for i in range(s.n)]
        steps = []
        for body, (state, kept) in zip(bodies, run.snapshots[t], strict=True):
            body.load_state(kept)
            body.load(state.x)
            body.gradient(2)
            body.take()
            steps.append({k: p.data - state.x[k] for k, p in body.params.items()})
        close(after, map_tree(torch.add, before, mean(steps)), 1e-6)


def test_geomesh_with_fp32_and_a_uniform_plan_is_token_weighted_diloco() -> None:
    s = setting(inner=Lion(lr=0.01))
    a = final(geomesh(s, outer_momentum=0.9, codec="fp32", exchange="gather"))
    b = final(diloco(s, weights="tokens", exchange="gather"))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_token_weights_count_unequal_work() -> None:
    s = replace(setting(), plan=Plan((1, 2, 3, 4), (2, 1, 3, 2), ToyBody.LENGTH))
    tokens = [h * b for h, b in zip(s.plan.steps, s.plan.batch, strict=True)]
    got = final(diloco(s, weights="tokens"))
    close(got[0], reference_diloco(s, [t / sum(tokens) for t in tokens], 0.7, 0.9))


def test_equal_speeds_give_the_uniform_plan() -> None:
    assert proportional([2.0] * 5, 7, 3, 16) == uniform(5, 7, 3, 16)


def test_sparse_loco_that_keeps_everything_is_diloco_without_momentum() -> None:
    s = setting(inner=ADAM)
    a = final(sparse_loco(s, share=1.0, values="fp32", outer_lr=0.9))
    b = final(diloco(s, outer_lr=0.9, outer_momentum=0.0, nesterov=False))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_feedback_loses_nothing() -> None:
    """Sum of what was heard plus the residuals = sum of the drifts (decay 1, equal weights)."""
    s = setting(rounds=3)
    method = replace(geomesh(s, error_feedback=True, weights="uniform"), outer=OuterSGD(1.0, 0.0, False))
    run = Lockstep(method)
    states = run.run()
    bodies = [ToyBody(i, s.inner) for i in range(s.n)]
    said = [map_tree(torch.zeros_like, toy_start()) for _ in range(s.n)]
    for t in range(s.rounds):
        x = toy_start() if t == 0 else run.snapshots[t][0][0].x
        for i, b in enumerate(bodies):
            b.load(x)
            for _ in range(3):
                b.gradient(2)
                b.take()
            said[i] = map_tree(lambda acc, a, p: acc + (a - p), said[i], x, {k: p.data for k, p in b.params.items()})
    heard = map_tree(torch.sub, toy_start(), states[0].x)
    close(map_tree(torch.add, heard, mean([st.residual for st in states])), mean(said), 1e-5)


@pytest.mark.parametrize("make", [diloco, local_sgd, geomesh, sparse_loco, gasloc, local_dadam], ids=lambda f: f.__name__)
def test_one_worker_is_the_single_node_outer_optimizer(make: Callable[..., Method]) -> None:
    method = make(setting(n=1, inner=ADAM))
    got = final(method)[0]
    body, x = ToyBody(0, ADAM), toy_start()
    p = {k: torch.nn.Parameter(v) for k, v in x.items()}
    outer = method.outer
    lr, momentum = getattr(outer, "lr", 1.0), getattr(outer, "momentum", 0.0)
    sgd = torch.optim.SGD(list(p.values()), lr=lr, momentum=momentum, nesterov=bool(momentum))
    lossless = replace(method, codec=Fp32(), feedback=None)
    for _ in range(4):
        body.load({k: v.data for k, v in p.items()})
        for _ in range(3):
            body.gradient(2)
            body.take()
        for k, v in p.items():
            v.grad = v.data - body.params[k].data
        sgd.step()
    close(final(lossless)[0], {k: v.data for k, v in p.items()}, 1e-5)
    moved(got)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_exchanges_agree(n: int) -> None:
    """Shard has Gather's bits; Ring adds in another order."""
    s = replace(setting(n=n, rounds=3), plan=Plan(tuple(range(1, n + 1)), (2,) * n, ToyBody.LENGTH))
    runs = {type(e): Lockstep(replace(diloco(s, weights="tokens"), exchange=e)) for e in (Gather(), Shard(), Ring())}
    x = {k: [st.x for st in run.run()] for k, run in runs.items()}
    assert all(same(a, b) for a, b in zip(x[Gather], x[Shard], strict=True))
    close(x[Gather][0], x[Ring][0], 1e-6)
    assert all(same(x[Ring][0], other) for other in x[Ring])


@pytest.mark.parametrize("exchange", [Gather(), Shard(), Ring()], ids=lambda e: type(e).__name__)
def test_declared_bytes_are_the_bytes_sent(exchange) -> None:
    s = setting(n=4, rounds=1)
    method = replace(diloco(s), exchange=exchange)
    run = Lockstep(method)
    run.run()
    from toy import toy_layout

    want = exchange.sent_bytes(method.codec, toy_layout(), 3, 4, 64)
    assert np.mean(run.sent) == pytest.approx(want, abs=1)


def test_untouched_embedding_rows_stay_where_they_are() -> None:
    x = final(geomesh(setting(inner=Lion(lr=0.01, weight_decay=0.0), rounds=4)))[0]
    start = toy_start()
    assert torch.equal(x["embed"][10], start["embed"][10])
    assert not torch.equal(x["embed"][3], start["embed"][3])
    run = Lockstep(geomesh(setting(inner=Lion(lr=0.01, weight_decay=0.0), rounds=1), embeddings="same"))
    run.run()
    assert all(n["exact_zeros"] >= 5 / sum(v.numel() for v in start.values()) for n in run.notes), "five zeros of one row became steps"
    shared = final(geomesh(setting(inner=Lion(lr=0.01, weight_decay=0.0), rounds=4), embeddings="same"))[0]
    assert not torch.equal(shared["embed"][10], start["embed"][10])


def test_topk_of_everything_is_lossless() -> None:
    assert not TopK(share=1.0, values="fp32").lossy


@pytest.mark.parametrize("n", [2, 3])
def test_states_have_the_round_and_tokens_of_the_plan(n: int) -> None:
    s = setting(n=n)
    states: list[State] = Lockstep(diloco(s)).run()
    assert [(st.round, st.tokens) for st in states] == [(4, 4 * n * 3 * 2 * ToyBody.LENGTH)] * n


def test_diverging_gossip_is_refused_unless_forced() -> None:
    with pytest.raises(BadInput, match=r"consensus rate of 1\.\d+"):
        gasloc(setting(n=8), topology="one_peer", momentum="local", outer_momentum=0.9)
    gasloc(setting(n=8), topology="one_peer", momentum="local", outer_momentum=0.9, force=True)
    with pytest.raises(BadInput, match="outer_lr"):
        noloco(setting(n=6), outer_lr=5.0)
    noloco(setting(n=6), outer_lr=5.0, force=True)
