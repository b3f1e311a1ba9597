"""How a weighted mean is formed out of sends and gathers: one message plan per exchange of gossamer.core.exchange.

Each plan has four parts: `expects` (what will come, so that receives are posted before the compute), `say` (right after the inner steps,
or before them), `meet` (the second phase of those that have one) and `hear`, at once or a good part of a round later. Between them a
worker may go on computing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from gossamer.core import exchange as kinds
from gossamer.core.codec import write
from gossamer.core.combine import Piece, normalised
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree, flat
from gossamer.worker.effects import Addr, Effect, Expect, Gather, Reply, Send, Span, Tag
from gossamer.worker.packet import HEADER_BYTES, REFUSED, Packet, blank
from gossamer.worker.pairs import mix
from gossamer.worker.ranks import summed
from gossamer.worker.replanning import times_of
from gossamer.worker.seat import Said, Seat, Written
from gossamer.worker.state import Met, Pending

Own = dict[int, Packet]
"""The packets that a worker says in a round, by slice; a gather has one slice, 0."""


class Heard(NamedTuple):
    """What came of a round's exchange."""

    mixed: Tree | None
    """The mean. None in timing-only runs, and where no contribution was accepted."""
    weights: dict[Addr, float]
    """Who took part and with what weight."""
    refused: tuple[Addr, ...]
    """Whose contribution was refused by its sender's guard."""
    step_s: Mapping[Addr, float] = {}
    """Seconds per inner step that each says it took; empty where not all are heard (ring)."""
    absent: tuple[Addr, ...] = ()
    """Peers with whom the exchange was skipped: dead, or past the deadline."""
    memory: Mapping[str, Tensor] = {}
    """What the pair codec is to remember."""
    full: int = 0
    """Numbers that the worker had to say in full, since the pair codec could not tell them (each once a peer)."""

    @property
    def accepted(self) -> bool:
        """False when every contribution was refused: there is nothing to step on."""
        return any(self.weights.values())


class Plan(Protocol):
    """The messages of one exchange. `like` gives names and shapes, and is empty in timing-only runs; with a pair codec it is z."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        """What will come in the round, with exact sizes; what is left of it after `meet`, if `met`."""

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        """Encodes and sends."""

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        """The sends of `say` again, or of `meet` where that is over, for a worker that resumes with an exchange in flight."""

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        """Does what the others wait for before they can hear, and remembers it in `pending.met`. `residual`: error feedback of the
        worker's own slice, which is brought up to date."""

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        """Waits for the others and forms the mean. Comes after `meet`."""


def plan_of(seat: Seat) -> Plan:
    """The message plan of the seat's method."""
    return _PLANS[type(seat.method.exchange)]


def ready_targets(seat: Seat, round: int) -> Sequence[Addr]:
    """Who will wait for data that carries this worker's compute of the round."""
    return seat.others if seat.method.exchange.everybody else seat.links(round)[1]


def expect(seat: Seat, tag: int, slices: Mapping[Addr, Addr | None]) -> Expect:
    """From each of these workers a packet with a slice, or (None) with all."""
    sizes = {j: seat.whole_bytes if k is None else seat.slice_bytes(k) for j, k in slices.items()}
    contents = {j: content for j, k in slices.items() if (content := seat.content(k))}
    return Expect(tag, sizes, contents or None)


def _verify(seat: Seat, round: int, packets: Mapping[Addr, Packet]) -> None:
    """Refuses foreign packets, and replicas that have drifted apart.

    Raises:
        RunFailed: naming the worker.
    """
    mine = packets[seat.me].header.digest
    for j, packet in packets.items():
        if j == seat.me:
            continue
        seat.check(packet, round, j)
        if packet.header.digest != mine and (seat.method.synchronous or round == 0):
            if round == 0:
                raise RunFailed(
                    f"worker {j} starts from other parameters than worker {seat.me}: use the same seed and checkpoint on all workers, "
                    "or sync_from to start everybody from one worker's parameters"
                )
            raise RunFailed(
                f"the replicas have drifted apart: at the start of round {round} worker {j} holds other outer parameters, momentum or plan "
                f"than worker {seat.me}; resume from the last checkpoint, and check that all workers run one release on one kind of device"
            )


def _gather(
    seat: Seat, tag: int, frm: Sequence[Addr], ready_round: int, carries: Mapping[Addr, Sequence[Addr]] | None = None
) -> Generator[Effect, Reply, dict[Addr, Packet]]:
    """One wait, judged by the READY notes of the seat's fragment; none where there is nobody to wait for."""
    return dict((yield Gather(tag, frm, ready_round, carries, seat.fragment, seat.method.deadline_s))) if frm else {}


def _refused(packets: Mapping[Addr, Packet]) -> tuple[Addr, ...]:
    return tuple(j for j in sorted(packets) if packets[j].header.flags & REFUSED)


def _mean_weights(seat: Seat, packets: Mapping[Addr, Packet]) -> dict[Addr, float]:
    """Weights of a synchronous mean, over what was received and not refused."""
    by_tokens = seat.method.weights == "tokens"
    return normalised({j: 0.0 if p.header.flags & REFUSED else float(p.header.tokens) if by_tokens else 1.0 for j, p in packets.items()})


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
            to = seat.others if len(to) == seat.method.n - 1 else to
            yield Send(to, Tag.of(pending.round, Tag.SAY), pending.own[0], seat.content())

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        yield from ()

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        round = pending.round
        peers = seat.links(round)[0]
        packets: dict[Addr, Packet] = yield from _gather(seat, Tag.of(round, Tag.SAY), peers, ready_round)
        absent = tuple(j for j in peers if j not in packets)
        packets[seat.me] = pending.own[0]
        if not like:
            yield Span("decode", 4 * seat.elements * len(packets))
            return Heard(None, dict.fromkeys(packets, 1.0), (), times_of(packets), absent)
        _verify(seat, round, packets)
        weights = _mean_weights(seat, packets) if seat.method.synchronous else _row_weights(seat, round, packets)
        if seat.method.pair:
            meeting, full = yield from mix(seat, seat.method.pair, pending, packets, weights, ready_round, like)
            return Heard(meeting.mixed, weights, _refused(packets), times_of(packets), absent, meeting.memory(), full)
        pieces = [Piece(seat.layout, w, packets[j].payload) for j, w in weights.items()]
        mixed = seat.combine(pieces, seat.method.codec, like)
        yield Span("decode", 4 * seat.elements * len(packets))
        return Heard(mixed, weights, _refused(packets), times_of(packets), absent)


class _ShardPlan:
    """Worker j averages slice j and sends the mean on."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        if seat.others and not met:
            yield expect(seat, Tag.of(round, Tag.SAY), dict.fromkeys(seat.others, seat.me))
        if seat.others:
            yield expect(seat, Tag.of(round, Tag.MEAN), {j: j for j in seat.others})

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        own = {j: seat.pack(tree or None, piece, Tag.SAY, said) for j, piece in enumerate(seat.slices)}
        yield Span("encode", 4 * seat.elements)
        yield from self.resend(seat, Pending(said.round, own, {}))
        return own

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        if pending.met and seat.others:
            yield Send(seat.others, Tag.of(pending.round, Tag.MEAN), pending.met.mean, seat.content(seat.me))
        elif not pending.met:
            for j in seat.others:
                yield Send((j,), Tag.of(pending.round, Tag.SAY), pending.own[j], seat.content(j))

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        me, codec, feedback = seat.me, seat.method.codec, seat.method.feedback
        round, own = pending.round, pending.own
        packets: dict[Addr, Packet] = yield from _gather(seat, Tag.of(round, Tag.SAY), seat.others, ready_round)
        packets[me] = own[me]
        part: Tree | None = None
        if like:
            _verify(seat, round, packets)
            weights = _mean_weights(seat, packets)
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
        pending.met = Met(mean, weights, _refused(packets), times_of(packets))
        yield from self.resend(seat, pending)

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        round, others, met = pending.round, seat.others, pending.met
        assert met is not None
        means = yield from _gather(seat, Tag.of(round, Tag.MEAN), others, ready_round, dict.fromkeys(others, seat.everybody))
        means[seat.me] = met.mean
        mixed: Tree | None = None
        if like:
            _verify(seat, round, means)
            mixed = seat.combine([Piece(seat.slices[j], 1.0, means[j].payload) for j in seat.everybody], seat.method.codec, like)
        yield Span("decode", 4 * seat.elements)
        return Heard(mixed, met.weights, met.refused, met.step_s)


class _RingPlan:
    """n - 1 hops of growing weighted sums, then n - 1 hops of the finished means. Only the neighbour's header is seen."""

    def expects(self, seat: Seat, round: int, met: bool = False) -> Iterator[Expect]:
        n, me = seat.method.n, seat.me
        for kind, first in ((Tag.REDUCE, me - 1), (Tag.SPREAD, me)):
            for hop in range(n - 1):
                yield Expect(Tag.of(round, kind), {(me - 1) % n: seat.slice_bytes((first - hop) % n)})

    def say(self, seat: Seat, tree: Tree, said: Said) -> Generator[Effect, Reply, Own]:
        own = {j: seat.pack(tree or None, piece, Tag.REDUCE, said) for j, piece in enumerate(seat.slices)}
        yield Span("encode", 4 * seat.elements)
        return own

    def resend(self, seat: Seat, pending: Pending) -> Iterator[Send]:
        return iter(())

    def meet(self, seat: Seat, pending: Pending, ready_round: int, like: Tree, residual: Tree | None) -> Generator[Effect, Reply, None]:
        yield from ()

    def hear(self, seat: Seat, pending: Pending, ready_round: int, like: Tree) -> Generator[Effect, Reply, Heard]:
        n, me, round, own = seat.method.n, seat.me, pending.round, pending.own
        left, right = (me - 1) % n, (me + 1) % n
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
            k_out, k_in = (me - hop) % n, (me - hop - 1) % n
            yield Send((right,), Tag.of(round, Tag.REDUCE), sums.pop(k_out))
            origins = tuple((left - back) % n for back in range(hop + 1))
            got: Packet = (yield from _gather(seat, Tag.of(round, Tag.REDUCE), (left,), ready_round, {left: origins}))[left]
            if like:
                _verify(seat, round, {me: own[me], left: got})
            totals[k_in] = got.header.tokens + weight
            sums[k_in] = passed_on(k_in, totals[k_in], Tag.REDUCE, (1.0, got), (float(weight), own[k_in]))
            yield Span("decode", 8 * seat.slice_elements[k_in])
        done = (me + 1) % n
        total = totals[done]
        means: Own = {done: passed_on(done, total, Tag.SPREAD, (float(np.float32(1.0 / total)) if total else 0.0, sums[done]))}
        for hop in range(n - 1):
            k_out, k_in = (me + 1 - hop) % n, (me - hop) % n
            yield Send((right,), Tag.of(round, Tag.SPREAD), means[k_out])
            means |= {k_in: (yield from _gather(seat, Tag.of(round, Tag.SPREAD), (left,), ready_round, {left: seat.everybody}))[left]}
        mixed = None
        if like:
            mixed = seat.combine([Piece(seat.slices[k], 1.0, means[k].payload) for k in seat.everybody], seat.method.codec, like)
        yield Span("decode", 4 * seat.elements)
        return Heard(mixed, {me: float(bool(total))}, (me,) if refused else ())


_PLANS: dict[type, Plan] = {kinds.Gather: _GatherPlan(), kinds.Shard: _ShardPlan(), kinds.Ring: _RingPlan()}
