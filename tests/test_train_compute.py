"""The body: what a step is, how the schedule, clipping and data enter, and that a resumed body goes on bit for bit."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.inner import SGD, AdamW, Lion, Muon
from gossamer.core.schedule import WSD, Constant, Cosine
from gossamer.train.compute import TrainBody, mean_loss
from gossamer.train.data import Corpus, Sampler
from gossamer.train.evaluate import evaluate, evaluate_tree, perplexity, windows
from gossamer.train.model import build, parameters_of
from gossamer.worker.effects import Work

SPEC = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
DROPOUT = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
TOKENS = np.random.Generator(np.random.Philox(5)).integers(0, 60, 4000).astype(np.uint16)
INNERS = [AdamW(lr=3e-3), SGD(lr=0.1, momentum=0.9), SGD(lr=0.1), Lion(lr=1e-3), Muon(lr=3e-3)]
WORK = Work(steps=3, batch=2, tokens0=0, tokens_per_step=32)


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def body(inner=INNERS[0], spec=SPEC, worker=0, schedule=None, **options):
    batches = Sampler(TOKENS, 16, seed=7, worker=worker)
    return TrainBody(build(spec, 64, 0), inner, schedule or Cosine(), 1000, batches, seed=7, worker=worker, **options)


def copy(tree):
    return {k: v.clone() for k, v in tree.items()}


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_steps_are_a_plain_loop(inner):
    schedule = WSD(warmup=0.5, start=0.2)
    b = body(inner, schedule=schedule)
    b.compute(WORK)  # so that the cursor and moments are not zero
    done = b.compute(Work(2, 3, tokens0=96.0, tokens_per_step=40.0))
    twin = body(inner, schedule=schedule)
    params, losses = parameters_of(twin.model), []
    optimizer = inner.build(params, by_row=("model.embed_tokens.weight",))
    for tokens, cursor, n in ((0, 0, 2), (32, 2, 2), (64, 4, 2), (96, 6, 3), (136, 9, 3)):
        batch = Sampler(TOKENS, 16, seed=7, worker=0).batch(cursor, n)
        loss = torch.nn.functional.cross_entropy(twin.model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = sum(float(p.grad.double().square().sum()) for p in params.values()) ** 0.5
        for p in params.values():
            p.grad *= min(1.0, inner.clip / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = inner.lr * schedule.factor(tokens, 1000)
        optimizer.step()
        losses.append(float(loss.detach()) * n * 16)
    assert done.tokens == 2 * 3 * 16 and done.loss_sum == pytest.approx(sum(losses[3:]), rel=1e-12)
    for k, p in params.items():
        torch.testing.assert_close(done.tree[k], p.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_grad_then_apply_is_a_step(inner):
    a, b = body(inner), body(inner)
    for h in range(3):
        whole = a.compute(Work(1, 4, tokens0=h * 64, tokens_per_step=64))
        said = b.compute(Work(1, 4, h * 64, 64, kind="grad"))
        assert (said.tokens, said.loss_sum) == (whole.tokens, whole.loss_sum)
        agreed = copy(said.tree)
        before = copy(agreed)
        applied = b.compute(Work(1, 4, h * 64, 64, kind="apply", tree=agreed))
        assert (applied.tokens, applied.loss_sum) == (0, 0.0)
        assert equal(agreed, before)  # clipping did not touch what was agreed
        assert equal(whole.tree, applied.tree)


def test_grad_is_the_unclipped_mean_gradient_and_moves_nothing():
    b = body(AdamW(lr=1e-3, clip=1e-6))
    before = copy(b.compute(Work(0, 2, 0, 0)).tree)
    done = b.compute(Work(1, 4, 0, 64, kind="grad"))
    loss = mean_loss(b.model, Sampler(TOKENS, 16, 7, 0).batch(0, 4))
    want = torch.autograd.grad(loss, list(parameters_of(b.model).values()))
    for g, w in zip(done.tree.values(), want, strict=True):
        torch.testing.assert_close(g, w)
    assert equal(before, copy(b.compute(Work(0, 2, 0, 0)).tree))
    assert (b.steps, b.cursor) == (0, 4)


@pytest.mark.parametrize("inner", INNERS, ids=repr)
@pytest.mark.parametrize("spec", [SPEC, DROPOUT], ids=["llama", "dropout"])
@pytest.mark.parametrize("before", [0, 2])
def test_resume_is_bitwise(inner, spec, before):
    a = body(inner, spec)
    if before:
        a.compute(WORK._replace(steps=before))
    params, saved = copy(a.compute(Work(0, 2, 0, 0)).tree), a.state()
    want = copy(a.compute(WORK).tree)
    b = body(inner, spec)
    b.compute(WORK._replace(steps=1))  # state that must be forgotten
    b.load(params)
    b.load_state(saved)
    done = b.compute(WORK)
    assert equal(done.tree, want)
    assert all(torch.equal(v, b.state()[k]) if isinstance(v, torch.Tensor) else v == b.state()[k] for k, v in a.state().items())


def test_state_is_flat_named_and_a_copy():
    b = body()
    assert {k for k, v in b.state().items() if "/" in k} == set()
    b.compute(WORK)
    state = b.state()
    names = parameters_of(b.model)
    assert {k for k in state if "/" in k} == {f"{s}/{n}" for s in ("step", "exp_avg", "exp_avg_sq") for n in names}
    assert state["cursor"] == 6 and state["steps"] == 3
    kept = {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    b.compute(WORK)
    assert equal({k: state[k] for k in kept}, kept)
    with pytest.raises(RunFailed, match="'other'"):
        b.load_state(state | {"exp_avg/other": torch.zeros(1)})


def test_dropout_is_each_workers_own_and_leaves_the_caller_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    alone = copy(body(spec=DROPOUT).compute(WORK).tree)
    a, b = body(spec=DROPOUT), body(spec=DROPOUT, worker=1)
    for _ in range(3):  # interleaved with another worker and with the caller's own draws
        torch.rand(3)
        b.compute(WORK._replace(steps=1))
    got = a.compute(WORK).tree
    assert equal(alone, got)
    torch.set_rng_state(before)
    b.compute(WORK)
    assert torch.equal(torch.get_rng_state(), before)
    c = body(spec=DROPOUT)
    two = [float(c.compute(Work(1, 2, 0, 0, kind="grad")).tree["transformer.wte.weight"].norm()) for _ in range(2)]
    c.cursor = 0
    assert float(c.compute(Work(1, 2, 0, 0, kind="grad")).tree["transformer.wte.weight"].norm()) != two[0]  # dropout is on, and moves on


def test_load_casts_resets_and_refuses():
    b = body()
    b.model.bfloat16()
    b = TrainBody(b.model, AdamW(lr=1e-3), Constant(), 1000, b.batches)
    b.compute(WORK)
    x = {k: torch.full(v.shape, 1.0 + 2**-12) for k, v in b.compute(Work(0, 1, 0, 0)).tree.items()}
    b.load(x, reset_inner=True)
    live = b.compute(Work(0, 1, 0, 0)).tree
    assert all(v.dtype == torch.bfloat16 and torch.equal(v, torch.ones_like(v)) for v in live.values())
    assert not any("/" in k for k in b.state())
    name = next(iter(x))
    with pytest.raises(RunFailed, match="no such parameter"):
        b.load({"other": x[name]})
    with pytest.raises(RunFailed, match="shape"):
        b.load({name: torch.zeros(3)})
    b.compute(WORK)
    saved = b.state()
    key = f"exp_avg/{name}"
    with pytest.raises(RunFailed, match=r"of shape .*it is another model's"):  # torch would read past its end
        b.load_state(saved | {key: saved[key][:3]})
    b.load_state(saved)


def test_views_are_live_and_follow_load():
    b = body()
    tree = b.compute(WORK).tree
    b.load({k: torch.zeros_like(v) for k, v in tree.items()})
    assert all(not v.any() for v in tree.values())
    assert all(tree[k].data_ptr() == p.data_ptr() for k, p in parameters_of(b.model).items())


def test_pacing_sleeps_to_the_deadline_of_each_step(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: (slept.append(s), now.__setitem__(0, now[0] + s)))
    b = body(pace_s=0.5)
    took = iter([0.1, 0.9, 0.1, 0.2])
    real = b._backward
    monkeypatch.setattr(b, "_backward", lambda n: (now.__setitem__(0, now[0] + next(took)), real(n))[1])
    b.compute(WORK)
    # ends at 0.5, then 1.4 (late: deadline 1.0), then 1.5 (the deadline again: a late step is made up for)
    assert slept == pytest.approx([0.4, 0.0, 0.0]) and now[0] == pytest.approx(101.5)
    b.compute(Work(1, 2, 0, 0, kind="grad"))
    assert now[0] == pytest.approx(102.0)


def test_bf16_autocast_keeps_parameters_in_float32():
    a, b = body().compute(WORK), body(precision="bf16").compute(WORK)
    assert all(v.dtype == torch.float32 for v in b.tree.values())
    assert a.loss_sum != b.loss_sum and a.loss_sum == pytest.approx(b.loss_sum, rel=1e-2)


@pytest.mark.parametrize(
    "options,says",
    [({"device": "cuda:99"}, "cuda:99"), ({"device": "gpu"}, "gpu"), ({"precision": "fp8"}, "fp8"), ({"pace_s": 0.0}, "pace_s")],
)
def test_refuses(options, says):
    with pytest.raises(BadInput, match=says):
        body(**options)
    with pytest.raises(BadInput, match="16 tokens exceed the model's 8"):
        body(spec=DROPOUT | {"n_positions": 8})


def corpus():
    return Corpus("random", TOKENS[:2000], TOKENS[2000:], 64, "", None, 0)


@pytest.mark.parametrize("batch", [1, 3, 5, 64])
def test_evaluation_is_the_token_mean_whatever_the_batch(batch):
    model = build(SPEC, 64, 1)
    found = evaluate(model, corpus(), sequences=5, length=20, batch=batch)
    valid = torch.from_numpy(TOKENS[2000:].astype(np.int64))
    losses = [mean_loss(model, valid[s : s + 21][None]).detach().double() for s in windows(2000, 5, 20)]
    assert found.tokens == 100 and found.loss == pytest.approx(float(sum(losses)) / 5, rel=1e-6)
    assert perplexity(found.loss) == pytest.approx(np.exp(found.loss))


def test_evaluation_disturbs_nothing():
    quiet, watched = body(spec=DROPOUT), body(spec=DROPOUT)
    scratch = build(DROPOUT, 64, 9)
    for b in (quiet, watched):
        tree = b.compute(WORK).tree
        if b is watched:
            before = torch.get_rng_state()
            own = evaluate(b.model, corpus(), 4, 16)
            assert evaluate_tree(scratch, copy(tree), corpus(), 4, 16) == own == evaluate(b.model, corpus(), 4, 16)
            assert torch.equal(torch.get_rng_state(), before) and all(m.training for m in b.model.modules())
    assert equal(quiet.compute(WORK).tree, watched.compute(WORK).tree)


def test_windows_fit_and_refuse():
    for tokens, n, length in ((30, 1, 29), (30, 7, 20), (1000, 8, 9)):
        starts = windows(tokens, n, length)
        assert len(starts) == n and starts[0] == 0 and starts[-1] + length + 1 <= tokens
        assert n == 1 or starts[-1] == tokens - length - 1
    with pytest.raises(BadInput, match="too few"):
        windows(20, 1, 20)
    with pytest.raises(BadInput, match="at least 1"):
        windows(20, 0, 2)


@pytest.mark.parametrize("inner", INNERS[:1] + INNERS[3:], ids=repr)
def test_it_learns(inner):
    tokens = (np.arange(3000) % 23).astype(np.uint16)
    b = TrainBody(build(SPEC, 64, 0), inner, Constant(), 1e6, Sampler(tokens, 16, 0, 0))
    first = b.compute(Work(1, 4, 0, 64))
    b.compute(Work(30, 4, 0, 64))
    last = b.compute(Work(1, 4, 0, 64))
    assert last.loss_sum < 0.7 * first.loss_sum
