"""Compressed gossip in whole runs: close to float32, mean kept, repairs heard at both ends, the same bits after a stop, refusals."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lockstep import Lockstep
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.cadence import Cadence
from gossamer.core.codec import Int8
from gossamer.core.codec.modulo import Modulo
from gossamer.core.errors import BadInput
from gossamer.core.feedback import Feedback
from gossamer.core.method import Method
from gossamer.core.outer import OuterSGD
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.core.topology import OnePeerExp
from gossamer.core.tree import Tree
from gossamer.recipes import Setting, dadam, diloco, gasloc, local_dadam
from gossamer.worker import exchange
from gossamer.worker.packet import HEADER_BYTES
from gossamer.worker.seat import Seat

N = 4
SETTING = Setting(Plan((3,) * N, (2,) * N, ToyBody.LENGTH), rounds=8, seed=3, schedule=Constant())
UNEQUAL = replace(SETTING, plan=Plan((1, 2, 3, 5), (3, 2, 1, 2), ToyBody.LENGTH))
METHODS: dict[str, Method] = {
    **{f"mod{bits}": gasloc(SETTING, codec=f"mod{bits}") for bits in (8, 4, 2, 1)},  # type: ignore[arg-type]
    "mod4_local": gasloc(UNEQUAL, codec="mod4", momentum="local", outer_momentum=0.3),
    "mod4_mixed": gasloc(UNEQUAL, codec="mod4", momentum="mixed", topology="ring"),
    "mod2_overlap": replace(gasloc(UNEQUAL, codec="mod2"), cadence=Cadence(0.4)),
    "mod4_fragments": replace(gasloc(UNEQUAL, codec="mod4"), cadence=Cadence(0.45, fragments=3)),
    "mod8_dadam": dadam(SETTING, codec="mod8"),
    "mod4_local_dadam": local_dadam(UNEQUAL, codec="mod4"),
    "signs": gasloc(UNEQUAL, codec="signs", topology="one_peer"),
    "signs_overlap": replace(gasloc(UNEQUAL, codec="signs", slices=7), cadence=Cadence(0.4)),  # type: ignore[call-arg]
}


def distance(a: Tree, b: Tree) -> float:
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def mean(trees: list[Tree]) -> Tree:
    return {k: torch.stack([t[k].double() for t in trees]).mean(0) for k in trees[0]}


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[tuple[int, Tree, Tree]]]:
    """By round and fragment: (worker, z, mixed) of every mixing."""
    found: dict[tuple[int, int], list[tuple[int, Tree, Tree]]] = {}
    original = exchange.mix

    def spy(part: Any, pair: Any, pending: Any, packets: Any, weights: Any, ready: int, z: Tree) -> Generator[Any, Any, Any]:
        before = {k: v.clone() for k, v in z.items()}
        meeting, full = yield from original(part, pair, pending, packets, weights, ready, z)
        after = {k: v.clone() for k, v in meeting.mixed.items()}
        found.setdefault((pending.round, part.fragment), []).append((part.me, before, after))
        return meeting, full

    monkeypatch.setattr(exchange, "mix", spy)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_mean_over_workers_is_kept(name: str, mixed: dict[tuple[int, int], list[tuple[int, Tree, Tree]]]) -> None:
    run = Lockstep(METHODS[name])
    states = run.run()
    assert mixed
    changed = False
    for seen in mixed.values():
        assert sorted(i for i, _, _ in seen) == list(range(N))
        before, after = mean([z for _, z, _ in seen]), mean([m for _, _, m in seen])
        assert distance(before, after) < 5e-7
        changed |= any(distance(z, m) > 1e-6 for _, z, m in seen)
    assert changed, "nothing was mixed"
    assert all(not state.said for state in states)


@pytest.mark.parametrize("name, near", [("mod8", 0.01), ("mod4", 0.15)])
def test_many_bits_are_close_to_float32(name: str, near: float) -> None:
    want = [s.x for s in Lockstep(gasloc(SETTING)).run()]
    got = [s.x for s in Lockstep(METHODS[name]).run()]
    moved = distance(mean(want), {k: v.double() for k, v in toy_start().items()})
    assert 0 < distance(mean(got), mean(want)) < near * moved


@pytest.mark.parametrize("name", METHODS)
def test_declared_bytes_are_the_bytes_sent_and_repairs_are_counted(name: str) -> None:
    """Beyond the declared packets nothing travels but what was noted as said in full, with a header a peer."""
    method = METHODS[name]
    run = Lockstep(method)
    run.run()
    parts = Seat(0, method, toy_layout()).fragments
    elements = sum(part.elements for part in parts)
    for i in range(N):
        declared = sum(len(method.topology.at(t).out(i)) * sum(part.whole_bytes for part in parts) for t in range(method.rounds))
        noted = sum(round(4 * note["sent_in_full"] * elements) for note in run.notes if note["worker"] == i and "sent_in_full" in note)
        beyond = run.sent[i] - declared - noted
        assert beyond >= 0
        assert beyond % HEADER_BYTES == 0 or method.cadence.overlap  # the last landing has no note
        assert (beyond > 0) == (noted > 0) or method.cadence.overlap


def test_what_no_range_was_known_for_goes_in_full() -> None:
    """dadam speaks before its first step: nothing was known of differences when there were first some, in round 1."""
    run = Lockstep(METHODS["mod8_dadam"])
    run.run()
    notes = [n for n in run.notes if n["kind"] == "round"]
    first = [n.get("sent_in_full", 0.0) for n in notes if n["round"] == 2]
    assert all(share > 0.5 for share in first)
    later = [n.get("sent_in_full", 0.0) for n in notes if n["round"] > 6]
    assert sum(later) / len(later) < 0.2


@pytest.mark.parametrize("name", METHODS)
def test_resume_at_any_round_is_the_uninterrupted_run(name: str) -> None:
    method = METHODS[name]
    whole = Lockstep(method)
    want = whole.run()
    for t in (1, 2, 5):
        got = Lockstep(method).run(resume=whole.snapshots[t])
        assert all(torch.equal(a.x[k], b.x[k]) for a, b in zip(got, want, strict=True) for k in b.x)


def test_signs_count_by_tokens() -> None:
    """The mean over workers moves by the token-weighted mean of their drifts."""
    method = replace(gasloc(UNEQUAL, codec="signs", topology="complete", outer_lr=1.0, outer_momentum=0.0), rounds=1)
    states = Lockstep(method).run()
    bodies = [ToyBody(i, method.inner) for i in range(N)]
    plan, x = method.plan, toy_start()
    want = {k: v.double().clone() for k, v in x.items()}
    for i, body in enumerate(bodies):
        for _ in range(plan.steps[i]):
            body.gradient(plan.batch[i])
            body.take()
        share = plan.steps[i] * plan.batch[i] / sum(h * b for h, b in zip(plan.steps, plan.batch, strict=True))
        for k, p in body.params.items():
            want[k] -= share * (x[k] - p.data).double()
    assert distance(mean([s.x for s in states]), want) < 1e-6


def test_compositions_that_cannot_work_are_refused() -> None:
    base = gasloc(SETTING, codec="mod4")
    for change, words in (
        ({"topology": OnePeerExp(N)}, "both ends"),
        ({"codec": Int8()}, "fp32"),
        ({"feedback": Feedback()}, "feedback"),
        ({"outer": OuterSGD()}, "drift"),
    ):
        with pytest.raises(BadInput, match=words):
            replace(base, **change)
    with pytest.raises(BadInput, match="drift"):
        replace(diloco(SETTING), pair=Modulo(4))
    with pytest.raises(BadInput, match="before the inner steps"):
        replace(dadam(SETTING), pair=gasloc(SETTING, codec="signs").pair)
    with pytest.raises(BadInput, match="slices"):
        gasloc(SETTING, codec="mod4", slices=8)
    with pytest.raises(BadInput, match="pair codec"):
        replace(gasloc(SETTING), codec=Int8())
