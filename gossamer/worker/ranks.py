"""The program of one rank, among the ranks of all workers.

`peer` speaks of workers, and of a tree that is its rank's shard. `among_ranks` hands its effects on with seats in their place, cut to size:

    Send      to worker j: to each rank of j what both hold of the payload, cut out part by part
    Expect    from worker j: from each rank of j what both hold
    Gather    puts the pieces of each worker together again, in the order of this rank's layout
    Ready     to all ranks of a worker
    Boundary  whoever the world says is absent, as workers: a worker is there with all of its ranks or not at all
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from gossamer.core.codec.base import Format
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.exchange import Hub, Ring
from gossamer.core.method import Method
from gossamer.core.tree import Layout
from gossamer.worker.effects import Addr, Boundary, Content, Effect, Expect, Gather, Go, Program, Ready, Reply, Send, SiteSum, Span
from gossamer.worker.packet import HEADER_BYTES, Packet, blank, seal
from gossamer.worker.seat import Seat

_LIMB = 16


def check_ranks(method: Method) -> None:
    """Refuses what does not go with workers of several ranks.

    Raises:
        BadInput: naming what to use in its place.
    """
    for faulty, what in (
        (method.tiers is not None, f"{method.name}, which has servers: use a method without (diloco, geomesh, gasloc)"),
        (method.pair is not None, "a pair codec, whose repairs are between whole workers: use codec fp32"),
        (isinstance(method.exchange, Ring), "exchange ring: use shard or gather"),
        (isinstance(method.exchange, Hub), "exchange hub: use shard or gather"),
        (method.feedback is not None and method.feedback.at_mean, "error feedback at the mean: use feedback at the worker, or none"),
    ):
        if faulty:
            raise BadInput(f"workers of several ranks (sites with ranks above 1) do not go with {what}")


def whole_sum(mine: int) -> Generator[Effect, Reply, int]:
    """The sum of a 64-bit number over the ranks of the worker, modulo 2^64."""
    limbs = [float(mine >> _LIMB * k & (1 << _LIMB) - 1) for k in range(4)]
    total: Tensor = yield SiteSum(torch.tensor(limbs, dtype=torch.float64))
    return sum(int(limb) << _LIMB * k for k, limb in enumerate(total.tolist())) % 2**64


def summed(writing: Generator[Tensor, Tensor, list[int]]) -> Generator[Effect, Reply, list[int]]:
    """What `writing` (gossamer.core.codec.write) returns; what it yields is summed over the ranks of the worker."""
    try:
        value = next(writing)
        while True:
            yield Span("encode", 0)
            value = writing.send((yield SiteSum(value)))
    except StopIteration as end:
        found: list[int] = end.value
        return found


def among_ranks(seat: Seat, program: Program) -> Program:
    """`program` of `seat` with seats in place of workers; itself where every worker is one rank."""
    return program if seat.ranges is None else _spread(_Router(seat), program)


def _spread(router: _Router, program: Program) -> Program:
    reply: Reply = None
    try:
        while True:
            try:
                effect = program.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(effect, Send):
                reply = None
                yield from router.send(effect)
            elif isinstance(effect, Expect):
                reply = yield router.expect(effect)
            elif isinstance(effect, Gather):
                reply = yield from router.gather(effect)
            elif isinstance(effect, Ready):
                reply = yield effect._replace(to=router.seats(effect.to))
            elif isinstance(effect, Boundary):
                reply = router.members((yield effect))
            else:
                reply = yield effect
    finally:
        program.close()


class _Router:
    """Who holds what in common with one rank."""

    def __init__(self, seat: Seat) -> None:
        assert seat.ranges is not None
        self._seat, self._ranges = seat, seat.ranges
        self._lone = seat.ranges.ranks[seat.me] == 1
        self._due: dict[tuple[int, Addr], deque[Content]] = defaultdict(deque)
        self._known: dict[tuple[int, Addr], tuple[Layout, dict[Addr, tuple[int, ...]]]] = {}

    def seats(self, workers: Sequence[Addr]) -> tuple[Addr, ...]:
        """All seats of these workers."""
        return tuple(seat for j in workers for seat in self._ranges.seats(j))

    def members(self, reply: Reply) -> Reply:
        """The reply to a boundary, in workers."""
        if not isinstance(reply, Go):
            return reply
        of = self._ranges.workers
        absent = None if reply.absent is None else frozenset(of[seat] for seat in reply.absent)
        return Go(absent, tuple(sorted({of[seat] for seat in reply.welcome})))

    def expect(self, effect: Expect) -> Expect:
        """The pieces to come."""
        sizes: dict[Addr, int] = {}
        for j in effect.sizes:
            content = _known((effect.contents or {}).get(j), effect)
            self._due[effect.tag, j].append(content)
            nbytes = _nbytes(content)
            sizes |= {s: HEADER_BYTES + sum(nbytes[k] for k in places) for s, places in self._pieces(content, j).items()}
        return Expect(effect.tag, sizes)

    def send(self, effect: Send) -> Generator[Effect, Reply, None]:
        """The packet in pieces; those who hear the same get the same."""
        content = _known(effect.content, effect)
        to: dict[tuple[int, ...], list[Addr]] = defaultdict(list)
        for j in effect.to:
            for other, places in self._pieces(content, j).items():
                to[places].append(other)
        for places, seats in to.items():
            yield Send(tuple(seats), effect.tag, _cut(effect.packet, content, places))

    def gather(self, effect: Gather) -> Generator[Effect, Reply, dict[Addr, Packet]]:
        """One wait for all pieces of all, put together."""
        contents = {j: self._due[effect.tag, j].popleft() for j in effect.frm}
        pieces = {j: self._pieces(content, j) for j, content in contents.items()}
        seats = tuple(s for j in effect.frm for s in pieces[j])
        carries = None
        if effect.carries is not None:
            carries = {s: self.seats(effect.carries[j]) for j in effect.frm for s in pieces[j]}
        got: Mapping[Addr, Packet] = yield effect._replace(frm=seats, carries=carries)
        there = [all(s in got for s in pieces[j]) for j in effect.frm]
        if not self._lone and not self._seat.method.synchronous:
            votes: Tensor = yield SiteSum(torch.tensor(there, dtype=torch.float64))
            there = [vote == self._ranges.ranks[self._seat.me] for vote in votes.tolist()]
        return {j: _joined(contents[j], pieces[j], got) for j, heard in zip(effect.frm, there, strict=True) if heard}

    def _pieces(self, content: Content, j: Addr) -> dict[Addr, tuple[int, ...]]:
        """Seat of worker j -> which parts of `content` travel between it and this one, in either direction. Where a rank holds nothing,
        there is still one packet, without payload: it has to know what the header says."""
        key = (id(content.layout), j)
        if key not in self._known:
            self._known[key] = content.layout, self._find(content, j)  # the layout is kept, so that its id stays its own
        return self._known[key][1]

    def _find(self, content: Content, j: Addr) -> dict[Addr, tuple[int, ...]]:
        ranges, me, rank = self._ranges, self._seat.me, self._seat.rank
        mine, theirs = ranges.ranks[me], ranges.ranks[j]
        found: dict[Addr, tuple[int, ...]] = {}
        for r, other in enumerate(ranges.seats(j)):
            places = ranges.common(content.layout, j, r)
            idle = rank == r % mine and not ranges.common(content.whole, j, r)
            if places or idle or (r == rank % theirs and not any(part.size for part in content.layout)):
                found[other] = places
        return found


def _known(content: Content | None, effect: Effect) -> Content:
    if content is None:
        raise RunFailed(f"{type(effect).__name__} does not say what its packets hold, which workers of several ranks need to know")
    return content


def _nbytes(content: Content) -> list[int]:
    """Bytes of each part."""
    found = [content.format.nbytes((part,)) for part in content.layout]
    if sum(found) != content.format.nbytes(content.layout):
        raise BadInput(f"{_name(content.format)} does not write part by part, as workers of several ranks need it: use another codec")
    return found


def _name(format: Format) -> str:
    return f"codec {type(format).__name__.lower()}"


def _cut(packet: Packet, content: Content, places: tuple[int, ...]) -> Packet:
    """A packet with some parts of another one."""
    assert packet.data is not None
    sizes = _nbytes(content)
    size = sum(sizes[k] for k in places)
    if size == packet.nbytes - HEADER_BYTES:
        return packet
    data, at = blank(size), HEADER_BYTES
    for payload in _split(packet.payload, sizes, places):
        data[at : at + payload.numel()] = payload
        at += payload.numel()
    return seal(data, packet.header)


def _split(payload: Tensor, sizes: Sequence[int], places: Sequence[int]) -> list[Tensor]:
    pieces = torch.split(payload, list(sizes)) if sizes else ()
    return [pieces[k] for k in places]


def _joined(content: Content, pieces: Mapping[Addr, tuple[int, ...]], got: Mapping[Addr, Packet]) -> Packet:
    """The packet that a worker would have sent to this rank alone."""
    packets = [got[s] for s in pieces]
    header = packets[0].header
    if any(packet.header != header for packet in packets):
        raise RunFailed(
            f"the ranks of worker {header.sender} disagree on its packet of round {header.round}: they must run one release on one kind of "
            "device; resume from the last checkpoint"
        )
    if len(packets) == 1:
        return packets[0]
    sizes = _nbytes(content)
    data = blank(sum(sizes))
    into = torch.split(data[HEADER_BYTES:], sizes)
    for s, places in pieces.items():
        parts = torch.split(got[s].payload, [sizes[k] for k in places]) if places else ()
        for k, part in zip(places, parts, strict=True):
            into[k].copy_(part)
    return Packet(header, sum(packet.nbytes for packet in packets), data)
