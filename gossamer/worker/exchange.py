"""How a weighted mean is formed out of sends and gathers: one message plan per exchange of gossamer.core.exchange.

Each plan has four parts: `expects` (what will come, so that receives are posted before the compute), `say` (right after the inner steps,
or before them), `meet` (the second phase of those that have one) and `hear`, at once or a good part of a round later. Between them a
worker may go on computing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np

from gossamer.core import exchange as kinds
from gossamer.core.codec import write
from gossamer.core.combine import Piece
from gossamer.core.tree import Tree, flat
from gossamer.worker.effects import Addr, Effect, Expect, Reply, Send, Span, Tag
from gossamer.worker.hub import HubPlan
from gossamer.worker.mean import Heard, Own, Plan, expect, gather, mean_weights, refused_of, verify
from gossamer.worker.packet import HEADER_BYTES, REFUSED, Packet, blank
from gossamer.worker.pairs import mix
from gossamer.worker.ranks import summed
from gossamer.worker.replanning import times_of
from gossamer.worker.seat import Said, Seat, Written
from gossamer.worker.state import Met, Pending

__all__ = ["Heard", "Own", "Plan", "plan_of", "ready_targets"]


def plan_of(seat: Seat) -> Plan:
    """The message plan of the seat's method."""
    return _PLANS[type(seat.method.exchange)]


def ready_targets(seat: Seat, round: int) -> Sequence[Addr]:
    """Who will wait for data that carries this worker's compute of the round."""
    return seat.others if seat.method.exchange.everybody else seat.links(round)[1]


def _row_weights(seat: Seat, round: int, packets: Mapping[Addr, Packet]) -> dict[Addr, float]:
    """The worker's row of W; the weight of a peer that is missing stays at home."""
    row = dict(seat.mixing(round).row(seat.me))
    row.setdefault(seat.me, 0.0)
    for j in [j for j in row if j not in packets]:
        row[seat.me] += row.pop(j)
    return {j: float(np.float32(row[j])) for j in sorted(row)}


class _GatherPlan:
    """Everybody sends all it says to those who hear it."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        frm = seat.links(round)[0]
        if frm:
            yield expect(seat, Tag.of(round, Tag.SAY), dict.fromkeys(frm))

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        packet = seat.pack(tree or None, seat.layout, Tag.SAY, said)
        yield Span("encode", 4 * seat.elements)
        own = {0: packet}
        yield from self.resend(seat, Pending(said.round, own, {}))
        return own

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        to = seat.links(pending.round)[1]
        if to:
            to = seat.others if len(to) == len(seat.others) else to
            yield Send(to, Tag.of(pending.round, Tag.SAY), pending.own[0], seat.content())

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        yield from ()

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        round = pending.round
        peers = seat.links(round)[0]
        packets: dict[Addr, Packet] = yield from gather(seat, Tag.of(round, Tag.SAY), peers, ready_round)
        absent = tuple(j for j in peers if j not in packets)
        packets[seat.me] = pending.own[0]
        if not like:
            yield Span("decode", 4 * seat.elements * len(packets))
            return Heard(None, dict.fromkeys(packets, 1.0), (), times_of(packets), absent)
        verify(seat, round, packets)
        weights = mean_weights(seat, packets) if seat.method.synchronous else _row_weights(seat, round, packets)
        if seat.method.pair:
            meeting, full = yield from mix(seat, seat.method.pair, pending, packets, weights, ready_round, like)
            return Heard(meeting.mixed, weights, refused_of(packets), times_of(packets), absent, meeting.memory(), full)
        pieces = [Piece(seat.layout, w, packets[j].payload) for j, w in weights.items()]
        mixed = seat.combine(pieces, seat.method.codec, like)
        yield Span("decode", 4 * seat.elements * len(packets))
        return Heard(mixed, weights, refused_of(packets), times_of(packets), absent)


class _ShardPlan:
    """Worker j averages slice j and sends the mean on."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        if seat.others and not met:
            yield expect(seat, Tag.of(round, Tag.SAY), dict.fromkeys(seat.others, seat.me))
        if seat.others:
            yield expect(seat, Tag.of(round, Tag.MEAN), {j: j for j in seat.others})

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        own = {j: seat.pack(tree or None, seat.slices[j], Tag.SAY, said) for j in seat.everybody}
        yield Span("encode", 4 * seat.elements)
        yield from self.resend(seat, Pending(said.round, own, {}))
        return own

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        if pending.met and pending.met.mean and seat.others:
            yield Send(seat.others, Tag.of(pending.round, Tag.MEAN), pending.met.mean, seat.content(seat.me))
        elif not pending.met:
            for j in seat.others:
                yield Send((j,), Tag.of(pending.round, Tag.SAY), pending.own[j], seat.content(j))

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        me, codec, feedback = seat.me, seat.method.codec, seat.method.feedback
        round, own = pending.round, pending.own
        packets: dict[Addr, Packet] = yield from gather(seat, Tag.of(round, Tag.SAY), seat.others, ready_round)
        packets[me] = own[me]
        part: Tree | None = None
        if like:
            verify(seat, round, packets)
            weights = mean_weights(seat, packets)
            part = seat.combine([Piece(seat.slices[me], w, packets[j].payload) for j, w in weights.items()], codec, like)
        else:
            weights = dict.fromkeys(packets, 1.0)
        yield Span("decode", 4 * seat.slice_elements[me] * len(packets))
        # Where nobody was accepted nobody will step on the mean: what is to be fed back waits for one that counts.
        feeds = feedback is not None and residual is not None and part is not None and any(weights.values())
        if feeds and feedback and residual is not None and part is not None:
            part = feedback.absorb_slice(residual, part, seat.slices[me])
        said = Said(round, sum(p.header.tokens for p in packets.values()), own[me].header.digest)
        if part is not None and seat.ranges:  # the statistics are of all ranks
            data = blank(codec.nbytes(seat.slices[me]))
            zeros = yield from summed(write(codec, part, seat.slices[me], [(seat.slices[me], data[HEADER_BYTES:])]))
            said = said._replace(written=[Written(seat.slices[me], data, zeros[0])])
        mean = seat.pack(part, seat.slices[me], Tag.MEAN, said)
        if feeds and residual is not None and part is not None:
            codec.accumulate(mean.payload, seat.slices[me], part, -1.0)
            for piece in seat.slices[me]:
                residual[piece.name].copy_(flat(part, piece))
        yield Span("encode", 4 * seat.slice_elements[me])
        pending.met = Met(mean, weights, refused_of(packets), times_of(packets))
        yield from self.resend(seat, pending)

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        round, others, met = pending.round, seat.others, pending.met
        assert met is not None and met.mean is not None
        means = yield from gather(seat, Tag.of(round, Tag.MEAN), others, ready_round, dict.fromkeys(others, seat.everybody))
        means[seat.me] = met.mean
        mixed: Tree | None = None
        if like:
            verify(seat, round, means)
            mixed = seat.combine([Piece(seat.slices[j], 1.0, means[j].payload) for j in seat.everybody], seat.method.codec, like)
        yield Span("decode", 4 * seat.elements)
        return Heard(mixed, met.weights, met.refused, met.step_s)


class _RingPlan:
    """n - 1 hops of growing weighted sums, then n - 1 hops of the finished means. Only the neighbour's header is seen."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        ring, at = seat.everybody, seat.everybody.index(seat.me)
        n = len(ring)
        for kind, first in ((Tag.REDUCE, at - 1), (Tag.SPREAD, at)):
            for hop in range(n - 1):
                yield Expect(Tag.of(round, kind), {ring[at - 1]: seat.slice_bytes(ring[(first - hop) % n])})

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        own = {j: seat.pack(tree or None, seat.slices[j], Tag.REDUCE, said) for j in seat.everybody}
        yield Span("encode", 4 * seat.elements)
        return own

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        return iter(())

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        yield from ()

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        me, round, own, ring = seat.me, pending.round, pending.own, seat.everybody
        n, at = len(ring), ring.index(me)
        left, right = ring[at - 1], ring[(at + 1) % n]
        mine = own[me].header
        refused = bool(mine.flags & REFUSED)
        weight = 0 if refused else mine.tokens if seat.method.weights == "tokens" else 1

        def passed_on(k: int, total: int, kind: int, *parts: tuple[float, Packet]) -> Packet:
            """A packet with the sum of weight * payload over slice k; its header's token field holds the sum of weights so far."""
            said = Said(round, total, mine.digest)
            tree: Tree | None = None
            if like:
                pieces = [Piece(seat.slices[k], w, p.payload) for w, p in parts]
                tree = seat.combine(pieces, seat.method.codec, like)
            return seat.pack(tree, seat.slices[k], kind, said)

        totals = dict.fromkeys(seat.everybody, weight)
        sums: Own = {me: passed_on(me, weight, Tag.REDUCE, (float(weight), own[me]))}
        for hop in range(n - 1):
            k_out, k_in = ring[(at - hop) % n], ring[(at - hop - 1) % n]
            yield Send((right,), Tag.of(round, Tag.REDUCE), sums.pop(k_out))
            origins = tuple(ring[(at - 1 - back) % n] for back in range(hop + 1))
            got: Packet = (yield from gather(seat, Tag.of(round, Tag.REDUCE), (left,), ready_round, {left: origins}))[left]
            if like:
                verify(seat, round, {me: own[me], left: got})
            totals[k_in] = got.header.tokens + weight
            sums[k_in] = passed_on(k_in, totals[k_in], Tag.REDUCE, (1.0, got), (float(weight), own[k_in]))
            yield Span("decode", 8 * seat.slice_elements[k_in])
        done = right
        total = totals[done]
        means: Own = {done: passed_on(done, total, Tag.SPREAD, (float(np.float32(1.0 / total)) if total else 0.0, sums[done]))}
        for hop in range(n - 1):
            k_out, k_in = ring[(at + 1 - hop) % n], ring[(at - hop) % n]
            yield Send((right,), Tag.of(round, Tag.SPREAD), means[k_out])
            means |= {k_in: (yield from gather(seat, Tag.of(round, Tag.SPREAD), (left,), ready_round, {left: seat.everybody}))[left]}
        mixed = None
        if like:
            mixed = seat.combine([Piece(seat.slices[k], 1.0, means[k].payload) for k in seat.everybody], seat.method.codec, like)
        yield Span("decode", 4 * seat.elements)
        return Heard(mixed, {me: float(bool(total))}, (me,) if refused else ())


_PLANS: dict[type, Plan] = {kinds.Gather: _GatherPlan(), kinds.Shard: _ShardPlan(), kinds.Ring: _RingPlan(), kinds.Hub: HubPlan()}
