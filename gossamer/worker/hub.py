"""A star: how a mean is formed over one worker in the middle (`gossamer.core.exchange.Hub`)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

from gossamer.core.codec import Fp32
from gossamer.core.combine import Piece
from gossamer.core.errors import RunFailed
from gossamer.core.exchange import Hub
from gossamer.core.star import middle
from gossamer.core.tree import Tree
from gossamer.worker.effects import Addr, Effect, Expect, Reply, Send, Span, Tag
from gossamer.worker.mean import Heard, Own, expect, gather, mean_weights, refused_of, verify
from gossamer.worker.packet import HEADER_BYTES, Header, Packet, blank, check, seal
from gossamer.worker.replanning import times_of
from gossamer.worker.seat import Said, Seat
from gossamer.worker.state import Met, Pending

_FULL = Fp32()


class HubPlan:
    """Everybody sends to the hub, which hands on what all have said: their packets, or their headers and the float32 mean. Where the
    hub does not take part, the best-connected of those who do takes its place."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        hub = _hub(seat)
        if seat.me != hub:
            for nbytes in _handed(seat):
                yield Expect(Tag.of(round, Tag.MEAN), {hub: nbytes})
        elif seat.others and not met:
            yield expect(seat, Tag.of(round, Tag.SAY), dict.fromkeys(seat.others))

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        own = {0: seat.pack(tree or None, seat.layout, Tag.SAY, said)}
        yield Span("encode", 4 * seat.elements)
        yield from self.resend(seat, Pending(said.round, own, {}))
        return own

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        hub, met = _hub(seat), pending.met
        if seat.me != hub and not met:
            yield Send((hub,), Tag.of(pending.round, Tag.SAY), pending.own[0])
        if seat.me == hub and met and seat.others:
            for packet in met.handed:
                if to := tuple(j for j in seat.others if j != packet.header.sender):
                    yield Send(to, Tag.of(pending.round, Tag.MEAN), packet)
            if met.mean:
                yield Send(seat.others, Tag.of(pending.round, Tag.MEAN), met.mean)

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        round, mine = pending.round, pending.own[0]
        if seat.me != _hub(seat):
            pending.met = Met(None, {}, (), {})
            return
        packets: dict[Addr, Packet] = yield from gather(seat, Tag.of(round, Tag.SAY), seat.others, ready_round)
        packets[seat.me] = mine
        handed, mean = [packets[j] for j in seat.everybody], None
        if len(_handed(seat)) > len(seat.others):
            mixed = _mixed(seat, round, packets, like)
            yield Span("decode", 4 * seat.elements * len(packets))
            tokens = sum(p.header.tokens for p in handed)
            mean = _full(seat, mixed, Said(round, tokens, mine.header.digest))
            handed = [_bare(p) for p in handed]
            yield Span("encode", 4 * seat.elements)
        pending.met = Met(mean, {}, (), {}, tuple(handed))
        yield from self.resend(seat, pending)

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        round, hub = pending.round, _hub(seat)
        handed: list[Packet] = []
        if seat.me == hub:
            assert pending.met is not None
            handed = [*pending.met.handed, *([pending.met.mean] if pending.met.mean else [])]
        else:
            for _ in _handed(seat):
                heard = yield from gather(seat, Tag.of(round, Tag.MEAN), (hub,), ready_round, {hub: seat.everybody})
                handed.append(heard[hub])
        mean = handed.pop() if len(_handed(seat)) > len(seat.others) else None
        found = {p.header.sender: p for p in handed} | {seat.me: pending.own[0]}
        if missing := [j for j in seat.everybody if j not in found]:
            raise RunFailed(f"worker {hub}, the hub, has handed on no packet of worker(s) {missing} in round {round}")
        packets = {j: found[j] for j in seat.everybody}
        yield Span("decode", 4 * seat.elements * (1 if mean else len(packets)))
        if not like:
            return Heard(None, dict.fromkeys(packets, 1.0), (), times_of(packets))
        mixed: Tree | None
        if mean:
            verify(seat, round, packets)
            check(mean, run_id=seat.run_id, round=round, sender=hub, codec=(_FULL.id, _FULL.version), layout=seat.mark)
            mixed = seat.combine([Piece(seat.layout, 1.0, mean.payload)], _FULL, like)
        else:
            mixed = _mixed(seat, round, packets, like)
        return Heard(mixed, mean_weights(seat, packets), refused_of(packets), times_of(packets))


def _mixed(seat: Seat, round: int, packets: Mapping[Addr, Packet], like: Tree) -> Tree | None:
    if not like:
        return None
    verify(seat, round, packets)
    pieces = [Piece(seat.layout, w, packets[j].payload) for j, w in mean_weights(seat, packets).items()]
    return seat.combine(pieces, seat.method.codec, like)


def _hub(seat: Seat) -> Addr:
    assert isinstance(seat.method.exchange, Hub)
    return middle(seat.method.exchange, seat.method.codec, tuple(seat.everybody))


def _handed(seat: Seat) -> tuple[int, ...]:
    """Sizes of what the hub hands to each; with a mean one more than there are others."""
    assert isinstance(seat.method.exchange, Hub)
    return seat.method.exchange.hands(seat.method.codec, seat.layout, len(seat.everybody), HEADER_BYTES)


def _full(seat: Seat, tree: Tree | None, said: Said) -> Packet:
    """A packet with all of the tree in float32."""
    header = Header(seat.run_id, said.round, seat.me, Tag.MEAN, _FULL.id, _FULL.version, seat.mark, said.digest, said.tokens)
    size = _FULL.nbytes(seat.layout)
    if tree is None:
        return Packet(header, HEADER_BYTES + size, None)
    data = blank(size)
    _FULL.encode(tree, seat.layout, {}, data[HEADER_BYTES:])
    return seal(data, header)


def _bare(packet: Packet) -> Packet:
    """The header alone."""
    return Packet(packet.header, HEADER_BYTES, None) if packet.data is None else seal(blank(0), packet.header)
