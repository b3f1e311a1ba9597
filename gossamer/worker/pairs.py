"""How a worker says and mixes parameters by a pair codec (gossamer.core.codec.pair).

What both packets of a pair cannot tell, both ends know to be missing, block for block. So both know the size of what is then said in full,
and post their receives for it: a second message, in rounds and between peers where there is something to repair, and none elsewhere. Such a
round waits for the peers' peers, whose packets a peer hears before it repairs. Timing-only runs repair nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from gossamer.core.codec.pair import Meeting, PairCodec, Wrong
from gossamer.core.tree import Tree, map_tree
from gossamer.worker.effects import Addr, Effect, Expect, Gather, Reply, Send, Span, Tag
from gossamer.worker.packet import HEADER_BYTES, Packet, blank, seal
from gossamer.worker.seat import Seat, Written
from gossamer.worker.state import Pending, State


def write(part: Seat, state: State, pair: PairCodec, z: Tree, round: int) -> Written:
    """Encodes z, and keeps it until it is mixed."""
    data = blank(pair.nbytes(part.layout))
    drift = {} if part.method.outer.before else map_tree(torch.sub, part.part_of(state.x), z)
    zeros = pair.encode(z, drift, part.layout, part.part_of(state.memory), round, data[HEADER_BYTES:])
    state.said = state.said | z
    return Written(part.layout, data, zeros)


def learn(state: State, learnt: Mapping[str, Tensor]) -> None:
    """Takes what a meeting has learnt into the memory of the pair codec."""
    for name, rows in learnt.items():
        state.memory[name][: len(rows)] = rows


def mix(
    part: Seat,
    pair: PairCodec,
    pending: Pending,
    packets: Mapping[Addr, Packet],
    weights: Mapping[Addr, float],
    ready_round: int,
    z: Tree,
) -> Generator[Effect, Reply, tuple[Meeting, int]]:
    """Mixes z with what was heard. Returns the meeting, and how many numbers had to be said in full."""
    meeting = pair.meet(z, pending.own[0].payload, part.layout, pending.round)
    wrong: dict[Addr, Wrong] = {}
    for j, weight in weights.items():
        if j != part.me and (found := meeting.hear(packets[j].payload, weight)):
            wrong[j] = found
    yield Span("decode", 4 * part.elements * len(packets))
    if not wrong:
        return meeting, 0
    header, tag = pending.own[0].header._replace(kind=Tag.MEAN), Tag.of(pending.round, Tag.MEAN)
    full: dict[Addr, Packet] = {}
    for j, blocks in wrong.items():
        said = meeting.full(blocks)
        data = blank(said.numel())
        data[HEADER_BYTES:] = said
        full[j] = seal(data, header)
    yield Expect(tag, {j: packet.nbytes for j, packet in full.items()})
    for j, packet in full.items():
        yield Send((j,), tag, packet)
    said_bytes = sum(packet.nbytes - HEADER_BYTES for packet in full.values())
    heard: Mapping[Addr, Packet] = yield Gather(tag, tuple(full), ready_round, fragment=part.fragment)
    for j in sorted(heard):
        part.check(heard[j], pending.round, j)
        meeting.hear_full(heard[j].payload, wrong[j], weights[j])
    yield Span("decode", said_bytes)
    return meeting, said_bytes // 4
