"""What the ways to form a mean have in common: what is heard, the messages of a plan, and the checks of what has come."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from gossamer.core.combine import normalised
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree
from gossamer.worker.effects import Addr, Effect, Expect, Gather, Reply, Send
from gossamer.worker.packet import REFUSED, Packet
from gossamer.worker.seat import Said, Seat
from gossamer.worker.state import Pending

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


def expect(seat: Seat, tag: int, slices: Mapping[Addr, Addr | None]) -> Expect:
    """From each of these workers a packet with a slice, or (None) with all."""
    sizes = {j: seat.whole_bytes if k is None else seat.slice_bytes(k) for j, k in slices.items()}
    contents = {j: content for j, k in slices.items() if (content := seat.content(k))}
    return Expect(tag, sizes, contents or None)


def verify(seat: Seat, round: int, packets: Mapping[Addr, Packet]) -> None:
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


def gather(
    seat: Seat, tag: int, frm: Sequence[Addr], ready_round: int, carries: Mapping[Addr, Sequence[Addr]] | None = None
) -> Generator[Effect, Reply, dict[Addr, Packet]]:
    """One wait, judged by the READY notes of the seat's fragment; none where there is nobody to wait for."""
    return dict((yield Gather(tag, frm, ready_round, carries, seat.fragment, seat.method.deadline_s))) if frm else {}


def refused_of(packets: Mapping[Addr, Packet]) -> tuple[Addr, ...]:
    """Whose contribution was refused by its sender's guard."""
    return tuple(j for j in sorted(packets) if packets[j].header.flags & REFUSED)


def mean_weights(seat: Seat, packets: Mapping[Addr, Packet]) -> dict[Addr, float]:
    """Weights of a synchronous mean, over what was received and not refused."""
    by_tokens = seat.method.weights == "tokens"
    return normalised({j: 0.0 if p.header.flags & REFUSED else float(p.header.tokens) if by_tokens else 1.0 for j, p in packets.items()})
