"""Cadences: the model in fragments, exchanges that travel under inner steps, and the same bits in every world."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from cadences import METHODS, UNEQUAL, N
from lockstep import Lockstep
from sim_toys import Links, Times
from test_net_bits import same, trained
from test_sim_bits import simulated
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.cadence import Cadence
from gossamer.core.errors import BadInput
from gossamer.core.fragment import fragments
from gossamer.core.inner import SGD, AdamW
from gossamer.core.plan import uniform
from gossamer.core.tree import Tree, layout_of, numel
from gossamer.recipes import Setting, diloco, geomesh, local_dadam, streaming_diloco
from gossamer.sim.driver import Simulation
from gossamer.train import checkpoint
from gossamer.worker import stream
from gossamer.worker.packet import HEADER_BYTES
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat

ADAM = AdamW(lr=0.01)
ADAM_UNEQUAL = replace(UNEQUAL, inner=ADAM)


def test_fragments_are_whole_tensors_in_order_and_of_nearly_equal_size() -> None:
    layout = layout_of({str(i): torch.zeros(size) for i, size in enumerate((90, 3, 50, 40, 1, 1, 60, 8, 30))})
    for count in range(1, len(layout) + 1):
        pieces = fragments(layout, count)
        assert tuple(part for piece in pieces for part in piece) == layout and all(pieces) and len(pieces) == count
        assert max(map(numel, pieces)) <= numel(layout) / count + 90
    for count in (0, 10):
        with pytest.raises(BadInput, match=rf"{count} fragments of a model of 9 tensors"):
            fragments(layout, count)


@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.45, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_timeline_keeps_its_order_for_any_number_of_steps(count: int, overlap: float) -> None:
    for meets in (False, True):
        events = Cadence(overlap, count).timeline(meets)
        kinds = ["launch"] + ["meet"] * meets * (overlap > 0) + ["land"] * (overlap > 0)
        assert Counter((e.kind, e.fragment) for e in events) == Counter((k, p) for k in kinds for p in range(count))
        assert all(0 < e.share <= 1 for e in events)
        for steps in (1, 2, 5, 30, 1001):
            at = [e.step(steps) for e in events]
            assert at == sorted(at) and at[0] >= 1 and at[-1] <= steps
            assert {e.fragment: e.step(steps) for e in events if e.kind == "launch"}[count - 1] == steps
        # From launch to landing it is the same share of a round for all, and what is said first is heard first.
        for p in range(count):
            at_p = {e.kind: e.share for e in events if e.fragment == p}
            for kind, lag in (("meet", Fraction(str(overlap)) / 2), ("land", Fraction(str(overlap)))):
                assert kind not in at_p or (at_p[kind] - at_p["launch"] - lag) in (0, -1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cadence(0.0, eager=True), "without overlap"),
        (lambda: Cadence(0.0, fragments=0), "fragments is 0"),
        (lambda: diloco(UNEQUAL, eager=True), "without overlap"),
        (lambda: replace(local_dadam(UNEQUAL), cadence=Cadence(fragments=2)), "middle of a round"),
        (lambda: geomesh(UNEQUAL, error_feedback="mean"), "use exchange shard"),
        (lambda: start(Seat(0, diloco(UNEQUAL, fragments=5), toy_layout()), toy_start()), "5 fragments of a model of 4 tensors"),
    ],
)
def test_what_cannot_be_is_refused(build: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build()


def test_one_fragment_that_lands_at_once_is_diloco() -> None:
    a = Lockstep(streaming_diloco(ADAM_UNEQUAL, fragments=1, overlap=0.0)).run()
    b = Lockstep(diloco(ADAM_UNEQUAL)).run()
    assert same(a, b) and not torch.equal(a[0].x["hidden"], toy_start()["hidden"])


@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_every_parameter_is_said_once_a_round_and_the_bytes_are_diloco_s(overlap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int, str]] = []
    original = stream.say

    def spy(part: Seat, state: Any, D: Tree, header: Any) -> Any:
        said.extend((part.me, state.round, p.name) for p in part.layout)
        return original(part, state, D, header)

    monkeypatch.setattr(stream, "say", spy)
    run = Lockstep(streaming_diloco(ADAM_UNEQUAL, fragments=4, overlap=overlap, exchange="gather"))
    run.run()
    names = list(toy_start())
    assert sorted(said) == sorted((i, t, name) for i in range(N) for t in range(4) for name in names)
    whole = Lockstep(diloco(ADAM_UNEQUAL, exchange="gather"))
    whole.run()
    assert [a - b for a, b in zip(run.sent, whole.sent, strict=True)] == [4 * 3 * 3 * HEADER_BYTES] * N


def reference(s: Setting, lr: float, momentum: float, cadence: Cadence) -> Tree:
    """DiLoCo with token weights in any cadence, in plain torch, float64 anchors, straight from the definitions."""
    pieces = [[p.name for p in piece] for piece in fragments(toy_layout(), cadence.fragments)]
    count, lag = len(pieces), cadence.overlap
    bodies = [ToyBody(i, s.inner) for i in range(s.n)]
    weights = [s.plan.tokens(i) / s.plan.tokens_per_round for i in range(s.n)]
    x = {k: v.double() for k, v in toy_start().items()}
    b = {k: torch.zeros_like(v) for k, v in x.items()}
    heard: list[dict[str, torch.Tensor]] = [{} for _ in bodies]  # the others' part, as each of them last heard it
    flying: dict[int, Any] = {}
    fresh = {p: [0] * s.n for p in range(count)}  # sequences that each has worked since the fragment was last said
    moments = [((p + 1) / count, 0, p) for p in range(count)]
    moments += [(((p + 1) / count + lag) % 1 or 1.0, 1, p) for p in range(count)] if lag else []

    def nesterov(names: list[str], D: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        new_b = {k: momentum * b[k] + D[k] for k in names}
        return {k: (x[k] - lr * (D[k] + momentum * new_b[k]), new_b[k]) for k in names}

    def land(p: int) -> None:
        Ds, ys, worked = flying.pop(p)
        shares = [w / sum(worked) for w in worked]
        mean = {k: sum(w * D[k] for w, D in zip(shares, Ds, strict=True)) for k in pieces[p]}
        for k, (new_x, new_b) in nesterov(pieces[p], mean).items():
            x[k], b[k] = new_x, new_b
            for i, body in enumerate(bodies):
                heard[i][k] = mean[k] - shares[i] * Ds[i][k]
                body.params[k].data += (x[k] - ys[i][k]).float()

    for _ in range(s.rounds):
        taken = [0] * s.n
        for share, what, p in sorted(moments):
            if what and p not in flying:
                continue
            for i, body in enumerate(bodies):
                while taken[i] < max(1, round(share * s.plan.steps[i])):
                    body.gradient(s.plan.batch[i])
                    body.take()
                    taken[i] += 1
                    for worked in fresh.values():
                        worked[i] += s.plan.batch[i]
            if what:
                land(p)
                continue
            ys = [{k: body.params[k].data.double() for k in pieces[p]} for body in bodies]
            Ds = [{k: x[k] - y[k] for k in pieces[p]} for y in ys]
            if cadence.eager:
                for i, body in enumerate(bodies):
                    mixed = {k: weights[i] * D + heard[i][k] if k in heard[i] else D for k, D in Ds[i].items()}
                    ys[i] = {k: v for k, (v, _) in nesterov(pieces[p], mixed).items()}
                    for k, v in ys[i].items():
                        body.params[k].data.copy_(v)
            flying[p] = (Ds, ys, fresh[p])
            fresh[p] = [0] * s.n
            if not lag:
                land(p)
    for p in list(flying):
        land(p)
    return {k: v.float() for k, v in x.items()}


@pytest.mark.parametrize(
    "cadence",
    [
        Cadence(0.4),
        Cadence(0.4, eager=True),
        Cadence(0.0, fragments=2),
        Cadence(0.2, fragments=3),
        Cadence(0.75, fragments=4),
        Cadence(0.3, fragments=2, eager=True),
    ],
    ids=str,
)
def test_every_cadence_is_its_definition(cadence: Cadence) -> None:
    plain = SGD(lr=0.05, momentum=0.0, weight_decay=0.0, clip=None)
    s = replace(UNEQUAL, inner=plain, rounds=5)
    got = Lockstep(replace(diloco(s, outer_lr=0.7, outer_momentum=0.6, weights="tokens"), cadence=cadence)).run()
    want = reference(s, 0.7, 0.6, cadence)
    for state in got:
        for k, v in want.items():
            torch.testing.assert_close(state.x[k], v, rtol=2e-5, atol=2e-6)
        assert not torch.allclose(state.x["hidden"], toy_start()["hidden"])
    assert not any(stream.pending for state in got for stream in state.streams)


@pytest.mark.parametrize("name", METHODS)
def test_all_worlds_end_with_the_same_bits_and_bytes(name: str) -> None:
    method = METHODS[name]
    plain = Lockstep(method)
    want = plain.run()
    assert all(torch.equal(want[0].x[k], s.x[k]) for s in want for k in s.x)
    clocked = simulated(method, [ToyBody(i, method.inner) for i in range(N)])
    assert same([s for s in clocked.final if s], want)
    assert [account.bytes_sent for account in clocked.accounts] == plain.sent
    assert simulated(method, None).accounts == clocked.accounts, "a timing-only run has the same clock"
    real = trained(method)
    assert same([state for state, _, _ in real], want)
    assert [account.bytes_sent for _, account, _ in real] == plain.sent


@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumed_from_any_checkpoint_is_the_uninterrupted_one(name: str, tmp_path) -> None:
    method = METHODS[name]
    whole = Lockstep(method)
    want = whole.run()
    for stop in range(1, method.rounds + 1):
        resumed = []
        for i, (state, body) in enumerate(whole.snapshots[stop]):
            sha = checkpoint.write_part(tmp_path / str(i), stop, i, state, {})
            checkpoint.close(tmp_path / str(i), stop, 0, {i: sha})
            resumed.append((checkpoint.read_part(tmp_path / str(i), stop, i).state, body))
        got = Lockstep(method).run(resume=resumed)
        assert same(got, want), stop
        for a, b in zip(got, want, strict=True):
            assert all(torch.equal(a.outer[k][name], v) for k, tree in b.outer.items() for name, v in tree.items())
    if name in ("shard_streaming", "eager_streaming"):
        assert any(s.pending and s.pending.met for s in whole.snapshots[2][0][0].streams)


@pytest.mark.parametrize("name", ["shard_streaming", "gather_eager_streaming"])
def test_a_real_run_stopped_between_two_phases_goes_on(name: str) -> None:
    method = replace(METHODS[name], rounds=8)
    want = Lockstep(method).run()
    first = trained(method, ask_at=2)
    assert 2 < first[0][0].round < 8
    assert same([state for state, _, _ in trained(method, resume=[kept for _, _, kept in first])], want)


@pytest.mark.parametrize("exchange", ["gather", "shard"])
@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_a_poisoned_worker_is_refused_by_all_and_comes_back(exchange: Any, overlap: float) -> None:
    s = Setting(uniform(N, 6, 2, ToyBody.LENGTH), rounds=5, inner=ADAM, schedule=UNEQUAL.schedule)
    method = streaming_diloco(s, fragments=2, overlap=overlap, exchange=exchange)
    run = Lockstep(method, bodies=[ToyBody(i, ADAM, poison_at=7 if i == 2 else None) for i in range(N)])
    states = run.run()
    assert all(torch.isfinite(v).all() for s in states for v in s.x.values()) and same(states, [states[0]] * N)
    refused = {n["round"]: n["refused"] for n in run.notes if n["kind"] == "round" and n["worker"] == 0}
    assert sum(r == [2] for r in refused.values()) == 1 and refused[5] == [], "refused once, and heard again"
    own = {n["round"]: n["loss"] for n in run.notes if n["kind"] == "round" and n["worker"] == 2}
    assert own[5] == own[5], "its losses are numbers again"


def test_fragments_spread_the_bytes_over_the_round() -> None:
    """The largest burst of a worker is a fragment, and nobody waits but for what lands after the last round, both phases of it."""

    def burst(method: Any) -> tuple[int, list[float]]:
        links = Links(lambda src, dst, nbytes: 0.01)
        seats = [Seat(i, method, toy_layout()) for i in range(N)]
        programs = [peer(seat, start(seat, {})) for seat in seats]
        result = Simulation(programs, None, links, Times(1.0, 0.5, 0.3, 1.0 / 7), None, sequence=ToyBody.LENGTH).run()
        by_moment: Counter[tuple[float, int]] = Counter()
        for now_s, src, _, nbytes in links.launched:
            by_moment[now_s, src] += nbytes
        return max(by_moment.values()), [a.seconds["network_idle"] for a in result.accounts]

    s = replace(UNEQUAL, plan=replace(UNEQUAL.plan, steps=(12, 24, 40, 84)))
    whole, idle_s = burst(diloco(s, weights="tokens", exchange="gather"))
    assert idle_s == pytest.approx([0.01 * s.rounds] * N)
    sizes = [numel(piece) for piece in fragments(toy_layout(), 3)]
    for exchange, phases in (("gather", 1), ("shard", 2)):
        largest, hidden_s = burst(diloco(s, weights="tokens", exchange=exchange, fragments=3, overlap=0.2))
        assert largest <= whole * (max(sizes) / sum(sizes)) + 6 * HEADER_BYTES
        assert hidden_s == pytest.approx([0.01 * phases] * N, rel=1e-4)
        _, hidden_s = burst(diloco(s, weights="tokens", exchange=exchange, overlap=0.2))
        assert hidden_s == pytest.approx([0.01 * phases] * N, rel=1e-4)
