"""A state at a boundary, made fit to go on with other workers than before, and one that was taken from another worker.

In a synchronous method an exchange in flight is of those who were there when it was said. With others it cannot land alike on all, so it is
let go, on all: the anchor stays, and all goes on as if it had never been said. The worker keeps the parameters that it had gone on from, so
that what it had said is part of what it says next, tokens included; its error feedback is taken back to before, where that was not in it
yet. In gossip an exchange in flight takes place where both of its sides still have it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from gossamer.core.outer import drift
from gossamer.core.tree import Tree, master, zeros_like
from gossamer.worker.effects import Addr
from gossamer.worker.packet import REFUSED
from gossamer.worker.replanning import scaled
from gossamer.worker.seat import Seat
from gossamer.worker.state import Pending, State, Stream
from gossamer.worker.stream import own_pieces


def regroup(seat: Seat, state: State, members: Collection[Addr], holders: Collection[Addr]) -> None:
    """From the round that `state` is in on, `members` take part.

    Args:
        holders: those of them who hold a state of their own at this boundary. The others have taken one of these.
    """
    n = seat.method.n
    absent, before = frozenset(range(n)).difference(members), state.roll.absent(state.round)
    changed = absent != before or len(holders) < len(members)
    if changed and seat.method.synchronous:
        _let_go(replace(seat, roll=state.roll, present=tuple(j for j in range(n) if j not in before)), state)
    state.roll.enter(state.round, absent)
    if changed and not seat.method.synchronous:
        state.roll.unheard = (state.round, frozenset(range(n)).difference(holders))


def _let_go(seat: Seat, state: State) -> None:
    """`seat`: among those with whom it was said."""
    local: Tree = {}
    for part, stream in zip(seat.fragments, state.streams, strict=True):
        pending, stream.pending = stream.pending, None
        if pending is None:
            local |= part.part_of(state.local or state.x)
            continue
        header = next(iter(pending.own.values())).header
        stream.tokens += header.tokens
        y = part.part_of(state.local) if state.local else pending.y
        if y and not header.flags & REFUSED:
            y = _unsaid(part, state, pending, y)
        local |= y
        if pending.met is not None and state.mean_residual is not None:
            state.mean_residual = {}  # of a mean that nobody steps on
    if local and (state.local or any(local[name] is not state.x[name] for name in local)):
        state.local = master(local)


def _unsaid(part: Seat, state: State, pending: Pending, y: Tree) -> Tree:
    """Takes back what was said. With D what was to be said, e the residual then and d what was said, decoded, the residual is now
    decay * e + D - d, and D is in the worker's parameters still: e is (residual + d - D) / decay. Not so with eager updates: there the
    worker has gone on from a step on D, which is taken back too, and D is not known any more; so d alone becomes part of its parameters,
    and the residual keeps the rest.

    Returns:
        The worker's parameters, which were `y`.
    """
    method, x = part.method, part.part_of(state.x)
    pieces = own_pieces(part, pending.own)
    if method.cadence.eager:
        said = part.combine(pieces, method.codec, x)
        share = next(iter(scaled(part, state, {"": x[next(iter(x))].new_ones(1)}, 0, pending.round).values())).item()
        return {name: (v.to(x[name].dtype) + (x[name] - pending.y[name])).sub_(said[name], alpha=1 / share) for name, v in y.items()}
    if state.residual is not None and method.feedback is not None:
        residual = part.part_of(state.residual)
        outer = {key: part.part_of(tree) for key, tree in state.outer.items()}
        D = method.outer.emit(x, scaled(part, state, drift(x, _narrow(pending.y)), 0, pending.round), outer)
        for piece in pieces:
            method.codec.accumulate(piece.payload, piece.layout, residual, 1.0)
        for name, e in residual.items():
            e.sub_(D[name]).div_(method.feedback.decay)
    return y


def _narrow(y: Tree) -> Tree:
    """Parameters of a bfloat16 model in that type, which a pending exchange has in float32."""
    found: Tree = {}
    for name, v in y.items():
        narrow = v.to(torch.bfloat16)
        found[name] = narrow if torch.equal(narrow.to(v.dtype), v) else v
    return found


def taken(state: State, mine: State | None, y: Tree, tokens: int) -> None:
    """`state` is another worker's: it becomes this one's. Anchor and outer state stay; what belongs to a worker alone does not.

    Args:
        mine: the state that this worker had before, if any: its error feedback goes on.
        y: parameters that it had come to from the anchor of that state; its drift is said with the next one. Empty: it is let go.
        tokens: consumed on the way to y.
    """
    state.streams = [Stream(list(stream.norms)) for stream in state.streams]
    state.local, state.said, state.others = {}, {}, {}
    if state.residual is not None:
        kept = mine.residual if mine is not None else None
        state.residual = master(kept) if kept is not None else zeros_like(state.x)
    if state.mean_residual is not None:
        state.mean_residual = {}
    if y and mine is not None:
        state.local = {name: x + (y[name].to(x.dtype) - mine.x[name]) for name, x in state.x.items()}
        for stream in state.streams:
            stream.tokens = tokens
