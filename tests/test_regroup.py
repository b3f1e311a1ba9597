"""Synchronous methods whose members change at a boundary: nothing that was said counts twice, and nothing of it is lost."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cadences import UNEQUAL, N
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import Lockstep
from toy import toy_layout

from gossamer.core.cadence import Cadence
from gossamer.core.codec import Int8, Sign, TopK
from gossamer.core.feedback import Feedback
from gossamer.core.method import Method
from gossamer.core.outer import drift
from gossamer.core.tree import Tree, digest, zeros_like
from gossamer.recipes import geomesh
from gossamer.worker.regroup import regroup, taken
from gossamer.worker.replanning import scaled
from gossamer.worker.seat import Seat
from gossamer.worker.state import State
from gossamer.worker.stream import held, own_pieces

CADENCES = {"overlap": Cadence(0.3), "eager": Cadence(0.6, eager=True), "streaming": Cadence(0.45, fragments=3)}
CODECS = {"sign": Sign(), "topk": TopK(0.2), "int8": Int8()}


@cache
def method(exchange: str, cadence: str, codec: str, decay: float | None, correction: str = "none") -> Method:
    base = geomesh(UNEQUAL, exchange=exchange, correction=correction)
    feedback = None if decay is None else Feedback(decay, "both" if exchange == "shard" else "worker")
    return replace(base, cadence=CADENCES[cadence], codec=CODECS[codec], feedback=feedback)


@cache
def stretch(m: Method) -> dict[int, list[Any]]:
    world = Lockstep(m)
    world.run()
    return world.snapshots


def seat_of(m: Method, i: int) -> Seat:
    return Seat(i, m, toy_layout(), run_id=7)


def local_of(seat: Seat, state: State) -> Tree:
    return state.local or held(seat, state)


def owed(seat: Seat, state: State) -> tuple[Tree, Tree]:
    """What a worker has to say and has not: as drift since it was last said, plus the residual; and what it has said and nobody heard."""
    local, residual = local_of(seat, state), state.residual or zeros_like(state.x)
    own, flight = zeros_like(state.x), zeros_like(state.x)
    for part, stream in zip(seat.fragments, state.streams, strict=True):
        start = stream.pending.y if stream.pending else part.part_of(state.x)
        D = scaled(part, state, drift(start, part.part_of(local)), 0)
        own |= {name: d + residual[name] for name, d in D.items()}
        if stream.pending:
            flight |= part.combine(own_pieces(part, stream.pending.own), seat.method.codec, part.part_of(state.x))
    return own, flight


@settings(max_examples=40, deadline=None)
@given(
    exchange=st.sampled_from(["gather", "shard"]), cadence=st.sampled_from(sorted(CADENCES)), codec=st.sampled_from(sorted(CODECS)),
    decay=st.sampled_from([1.0, 0.9]), correction=st.sampled_from(["none", "work"]), round=st.integers(1, 3), i=st.integers(0, 2),
)  # fmt: skip
def test_what_was_said_and_let_go_is_owed_once(
    exchange: str, cadence: str, codec: str, decay: float, correction: str, round: int, i: int
) -> None:
    m = method(exchange, cadence, codec, decay, correction)
    state: State = copy.deepcopy(stretch(m)[round][i][0])
    seat = seat_of(m, i)
    tokens = [s.tokens + (next(iter(s.pending.own.values())).header.tokens if s.pending else 0) for s in state.streams]
    assert any(s.pending for s in state.streams)
    own, flight = owed(seat, state)
    if decay != 1.0 and not m.cadence.eager:  # e was decayed as it was said: that is taken back
        for part, stream in zip(seat.fragments, state.streams, strict=True):
            if stream.pending:
                D = scaled(part, state, drift(part.part_of(state.x), stream.pending.y), 0)
                for name, d in D.items():
                    e = state.residual[name]
                    own[name] += (1 / decay - 1) * (e + flight[name] - d)
    regroup(seat, state, [0, 1, 2], [0, 1, 2])
    after, none = owed(seat, state)
    for name, want in own.items():
        assert not none[name].any()
        torch.testing.assert_close(after[name], want + flight[name], rtol=1e-4, atol=2e-6)
    assert [s.tokens for s in state.streams] == tokens
    if exchange == "shard":
        assert state.mean_residual is not None


@pytest.mark.parametrize("cadence", sorted(CADENCES))
@pytest.mark.parametrize("exchange", ["gather", "shard"])
def test_without_feedback_all_of_it_is_said_again(exchange: str, cadence: str) -> None:
    m = method(exchange, cadence, "int8", None)
    state: State = copy.deepcopy(stretch(m)[2][1][0])
    seat = seat_of(m, 1)
    x, local = copy.deepcopy(state.x), copy.deepcopy(local_of(seat, state))
    flight = owed(seat, state)[1]
    regroup(seat, state, [0, 1], [0, 1])
    assert digest(state.x) == digest(x), "the anchor stays"
    if not m.cadence.eager:
        assert digest(local_of(seat, state)) == digest(local), "the worker goes on where it was"
    else:
        assert all((x[name] - v - flight[name]).abs().max() < 1e-6 for name, v in local_of(seat, state).items())


@pytest.mark.parametrize("cadence", sorted(CADENCES))
@pytest.mark.parametrize("exchange", ["gather", "shard"])
def test_a_run_goes_on_alike_on_all_whoever_goes_or_comes_with_exchanges_in_flight(exchange: str, cadence: str) -> None:
    """From four workers to three to four. A worker whose anchor or outer state is another one is refused by the others."""
    m = method(exchange, cadence, "int8", 1.0)
    three: list[Any] = copy.deepcopy(stretch(m)[2])
    for i in (0, 1, 3):
        regroup(seat_of(m, i), three[i][0], [0, 1, 3], [0, 1, 3])
    world = Lockstep(m)
    world.run(stop=3, resume=three, members=[0, 1, 3])
    back: list[Any] = world.snapshots[3]
    assert len({digest(back[i][0].x, *back[i][0].outer.values()) for i in (0, 1, 3)}) == 1
    assert any(s.pending for s in back[0][0].streams)
    donor = copy.deepcopy(back[0][0])
    taken(donor, three[2][0], {}, 0)
    back[2] = (donor, three[2][1])
    for i in range(N):
        regroup(seat_of(m, i), back[i][0], range(N), [0, 1, 3])
    final = Lockstep(m).run(resume=back)
    assert len({digest(state.x, *state.outer.values()) for state in final}) == 1
    assert final[0].round == m.rounds and digest(final[0].x) != digest(back[0][0].x)
