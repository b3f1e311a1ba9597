"""What an exchange may cost and may not: overlap, eager steps, error feedback at both ends of a shard, bounds of signed drifts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cadences import UNEQUAL, N
from lockstep import Lockstep
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.cadence import Cadence
from gossamer.core.exchange import Gather, Shard
from gossamer.core.feedback import Feedback
from gossamer.core.inner import AdamW, Lion
from gossamer.core.method import Method
from gossamer.core.outer import OuterSGD
from gossamer.core.plan import Plan, uniform
from gossamer.core.tree import Tree, map_tree
from gossamer.recipes import diloco, geomesh
from gossamer.worker import stream
from gossamer.worker.effects import Done, Work
from gossamer.worker.seat import Seat

ADAM = AdamW(lr=0.01)
LION = Lion(lr=0.01, weight_decay=0.0)
APPLY = OuterSGD(1.0, 0.0, False)
"""x <- x - mean: what was applied can be read off the anchors."""


class Spy:
    """The drifts that each worker was given to say, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: dict[int, list[Tree]] = {i: [] for i in range(N)}
        original = stream.say

        def say(part: Seat, state: Any, D: Tree, header: Any) -> Any:
            self.said[part.me].append({k: v.clone() for k, v in D.items()})
            return original(part, state, D, header)

        monkeypatch.setattr(stream, "say", say)

    def sums(self) -> list[Tree]:
        """Per worker, the sum over the run, float64."""
        totals = []
        for trees in self.said.values():
            total = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in toy_start().items()}
            for tree in trees:
                for k, v in tree.items():
                    total[k] += v
            totals.append(total)
        return totals


def equal(a: Tree, b: Tree) -> bool:
    return all(torch.equal(a[k], b[k]) for k in b)


# ---- eager


@pytest.mark.parametrize("fragments", [1, 3])
def test_eager_on_one_worker_is_the_method_without_overlap(fragments: int) -> None:
    """What it steps ahead on is all there is, so that landing changes nothing."""
    s = replace(UNEQUAL, plan=uniform(1, 6, 2, ToyBody.LENGTH), inner=ADAM, rounds=5)
    plain = Lockstep(diloco(s, fragments=fragments)).run()
    eager = Lockstep(diloco(s, fragments=fragments, overlap=0.3, eager=True)).run()
    late = Lockstep(diloco(s, fragments=fragments, overlap=0.3)).run()
    assert equal(eager[0].x, plain[0].x) and not equal(late[0].x, plain[0].x)


def test_eager_keeps_the_anchors_of_all_workers_equal_and_its_first_landing_is_that_of_overlap() -> None:
    runs = {}
    for eager in (False, True):
        runs[eager] = Lockstep(geomesh(replace(UNEQUAL, rounds=6), overlap=0.5, eager=eager))
        states = runs[eager].run()
        assert all(equal(s.x, states[0].x) for s in states)
    landed = {eager: [run.snapshots[t][0][0].x for t in (2, 3)] for eager, run in runs.items()}
    assert equal(landed[True][0], landed[False][0]) and not equal(landed[True][1], landed[False][1])


def test_eager_does_not_step_ahead_of_a_refusal() -> None:
    method = diloco(replace(UNEQUAL, inner=ADAM), overlap=0.5, eager=True)
    run = Lockstep(method, bodies=[ToyBody(i, ADAM, poison_at=2 if i == 1 else None) for i in range(N)])
    states = run.run()
    assert all(torch.isfinite(v).all() for s in states for v in s.x.values()) and all(equal(s.x, states[0].x) for s in states)
    pending = run.snapshots[2][1][0].streams[0].pending
    assert equal(pending.y, run.snapshots[2][1][0].x), "the refused worker goes on from the agreed parameters"


# ---- error feedback


@pytest.mark.parametrize("cadence", [Cadence(), Cadence(0.45, fragments=3)], ids=str)
@pytest.mark.parametrize(("exchange", "ends"), [(Gather(), "worker"), (Shard(), "both"), (Shard(), "worker"), (Shard(), "mean")])
def test_feedback_conserves_mass_on_both_ends(exchange: Any, ends: Any, cadence: Cadence, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all applied + what the owners of slices hold back + the weighted mean of what workers hold back = the weighted mean of what
    was to be said. With one end of a shard left open, it is not."""
    base = geomesh(replace(UNEQUAL, inner=LION, rounds=5), weights="uniform")
    method = replace(base, exchange=exchange, feedback=Feedback(ends=ends), outer=APPLY, cadence=cadence)
    spy = Spy(monkeypatch)
    states = Lockstep(method).run()
    layout = toy_layout()
    gap = 0.0
    for part in layout:
        k = part.name
        want = sum(total[k] for total in spy.sums()) / N
        got = (toy_start()[k].double() - states[0].x[k].double()).flatten()
        for i, state in enumerate(states):
            if state.residual is not None:
                got += state.residual[k].double().flatten() / N
            if state.mean_residual is not None:
                for piece in (p for s in Seat(i, method, layout).fragments for p in s.slices[i] if p.name == k):
                    got[piece.lo : piece.hi] += state.mean_residual[k].double()
        gap = max(gap, float((got - want.flatten()).abs().max()))
    closed = ends == "both" or isinstance(exchange, Gather)
    assert gap < 2e-6 if closed else gap > 1e-3, gap
    assert (states[0].residual is None) == (ends == "mean") and (states[0].mean_residual is None) == (ends == "worker")


def test_feedback_of_the_mean_waits_where_nobody_was_accepted() -> None:
    method = geomesh(replace(UNEQUAL, inner=ADAM), exchange="shard", error_feedback="mean")
    run = Lockstep(method, bodies=[ToyBody(i, ADAM, poison_at=2 * h) for i, h in enumerate(UNEQUAL.plan.steps)])
    run.run()
    before, after = (run.snapshots[t][0][0] for t in (2, 3))
    assert equal(before.x, after.x), "all were refused in the third round"
    assert equal(before.mean_residual, after.mean_residual) and any(v.abs().max() > 0 for v in after.mean_residual.values())


def test_true_and_false_name_the_worker_s_end_and_none() -> None:
    assert geomesh(UNEQUAL, error_feedback=True) == geomesh(UNEQUAL, error_feedback="worker")
    assert geomesh(UNEQUAL, error_feedback=False) == geomesh(UNEQUAL, error_feedback="none") == geomesh(UNEQUAL)


# ---- bounds


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("exchange", ["gather", "shard"])
def test_with_lion_drifts_and_their_decoding_errors_are_within_the_learning_rates(
    exchange: Any, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """|D| <= S = sum of lr * (1 + decay * |y|) over the inner steps, and |decoded - D| <= the largest S, at both signings."""
    spy = Spy(monkeypatch)
    method = geomesh(replace(UNEQUAL, inner=Lion(lr=0.01, weight_decay=decay)), exchange=exchange)
    method = replace(method, outer=APPLY)
    run = Lockstep(method)
    run.run()
    layout, w = toy_layout(), [UNEQUAL.plan.tokens(i) / UNEQUAL.plan.tokens_per_round for i in range(N)]
    for t in range(method.rounds):
        x = toy_start() if t == 0 else run.snapshots[t][0][0].x
        largest = max(float(v.abs().max()) for v in x.values()) + 0.2
        bounds = [0.01 * h * (1 + decay * largest) * (1 + 1e-5) for h in UNEQUAL.plan.steps]
        for i, bound in enumerate(bounds):
            D = spy.said[i][t]
            decoded = Seat(0, method, layout).pack(D, layout, 0, stream.Said(t, 1))
            error = {k: v.clone() for k, v in D.items()}
            method.codec.accumulate(decoded.payload, layout, error, -1.0)
            assert max(float(v.abs().max()) for v in D.values()) <= bound
            assert max(float(v.abs().max()) for v in error.values()) <= bound
        mixed = map_tree(torch.sub, x, run.snapshots[t + 1][0][0].x)
        signings = 2 if exchange == "shard" else 1
        for k, v in mixed.items():
            exact = sum(wi * spy.said[i][t][k] for i, wi in enumerate(w))
            bound = sum(wi * b for wi, b in zip(w, bounds, strict=True))
            assert float((v - exact).abs().max()) <= signings * bound


@pytest.mark.parametrize("cadence", [Cadence(), Cadence(0.4, eager=True), Cadence(0.3, fragments=2)], ids=str)
@pytest.mark.parametrize(("exchange", "feedback"), [("gather", "none"), ("gather", "worker"), ("shard", "none"), ("shard", "both")])
def test_rows_that_no_token_touched_stay_where_they_are(exchange: Any, feedback: Any, cadence: Cadence) -> None:
    s = replace(UNEQUAL, inner=LION, rounds=6)
    x = Lockstep(replace(geomesh(s, exchange=exchange, error_feedback=feedback), cadence=cadence)).run()[0].x
    first = toy_start()
    assert torch.equal(x["embed"][10], first["embed"][10]) and not torch.equal(x["embed"][3], first["embed"][3])


# ---- weights over what was received


class Idle(ToyBody):
    """Has no data, and parameters that would do harm."""

    def compute(self, work: Work) -> Done:
        done = super().compute(work)
        assert done.tree is not None
        for p in done.tree.values():
            p.add_(100.0)
        return Done(done.tree, 0, 0.0)


@pytest.mark.parametrize("codec", ["fp32", "sign"])
@pytest.mark.parametrize("exchange", ["gather", "shard"])
@pytest.mark.parametrize("cadence", [Cadence(), Cadence(0.5), Cadence(0.0, fragments=2)], ids=str)
def test_a_worker_without_tokens_does_no_harm(exchange: Any, codec: Any, cadence: Cadence) -> None:
    """The others step as if they were alone."""

    def run(n: int) -> list[Any]:
        s = replace(UNEQUAL, plan=Plan((4, 6, 3, 5)[:n], (3, 2, 1, 2)[:n], ToyBody.LENGTH), inner=ADAM, rounds=3)
        method: Method = replace(geomesh(s, codec=codec, exchange=exchange), cadence=cadence)
        bodies = [Idle(i, ADAM) if i == 3 else ToyBody(i, ADAM) for i in range(n)]
        return Lockstep(method, bodies=bodies).run()

    idle, alone = run(4), run(3)
    assert all(equal(s.x, idle[0].x) for s in idle)
    if exchange == "gather" or codec == "fp32":
        assert equal(idle[0].x, alone[0].x)
    else:  # other slices have other magnitudes
        assert max(float((idle[0].x[k] - v).abs().max()) for k, v in alone[0].x.items()) < 0.2


def test_shard_with_fp32_has_gather_s_bits_in_every_cadence() -> None:
    for cadence in (Cadence(), Cadence(0.5), Cadence(0.5, eager=True), Cadence(0.45, fragments=3)):
        a, b = (Lockstep(replace(geomesh(UNEQUAL, codec="fp32", exchange=e), cadence=cadence)).run() for e in ("gather", "shard"))
        assert equal(a[0].x, b[0].x), cadence


def test_snapshots_are_not_changed_by_what_follows() -> None:
    """A world may copy the state at a boundary and go on from the copy, live views included."""
    run = Lockstep(diloco(replace(UNEQUAL, inner=ADAM), fragments=3, overlap=0.2))
    run.run()
    kept = copy.deepcopy(run.snapshots[2])
    assert all(s.local for s, _ in kept)
    Lockstep(run.method).run(resume=run.snapshots[2])
    assert all(equal(a.local, b.local) for (a, _), (b, _) in zip(kept, run.snapshots[2], strict=True))
