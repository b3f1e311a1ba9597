"""Workers that leave and come back: the roll is kept up at boundaries, and who returns takes the state of a peer that is there.

A returning worker begins a round with everybody else. What it takes from its sponsor, the first to come to the boundary before that round:
anchor and outer state, in float32. Its inner optimizer starts afresh, and its data go on where they were.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from gossamer.core.codec import Fp32
from gossamer.core.outer import STEP
from gossamer.core.tree import Layout, Tree, master
from gossamer.worker.effects import Addr, Effect, Expect, Gather, Load, Note, Program, Reply, Send, Span, Tag
from gossamer.worker.packet import HEADER_BYTES, Header, Packet, blank, seal
from gossamer.worker.replanning import plan_at
from gossamer.worker.seat import Seat
from gossamer.worker.state import State


def enrol(seat: Seat, state: State, absent: frozenset[Addr], welcome: Sequence[Addr]) -> Generator[Effect, Reply, None]:
    """What a boundary says of the membership from the round that begins on. The lowest of those who stay notes it for all."""
    before = state.roll.absent(state.round)
    if absent != before:
        state.roll.enter(state.round, absent)
        stayed = [i for i in seat.everybody if i not in before and i not in absent]
        if seat.me == min(stayed, default=-1):
            yield Note({"kind": "members", "round": state.round, "worker": seat.me, "absent": sorted(absent)})
    for j in welcome:
        for layout, tree in _handed(seat, state):
            yield Send((j,), Tag.of(state.round, Tag.SYNC), _packed(seat, state.round, tree, layout))
            yield Span("encode", 4 * seat.elements)


def returning(seat: Seat, state: State, sponsor: Addr) -> Generator[Effect, Reply, None]:
    """Takes over the sponsor's anchor and outer state. `state` is a fresh one (`gossamer.worker.peer.start`) whose round and roll are those
    of the boundary; it is filled in."""
    tag = Tag.of(state.round, Tag.SYNC)
    state.tokens = sum(plan_at(seat, state, t).tokens_per_round for t in range(state.round))
    trees = _handed(seat, state)
    for layout, _ in trees:
        yield Expect(tag, {sponsor: HEADER_BYTES + Fp32().nbytes(layout)})
    for layout, tree in trees:
        packet: Packet = (yield Gather(tag, (sponsor,), state.round))[sponsor]
        yield Span("decode", 4 * seat.elements)
        if tree:
            for v in tree.values():
                v.fill_(-0.0)  # the one number that nothing is changed by adding to
            Fp32().accumulate(packet.payload, layout, tree, 1.0)
    if state.x:
        yield Load(master(state.x), reset_inner=True)


def back(seat: Seat, state: State, sponsor: Addr, then: Program) -> Program:
    """The program of a worker that comes back: `returning`, then what it does on `state`."""
    yield from returning(seat, state, sponsor)
    return (yield from then)


def _handed(seat: Seat, state: State) -> list[tuple[Layout, Tree]]:
    """Anchor and outer state, each with its layout."""
    counts = tuple(replace(part, numel=1, lo=0, hi=1, row=1) for part in seat.layout)
    return [(seat.layout, state.x), *((counts if name == STEP else seat.layout, tree) for name, tree in state.outer.items())]


def _packed(seat: Seat, round: int, tree: Tree, layout: Layout) -> Packet:
    codec = Fp32()
    header = Header(seat.run_id, round, seat.me, Tag.SYNC, codec.id, codec.version, seat.mark, 0, 0)
    size = codec.nbytes(layout)
    if not tree:
        return Packet(header, HEADER_BYTES + size, None)
    data = blank(size)
    codec.encode(tree, layout, {}, data[HEADER_BYTES:])
    return seal(data, header)
