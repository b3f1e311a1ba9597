"""The one round loop: work, say, hear, mix, step.

    x        anchor, float32                  y = parameters after the H_i inner steps
    D        x - y, the pseudo-gradient       said = what the outer rule makes of D, encoded
    mixed    the weighted mean of what was heard, this worker's own part included as decoded
    x        <- outer step on `mixed`

When each of this happens to which part of the model is the method's cadence; what happens then is in gossamer.worker.stream.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Literal

from gossamer.core.codec import Fp32
from gossamer.core.tree import Tree, zeros_like
from gossamer.worker.effects import (
    Boundary,
    Compute,
    Done,
    Effect,
    Expect,
    Gather,
    Go,
    Load,
    Note,
    Program,
    Reply,
    Send,
    Stop,
    Tag,
    Work,
)
from gossamer.worker.entry import enrol
from gossamer.worker.exchange import plan_of
from gossamer.worker.packet import HEADER_BYTES, Header, Packet, blank, seal
from gossamer.worker.replanning import plan_at
from gossamer.worker.seat import Said, Seat
from gossamer.worker.state import State, Stream
from gossamer.worker.stream import held, land, launch, mark, meet, say
from gossamer.worker.tally import Tally


def start(seat: Seat, x: Tree) -> State:
    """The state before the first round. `x` is float32; an empty tree makes a timing-only run, in which nothing is computed.

    Raises:
        BadInput: more fragments than tensors.
    """
    method, feedback = seat.method, seat.method.feedback
    state = State(x=x, outer=method.outer.init(x), streams=[Stream() for _ in seat.fragments])
    if method.pair and x:
        state.memory = method.pair.start(seat.layout)
    if feedback and feedback.at_worker:
        state.residual = zeros_like(x)
    if feedback and feedback.at_mean:
        state.mean_residual = {}
        _fit_feedback(seat, state)
    return state


def _fit_feedback(seat: Seat, state: State) -> None:
    """Error feedback of the mean is of the worker's own slice, which is another one when others take part: it begins anew then."""
    kept = state.mean_residual
    if kept is None:
        return
    mine = {piece.name: piece.size for part in seat.fragments for piece in part.slices[seat.me]} if state.x else {}
    if {name: v.numel() for name, v in kept.items()} != mine:
        state.mean_residual = {name: state.x[name].new_zeros(size) for name, size in mine.items()}


def peer(seat: Seat, state: State) -> Program:
    """The program of one worker, from `state` (a round boundary) to the end of the run."""
    method, seat = seat.method, replace(seat, roll=state.roll)
    if method.synchronous and (absent := state.roll.absent(state.round)):
        seat = replace(seat, present=tuple(j for j in range(method.n) if j not in absent))
    _fit_feedback(seat, state)
    yield from _enter(seat, state)
    while state.round < method.rounds:
        tally = Tally()
        for part in seat.fragments:
            yield from plan_of(part).expects(part, state.round)
        if method.outer.before:
            marked = yield from mark(seat, state)
            tally.early = yield from say(seat, state, {}, Said(state.round, 0, marked))
        yield from _happen(seat, state, tally)
        state.tokens += plan_at(seat, state).tokens_per_round
        state.round += 1
        yield from tally.sketch(seat, state)
        yield Note(tally.record(seat, state))
        state.local = tally.local if len(seat.fragments) > 1 else {}
        go: Go | Stop = yield Boundary(state.round, state)
        if isinstance(go, Stop) and not go.over:
            yield from _drain(seat, state)
            return state
        state.local = {}
        if isinstance(go, Stop):
            break
        if go.absent is not None:
            yield from enrol(seat, state, go.absent, go.welcome)
    if any(stream.pending for stream in state.streams):
        yield from _happen(seat, state, Tally(), over=True)
        yield Note({"kind": "close", "round": state.round, "worker": seat.me})
    return state


def _happen(seat: Seat, state: State, tally: Tally, over: bool = False) -> Generator[Effect, Reply, None]:
    """The events of a round, with the inner steps before each; `over`: after the last round, what is still in flight."""
    method = seat.method
    steps = 0 if over else plan_at(seat, state).steps[seat.me]
    for event in method.cadence.timeline(method.exchange.meets):
        part, pending = seat.fragments[event.fragment], state.streams[event.fragment].pending
        if event.kind == "launch" and not over:
            yield from _work(seat, state, tally, event.step(steps))
            yield from launch(seat, state, tally, part)
        elif event.kind != "launch" and pending:
            yield from _work(seat, state, tally, event.step(steps))
            if event.kind == "meet":
                yield from meet(part, state, pending, pending.round)
            else:
                yield from land(seat, state, tally, part)


def _work(seat: Seat, state: State, tally: Tally, until: int) -> Generator[Effect, Reply, None]:
    """Inner steps, so that `until` of the round's H_i are done."""
    plan, done_steps = plan_at(seat, state), tally.clocked.steps
    steps = until - done_steps
    if steps <= 0:
        return
    per_step = plan.tokens_per_round / plan.steps[seat.me]
    kind: Literal["grad", "steps"] = "grad" if seat.method.outer.says == "gradient" else "steps"
    done: Done = yield Compute(Work(steps, plan.batch[seat.me], state.tokens + done_steps * per_step, per_step, kind))
    tally.clocked = tally.clocked.add(steps, done)
    tally.tokens += done.tokens
    tally.loss_sum += done.loss_sum
    tally.local = dict(done.tree or {})
    for stream in state.streams:
        stream.tokens += done.tokens


def _enter(seat: Seat, state: State) -> Generator[Effect, Reply, None]:
    """Agrees on the first parameters, and takes up the exchanges that were in flight when the run stopped."""
    method = seat.method
    if method.sync_from is not None and state.round == 0 and seat.others:
        yield from _sync(seat, state, method.sync_from if method.sync_from in seat.everybody else seat.everybody[0])
    for part, stream in zip(seat.fragments, state.streams, strict=True):
        if stream.pending:
            yield from plan_of(part).expects(part, stream.pending.round, stream.pending.met is not None)
            yield from plan_of(part).resend(part, stream.pending)
    if state.x:
        yield Load(state.local or held(seat, state))
        state.local = {}


def _sync(seat: Seat, state: State, source: int) -> Generator[Effect, Reply, None]:
    codec, tag = Fp32(), Tag.of(0, Tag.SYNC)
    size = codec.nbytes(seat.layout)
    if seat.me != source:
        content = seat.content(format=codec)
        yield Expect(tag, {source: HEADER_BYTES + size}, {source: content} if content else None)
        packet: Packet = (yield Gather(tag, (source,), 0))[source]
        if not state.x:
            return
        for v in state.x.values():
            v.fill_(-0.0)  # the one number that nothing is changed by adding to, the sign of a zero included
        codec.accumulate(packet.payload, seat.layout, state.x, 1.0)
        state.outer = seat.method.outer.init(state.x)
        return
    header = Header(seat.run_id, 0, seat.me, Tag.SYNC, codec.id, codec.version, seat.mark, 0, 0)
    packet = Packet(header, HEADER_BYTES + size, None)
    if state.x:
        data = blank(size)
        codec.encode(state.x, seat.layout, {}, data[HEADER_BYTES:])
        packet = seal(data, header)
    yield Send(seat.others, tag, packet, seat.content(format=codec))


def _drain(seat: Seat, state: State) -> Generator[Effect, Reply, None]:
    """Takes in what is still on its way at a clean stop, and lets it go: the peers will send it again on resume."""
    for part, stream in zip(seat.fragments, state.streams, strict=True):
        if pending := stream.pending:
            met = pending.met is not None
            tag = Tag.of(pending.round, Tag.MEAN if met else Tag.SAY)
            for expect in plan_of(part).expects(part, pending.round, met):
                if expect.tag == tag:
                    yield Gather(tag, tuple(expect.sizes), pending.round, fragment=part.fragment)
