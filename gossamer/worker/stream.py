"""What happens to one fragment in a round: it is launched, its exchange meets, it lands (gossamer.core.cadence).

A *part* below is the seat of one fragment: its layout names the tensors that are meant. Where the model is not cut, it is the worker's
own seat. Anchor, outer state, residuals and local parameters are whole trees, of which each fragment changes its own tensors.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from gossamer.core import ranges
from gossamer.core.codec import write
from gossamer.core.combine import Piece
from gossamer.core.outer import STEP, OuterState, drift
from gossamer.core.tree import Layout, Tree, digest, map_tree, master, rounded, squares
from gossamer.worker.effects import Compute, Done, Effect, Load, Ready, Reply, SiteSum, Span, Work
from gossamer.worker.exchange import Heard, Own, plan_of, ready_targets
from gossamer.worker.packet import HEADER_BYTES, REFUSED, blank
from gossamer.worker.pairs import learn
from gossamer.worker.pairs import write as write_pair
from gossamer.worker.ranks import summed, whole_sum
from gossamer.worker.replanning import outer_step_of, plan_at, replan, scaled
from gossamer.worker.seat import Said, Seat, Written
from gossamer.worker.state import Pending, State
from gossamer.worker.tally import Tally, sketched


def launch(seat: Seat, state: State, tally: Tally, part: Seat) -> Generator[Effect, Reply, None]:
    """Says what has become of the fragment since it was last said. Without overlap it lands at once."""
    method, t, stream = seat.method, state.round, state.streams[part.fragment]
    yield Ready(ready_targets(part, t), t, part.fragment)
    y = part.part_of(tally.local)
    D, refused, norm = yield from _judge(part, state, y)
    tokens, stream.tokens = 0 if refused else stream.tokens, 0
    tally.judged(norm, refused)
    if D and not method.synchronous and method.n > 1:
        tally.drift = yield from sketched(part, D)
    own = tally.early
    if not method.outer.before:
        marked = yield from mark(part, state)
        said = Said(t, tokens, marked, REFUSED if refused else 0, step_s=tally.clocked.step_s)
        own = yield from say(part, state, D, said)
    tally.zeros += sum(packet.zeros for packet in own.values())
    pending = Pending(t, own, {})
    if method.cadence.overlap:
        x = part.part_of(state.x)
        pending.y = master(x) if refused else _preview(part, state, D, y) if method.cadence.eager and x else master(y)
        stream.pending = pending
        if refused and x:
            yield from _start_over(seat, state, tally)
        elif method.cadence.eager and x:
            tally.put(pending.y)
            yield Load(pending.y)
        return
    yield from meet(part, state, pending, t - 1 if method.outer.before else t)
    yield from _take(seat, state, tally, part, pending, t - 1 if method.outer.before else t, D)
    if not state.x or method.outer.says == "gradient":
        return
    if refused:
        yield from _start_over(seat, state, tally)
    else:
        x = part.part_of(state.x)
        tally.put(x)
        yield Load(x, reset_inner=method.reset_inner)


def meet(part: Seat, state: State, pending: Pending, ready_round: int) -> Generator[Effect, Reply, None]:
    """The first phase of an exchange that has two."""
    yield from plan_of(part).meet(part, pending, ready_round, part.part_of(state.x), state.mean_residual)


def land(seat: Seat, state: State, tally: Tally, part: Seat) -> Generator[Effect, Reply, None]:
    """The exchange in flight arrives: x <- outer step, local <- local + x_{t+1} - y_t. Nothing was done since launch, where the tally
    has no local parameters (after the last round): local <- x."""
    stream = state.streams[part.fragment]
    pending, stream.pending = stream.pending, None
    assert pending is not None
    yield from _take(seat, state, tally, part, pending, pending.round, {})
    if not state.x:
        return
    moved = x = part.part_of(state.x)
    if tally.local:
        local = part.part_of(tally.local)
        moved = map_tree(lambda a, b, y: (a.to(torch.float32) + (b - y)).to(a.dtype), local, x, pending.y)
        tally.put(moved)
    yield Load(moved, reset_inner=seat.method.reset_inner)


def say(part: Seat, state: State, D: Tree, header: Said) -> Generator[Effect, Reply, Own]:
    """What the outer rule makes of D, encoded (with error feedback, if the method has it) and sent."""
    method, codec = part.method, part.method.codec
    if not state.x:
        return (yield from plan_of(part).say(part, {}, header))
    tree = method.outer.emit(part.part_of(state.x), scaled(part, state, D, header.tokens), _outer_of(part, state))
    if method.pair:
        return (
            yield from plan_of(part).say(part, tree, header._replace(written=[write_pair(part, state, method.pair, tree, header.round)]))
        )
    residual = None if state.residual is None or header.flags & REFUSED else part.part_of(state.residual)
    blanks = [(layout, blank(codec.nbytes(layout))) for layout in _layouts(part).values()]
    pieces = [(layout, data[HEADER_BYTES:]) for layout, data in blanks]
    zeros = yield from summed(write(codec, tree, part.layout, pieces, None if residual is None else method.feedback, residual))
    written = [Written(layout, data, lost) for (layout, data), lost in zip(blanks, zeros, strict=True)]
    return (yield from plan_of(part).say(part, tree, header._replace(written=written)))


def mark(part: Seat, state: State) -> Generator[Effect, Reply, int]:
    """What must be equal on all workers of a synchronous method when they say the fragment: anchor, outer state and plan."""
    if not state.x:
        return 0
    x, outer = part.part_of(state.x), _outer_of(part, state)
    if part.ranges is None:
        return digest(x, *outer.values()) ^ state.planned.mark
    mine = ranges.mark(part.layout, [x, *(tree for name, tree in outer.items() if name != STEP)], outer.get(STEP))
    return (yield from whole_sum(mine)) ^ state.planned.mark


def held(seat: Seat, state: State) -> Tree:
    """What a worker that forgets its inner steps goes on from: the anchor, or what is to be replaced on landing."""
    held: Tree = {}
    for part, stream in zip(seat.fragments, state.streams, strict=True):
        held |= stream.pending.y if stream.pending else part.part_of(state.x)
    return held


def _outer_of(part: Seat, state: State) -> OuterState:
    return {key: part.part_of(tree) for key, tree in state.outer.items()}


def _start_over(seat: Seat, state: State, tally: Tally) -> Generator[Effect, Reply, None]:
    """After a refusal: all fragments, since what is not finite is soon everywhere, with a fresh inner optimizer."""
    tree = held(seat, state)
    for stream in state.streams:
        stream.tokens = 0
    tally.put(tree)
    yield Load(tree, reset_inner=True)


def _judge(part: Seat, state: State, y: Tree) -> Generator[Effect, Reply, tuple[Tree, bool, float]]:
    """The worker's pseudo-gradient (its gradient, for ddp), whether it is refused, by the guard or since it took no token, and its norm."""
    if not y:
        return {}, False, 0.0
    method, stream = part.method, state.streams[part.fragment]
    D = master(y) if method.outer.says == "gradient" else drift(part.part_of(state.x), y)
    norm = float((yield SiteSum(squares(list(D.values())))).sqrt())
    yield Span("encode", 0)
    if stream.tokens and not method.guard.refuses(norm, stream.norms):
        stream.norms = method.guard.remember(norm, stream.norms)
        return D, False, norm
    for d in D.values():
        d.zero_()
    return D, True, norm


def _take(
    seat: Seat, state: State, tally: Tally, part: Seat, pending: Pending, ready_round: int, D: Tree
) -> Generator[Effect, Reply, None]:
    """Hears and steps. With the last fragment of a round, all its step times are known, and the work may be planned anew."""
    like = part.part_of(state.said if seat.method.pair else state.x)
    heard = yield from plan_of(part).hear(part, pending, ready_round, like)
    tally.heard.append(heard)
    yield from _step(part, state, D, pending, heard)
    learn(state, heard.memory)
    state.said = {name: z for name, z in state.said.items() if name not in like}
    if part.fragment == len(seat.fragments) - 1:
        yield from replan(seat, state, heard.step_s)


def _step(part: Seat, state: State, D: Tree, pending: Pending, heard: Heard) -> Generator[Effect, Reply, None]:
    """The outer step: all of it or nothing of it."""
    method = part.method
    if heard.mixed is not None and heard.accepted:
        if method.outer.says == "gradient":
            work = Work(1, 0, float(state.tokens), float(plan_at(part, state).tokens_per_round), "apply", heard.mixed)
            done: Done = yield Compute(work)
            assert done.tree is not None
            for k, v in state.x.items():
                v.copy_(done.tree[k])
        else:
            x = part.part_of(state.x)
            said: Tree = {}
            if method.outer.needs_said:
                said = part.part_of(state.said) if method.pair else part.combine(own_pieces(part, pending.own), method.codec, x)
            x, s = outer_step_of(part, state, pending.round, x, _outer_of(part, state), D, said, heard.mixed)
            state.x |= x
            for key, tree in s.items():
                state.outer[key] |= tree
            if method.cadence.eager:
                state.others |= _without(part, heard.mixed, pending.own, heard.weights[part.me])
    yield Span("outer", 12 * part.elements)


def _preview(part: Seat, state: State, D: Tree, y: Tree) -> Tree:
    """The outer step as far as it is known at launch (arXiv 2502.12996, "eager updates"): on w_i D_t^i + sum_{j != i} w_j D_{t-1}^j, with
    the others' part as last heard; before anything was heard, on D_t^i alone. Anchor and outer state stay as they are."""
    plan, method = plan_at(part, state), part.method
    there = part.everybody
    everything = plan.tokens_per_round if len(there) == method.n else sum(plan.tokens(j) for j in there)
    w = plan.tokens(part.me) / everything if method.weights == "tokens" else 1.0 / len(there)
    others = {name: state.others[name] for name in D if name in state.others}
    mixed = map_tree(lambda d, o: d * w + o, D, others) if others else D
    s = {key: master(tree) for key, tree in _outer_of(part, state).items()}
    x, _ = outer_step_of(part, state, state.round, master(part.part_of(state.x)), s, {}, {}, mixed)
    return rounded(x, y)


def _without(part: Seat, mixed: Tree, own: Own, weight: float) -> Tree:
    """The others' part of a mean: what is left without weight * this worker's own part as decoded."""
    rest = {name: v.clone() for name, v in mixed.items()}
    for piece in own_pieces(part, own, -weight):
        part.method.codec.accumulate(piece.payload, piece.layout, rest, piece.weight)
    return rest


def _layouts(part: Seat) -> dict[int, Layout]:
    """What the packets that a worker says carry, by slice."""
    return {j: part.slices[j] for j in part.everybody} if part.method.exchange.everybody else {0: part.layout}


def own_pieces(part: Seat, own: Own, weight: float = 1.0) -> list[Piece]:
    """What a worker has said, times `weight`."""
    layouts = _layouts(part)
    return [Piece(layouts[k], weight, packet.payload) for k, packet in own.items()]
