"""The one round loop: work, say, hear, mix, step.

    x        anchor, float32                  y = parameters after the H_i inner steps
    D        x - y, the pseudo-gradient       said = what the outer rule makes of D, encoded
    mixed    the weighted mean of what was heard, this worker's own part included as decoded
    x        <- outer step on `mixed`

With overlap the exchange of a round lands inside the next one: local += x_{t+1} - y_t, and the next D is taken from x_{t+1}.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import torch

from gossamer.core.codec import Fp32
from gossamer.core.combine import Piece
from gossamer.core.outer import drift
from gossamer.core.tree import Tree, digest, map_tree, master, zeros_like
from gossamer.worker.effects import (
    Boundary,
    Compute,
    Done,
    Effect,
    Expect,
    Gather,
    Load,
    Note,
    Program,
    Ready,
    Reply,
    Send,
    SiteSum,
    Span,
    Stop,
    Tag,
    Work,
)  # fmt: skip
from gossamer.worker.exchange import Heard, Own, plan_of, ready_targets
from gossamer.worker.packet import HEADER_BYTES, REFUSED, Header, Packet, blank, seal
from gossamer.worker.seat import Said, Seat
from gossamer.worker.state import Pending, State


def start(seat: Seat, x: Tree) -> State:
    """The state before the first round. `x` is float32; an empty tree makes a timing-only run, in which nothing is computed."""
    method = seat.method
    return State(x=x, outer=method.outer.init(x), residual=zeros_like(x) if method.feedback else None)


def peer(seat: Seat, state: State) -> Program:
    """The program of one worker, from `state` (a round boundary) to the end of the run."""
    method, plan = seat.method, plan_of(seat)
    yield from _enter(seat, state)
    while state.round < method.rounds:
        t = state.round
        yield from plan.expects(seat, t)
        own: Own = {}
        if method.outer.before:
            own = yield from _say(seat, state, {}, Said(t, 0, _mark(state)))
        work = yield from _work(seat, state)
        yield Ready(ready_targets(seat, t), t)
        D, refused, norm = yield from _judge(seat, state, work.tree)
        tokens = 0 if refused else work.tokens
        if not method.outer.before:
            own = yield from _say(seat, state, D, Said(t, tokens, _mark(state), REFUSED if refused else 0))
        heard: Heard | None = None
        if method.cadence.overlap:
            state.pending = Pending(t, own, master(state.x if refused else work.tree))
            if refused and state.x:
                yield Load(state.pending.y, reset_inner=True)
        else:
            heard = yield from plan.hear(seat, t, t - 1 if method.outer.before else t, own, state.x)
            yield from _step(seat, state, D, own, heard)
            if state.x and method.outer.says != "gradient":
                yield Load(state.x, reset_inner=refused or method.reset_inner)
        state.round += 1
        state.tokens += method.plan.tokens_per_round
        yield Note(_record(seat, state, work, heard, own, norm, refused))
        if isinstance((yield Boundary(state.round, state)), Stop):
            yield from _drain(seat, state)
            return state
    if state.pending:
        yield from _land(seat, state, state.pending.y)
        yield Note({"kind": "close", "round": state.round, "worker": seat.me})
    return state


class _Worked(NamedTuple):
    """A round's inner steps, and what landed among them."""

    tree: Tree
    tokens: int
    loss_sum: float
    landed: Heard | None


def _enter(seat: Seat, state: State) -> Generator[Effect, Reply, None]:
    """Agrees on the first parameters, and takes up an exchange that was in flight when the run stopped."""
    method = seat.method
    if method.sync_from is not None and state.round == 0 and method.n > 1:
        yield from _sync(seat, state, method.sync_from)
    pending = state.pending
    if pending:
        plan = plan_of(seat)
        yield from plan.expects(seat, pending.round)
        yield from plan.resend(seat, pending.round, pending.own)
    if state.x:
        yield Load(pending.y if pending else state.x)


def _sync(seat: Seat, state: State, source: int) -> Generator[Effect, Reply, None]:
    codec, tag = Fp32(), Tag.of(0, Tag.SYNC)
    size = codec.nbytes(seat.layout)
    if seat.me != source:
        yield Expect(tag, {source: HEADER_BYTES + size})
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
    yield Send(seat.others, tag, packet)


def _work(seat: Seat, state: State) -> Generator[Effect, Reply, _Worked]:
    """H_i inner steps; the exchange in flight lands after a share of them."""
    method, plan = seat.method, seat.method.plan
    steps, batch = plan.steps[seat.me], plan.batch[seat.me]
    per_step = plan.tokens_per_round / steps
    if method.outer.says == "gradient":
        done: Done = yield Compute(Work(1, batch, float(state.tokens), per_step, "grad"))
        return _Worked(done.tree or {}, done.tokens, done.loss_sum, None)
    first = method.cadence.landing_step(steps) if state.pending else 0
    tokens, loss_sum, landed = 0, 0.0, None
    tree: Tree = {}
    if first:
        done = yield Compute(Work(first, batch, float(state.tokens), per_step))
        tokens, loss_sum = done.tokens, done.loss_sum
        tree, landed = yield from _land(seat, state, done.tree or {})
    if steps > first:
        done = yield Compute(Work(steps - first, batch, state.tokens + first * per_step, per_step))
        tokens, loss_sum, tree = tokens + done.tokens, loss_sum + done.loss_sum, done.tree or {}
    return _Worked(tree, tokens, loss_sum, landed)


def _land(seat: Seat, state: State, local: Tree) -> Generator[Effect, Reply, tuple[Tree, Heard]]:
    """The exchange in flight arrives: x <- outer step, local <- local + x_{t+1} - y_t. Returns the new local parameters."""
    pending = state.pending
    assert pending is not None
    heard = yield from plan_of(seat).hear(seat, pending.round, pending.round, pending.own, state.x)
    state.pending = None
    yield from _step(seat, state, {}, pending.own, heard)
    if not state.x:
        return {}, heard
    moved = map_tree(lambda a, x, y: a.to(torch.float32) + (x - y), local, state.x, pending.y)
    local = {k: v.to(local[k].dtype) for k, v in moved.items()}
    yield Load(local, reset_inner=seat.method.reset_inner)
    return local, heard


def _judge(seat: Seat, state: State, y: Tree) -> Generator[Effect, Reply, tuple[Tree, bool, float]]:
    """The worker's pseudo-gradient (its gradient, for ddp), whether the guard refuses it, and its norm."""
    if not y:
        return {}, False, 0.0
    method = seat.method
    D = master(y) if method.outer.says == "gradient" else drift(state.x, y)
    squares = torch.stack([torch.linalg.vector_norm(d, dtype=torch.float64) ** 2 for d in D.values()]).sum()
    norm = float((yield SiteSum(squares)).sqrt())
    yield Span("encode", 0)
    if not method.guard.refuses(norm, state.norms):
        state.norms = method.guard.remember(norm, state.norms)
        return D, False, norm
    for d in D.values():
        d.zero_()
    return D, True, norm


def _mark(state: State) -> int:
    return digest(state.x, *state.outer.values()) if state.x else 0


def _say(seat: Seat, state: State, D: Tree, header: Said) -> Generator[Effect, Reply, Own]:
    """What the outer rule makes of D, encoded (with error feedback, if the method has it) and sent."""
    method, codec = seat.method, seat.method.codec
    if not state.x:
        return (yield from plan_of(seat).say(seat, {}, header))
    tree = method.outer.emit(state.x, D, state.outer)
    feeds = method.feedback is not None and state.residual is not None and not header.flags & REFUSED
    if method.feedback and state.residual is not None and feeds:
        tree = method.feedback.absorb(state.residual, tree)
    stats = codec.stats(tree, seat.layout)
    for name in stats:
        stats[name] = yield SiteSum(stats[name])
    own = yield from plan_of(seat).say(seat, tree, header._replace(stats=stats))
    if feeds:
        for piece in _own_pieces(seat, own, -1.0):
            codec.accumulate(piece.payload, piece.layout, tree, piece.weight)
    return own


def _step(seat: Seat, state: State, D: Tree, own: Own, heard: Heard) -> Generator[Effect, Reply, None]:
    """The outer step: all of it or nothing of it."""
    outer = seat.method.outer
    if heard.mixed is not None and heard.accepted:
        if outer.says == "gradient":
            work = Work(1, 0, float(state.tokens), float(seat.method.plan.tokens_per_round), "apply", heard.mixed)
            done: Done = yield Compute(work)
            assert done.tree is not None
            for k, v in state.x.items():
                v.copy_(done.tree[k])
        else:
            said = seat.combine(_own_pieces(seat, own), seat.method.codec, state.x) if outer.needs_said else {}
            state.x, state.outer = outer.step(state.x, D, said, heard.mixed, state.outer)
    yield Span("outer", 12 * seat.elements)


def _drain(seat: Seat, state: State) -> Generator[Effect, Reply, None]:
    """Takes in what is still on its way at a clean stop, and lets it go: the peers will send it again on resume."""
    if state.pending:
        for expect in plan_of(seat).expects(seat, state.pending.round):
            if expect.tag == Tag.of(state.pending.round, Tag.SAY):
                yield Gather(expect.tag, tuple(expect.sizes), state.pending.round)


def _own_pieces(seat: Seat, own: Own, weight: float = 1.0) -> list[Piece]:
    layouts = seat.slices if seat.method.exchange.everybody else (seat.layout,)
    return [Piece(layouts[k], weight, packet.payload) for k, packet in own.items()]


def _record(seat: Seat, state: State, work: _Worked, heard: Heard | None, own: Own, norm: float, refused: bool) -> dict[str, Any]:
    heard = heard or work.landed
    record: dict[str, Any] = {
        "kind": "round",
        "round": state.round,
        "worker": seat.me,
        "tokens": work.tokens,
        "tokens_total": state.tokens,
        "loss": work.loss_sum / work.tokens if work.tokens else None,
        "drift_norm": norm,
    }
    if zeros := sum(packet.zeros for packet in own.values()):
        record["exact_zeros"] = zeros / seat.elements
    if heard and state.x:
        record["weights"] = {str(j): w for j, w in heard.weights.items() if w}
        # With overlap this round's own refusal is in what lands next.
        mine = [seat.me] if refused and not seat.method.cadence.overlap else []
        record["refused"] = sorted({*heard.refused, *mine})
    return record
