"""The round loop of `peer` where there are no tensors and a round is simple: the same effects in the same order, at a third of the cost.

A simulation of ten thousand workers without tensors spends its time in the programs. Most of what `peer` does there is to find out, level
by level, that there is nothing to encode, to judge or to add up. `paced` yields what is left. It takes only methods that it knows part by
part (`simple`), and a test holds its effects against `peer`'s one by one; everything else is `peer`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from types import TracebackType
from typing import Any

import numpy as np

from gossamer.core.exchange import Gather as GatherExchange
from gossamer.core.members import Roll
from gossamer.core.method import Method
from gossamer.core.outer import Average, Gossip, OuterSGD
from gossamer.worker.effects import (
    Boundary,
    Compute,
    Done,
    Effect,
    Expect,
    Gather,
    Go,
    Note,
    Program,
    Ready,
    Reply,
    Send,
    Span,
    Stop,
    Tag,
    Work,
)
from gossamer.worker.entry import enrol
from gossamer.worker.packet import Header, Packet
from gossamer.worker.peer import peer
from gossamer.worker.seat import Seat
from gossamer.worker.state import State, Stream

_KNOWN = frozenset(
    ("name", "inner", "schedule", "plan", "topology", "outer", "rounds", "exchange", "codec", "feedback", "weights", "guard", "reset_inner")
)
"""Fields of a method that change no effect of such a run, or are looked at in `simple`."""
_OTHERS = tuple(
    (f.name, f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
    for f in dataclasses.fields(Method)
    if f.name not in _KNOWN
)
"""The other fields, also those that a method may have one day, and their defaults: whatever else they say is not simple."""


def simple(method: Method) -> bool:
    """Whether a round of `method` without tensors is steps, one message to each who hears it, one wait, one outer step."""
    return (
        type(method.exchange) is GatherExchange
        and type(method.outer) in (Gossip, OuterSGD, Average)
        and not method.plan.exact
        and all(getattr(method, name) == default for name, default in _OTHERS)
    )


def program(seat: Seat, state: State) -> Program:
    """`peer`, or `paced` where that is the same."""
    fresh = not state.x and state.planned.plan is None and state.streams == [Stream()] and state.roll == Roll()
    return Paced(seat, state) if fresh and simple(seat.method) else peer(seat, state)


class Paced(Generator[Effect, Reply, State]):
    """`paced`, as a program that shows its seat and state: a world that knows what it does need not ask it (gossamer.sim.quick)."""

    __slots__ = ("_run", "seat", "state")

    def __init__(self, seat: Seat, state: State) -> None:
        self.seat, self.state = seat, state
        self._run: Program | None = None

    @property
    def begun(self) -> bool:
        """Whether it has been asked for anything."""
        return self._run is not None

    def send(self, value: Reply) -> Effect:
        """The next effect."""
        if self._run is None:
            self._run = paced(self.seat, self.state)
        return self._run.send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Effect:
        """Raises where it stands."""
        if self._run is None:
            self._run = paced(self.seat, self.state)
        return self._run.throw(typ, val, tb)

    def close(self) -> None:
        """Ends it."""
        if self._run is not None:
            self._run.close()


def paced(seat: Seat, state: State) -> Program:
    """The program of one worker without tensors, from `state` (a round boundary, nothing in flight) to the end of the run."""
    method, me, size = seat.method, seat.me, seat.whole_bytes
    plan, codec = method.plan, method.codec
    steps, batch, per_round = plan.steps[me], plan.batch[me], plan.tokens_per_round
    per_step = per_round / steps
    encode, outer = Span("encode", 4 * seat.elements), Span("outer", 12 * seat.elements)
    decode = [Span("decode", 4 * seat.elements * (1 + heard)) for heard in range(3)]
    while state.round < method.rounds:
        t = state.round
        tag = Tag.of(t, Tag.SAY)
        frm, to = seat.links(t)
        if frm:
            yield Expect(tag, dict.fromkeys(frm, size))
        done: Done = yield Compute(Work(steps, batch, float(state.tokens), per_step))
        yield Ready(to, t)
        step_s = float(np.float32(done.seconds / steps))
        header = Header(seat.run_id, t, me, Tag.SAY, codec.id, codec.version, seat.mark, 0, done.tokens, 0, step_s)
        yield encode
        if to:
            yield Send(seat.others if len(to) == method.n - 1 else to, tag, Packet(header, size, None))
        if frm:
            yield Gather(tag, frm, t)
        yield decode[len(frm)] if len(frm) < 3 else Span("decode", 4 * seat.elements * (1 + len(frm)))
        yield outer
        state.tokens += per_round
        state.round = t + 1
        yield Note(note(seat, state, done.tokens, done.loss_sum))
        go: Go | Stop = yield Boundary(t + 1, state)
        if isinstance(go, Stop):
            break
        if go.absent is not None:  # membership: not simple any more
            yield from enrol(seat, state, go.absent, go.welcome)
            return (yield from peer(seat, state))
    return state


def note(seat: Seat, state: State, tokens: int, loss_sum: float) -> dict[str, Any]:
    """The record of the round that `state` has just completed."""
    return {
        "kind": "round",
        "round": state.round,
        "worker": seat.me,
        "tokens": tokens,
        "tokens_total": state.tokens,
        "steps": seat.method.plan.steps[seat.me],
        "loss": loss_sum / tokens if tokens else None,
        "drift_norm": 0.0,
    }
