"""A state at a boundary, made fit to go on with other workers than before, and one that was taken from another worker.

In a synchronous method an exchange in flight is of those who were there when it was said. With others it cannot land alike on all, so it is
let go, on all: the anchor stays, the worker keeps the parameters that it had gone on from, and what it had said is part of what it says
next, tokens included. In gossip an exchange in flight takes place where both of its sides still have it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gossamer.core.tree import Tree, master, zeros_like
from gossamer.worker.effects import Addr
from gossamer.worker.seat import Seat
from gossamer.worker.state import State, Stream


def regroup(seat: Seat, state: State, members: Collection[Addr], holders: Collection[Addr]) -> None:
    """From the round that `state` is in on, `members` take part.

    Args:
        holders: those of them who hold a state of their own at this boundary. The others have taken one of these.
    """
    n = seat.method.n
    absent = frozenset(range(n)).difference(members)
    changed = absent != state.roll.absent(state.round) or len(holders) < len(members)
    state.roll.enter(state.round, absent)
    if not changed:
        return
    if seat.method.synchronous:
        _let_go(seat, state)
    else:
        state.roll.unheard = (state.round, frozenset(range(n)).difference(holders))


def _let_go(seat: Seat, state: State) -> None:
    eager = seat.method.cadence.eager
    local: Tree = {}
    for part, stream in zip(replace(seat, roll=state.roll).fragments, state.streams, strict=True):
        pending, stream.pending = stream.pending, None
        if pending is None or eager:
            local |= part.part_of(state.local or state.x)
            continue
        stream.tokens += next(iter(pending.own.values())).header.tokens
        local |= part.part_of(state.local) if state.local else pending.y
    if local and (state.local or any(local[name] is not state.x[name] for name in local)):
        state.local = master(local)


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
