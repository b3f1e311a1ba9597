"""What a worker's program knows that does not change: who it is, what it runs, and the sizes that follow.

A worker of several ranks has a program in each: the same rounds on the rank's own shard of the model. Such a program, too, knows workers
only; gossamer.worker.ranks takes what it says to the ranks of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from torch import Tensor

from gossamer.core.codec.base import Codec, Format
from gossamer.core.combine import Piece, combine
from gossamer.core.fragment import fragments, shards
from gossamer.core.members import Roll, over
from gossamer.core.method import Method
from gossamer.core.mixing import Mixing
from gossamer.core.ranges import Ranges
from gossamer.core.tree import Layout, Tree, layout_hash, numel
from gossamer.worker.effects import Addr, Content
from gossamer.worker.packet import HEADER_BYTES, Header, Packet, blank, check, seal

Combine: TypeAlias = Callable[[Sequence[Piece], Codec, Tree], Tree]


class Written(NamedTuple):
    """A payload that is encoded already."""

    layout: Layout
    data: Tensor
    """Room for the header, then the payload."""
    zeros: int = 0
    """Exact zeros that the codec could not say."""


class Said(NamedTuple):
    """What the headers of a round's packets say of their sender."""

    round: int
    tokens: int
    digest: int = 0
    flags: int = 0
    written: Sequence[Written] = ()
    """Payloads that are encoded already; what is not among them is encoded as it is packed, with statistics of its own."""
    step_s: float = 0.0
    """Seconds per inner step of the round, a number that float32 holds; 0: not known."""


@dataclass(frozen=True)
class Seat:
    """One worker's place in a run."""

    me: Addr
    method: Method
    layout: Layout
    run_id: int = 0
    combine: Combine = field(default=combine, repr=False)
    """How a mean is formed. The simulator shares one memoised function among its workers; its result is never written to."""
    fragment: int = 0
    """Which fragment of the model `layout` is; 0 where the model travels whole."""
    rank: int = 0
    """Which rank of the worker this is."""
    ranges: Ranges | None = field(default=None, repr=False)
    """How the workers cut the model over their ranks; None where every worker is one rank. Then `layout` is this rank's share."""
    whole: Layout = field(default=(), repr=False)
    """The layout of all ranks together; empty where every worker is one rank."""
    roll: Roll = field(default_factory=Roll, repr=False, compare=False)
    """Who takes part in which round: that of the worker's state (`peer` sees to it), so that it grows as the run goes."""
    present: tuple[Addr, ...] | None = None
    """Of a synchronous method: who takes part as long as this program runs, in order of address (`peer` sees to it). None: all workers."""

    _links: dict[int, tuple[tuple[Addr, ...], tuple[Addr, ...]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def everybody(self) -> tuple[Addr, ...]:
        """All workers that take part; in gossip all workers, whatever the roll says."""
        return tuple(range(self.method.n)) if self.present is None else self.present

    @cached_property
    def others(self) -> tuple[Addr, ...]:
        """All of them but this one, the next higher first: if everybody sends in this order, nobody's downlink is everybody's first."""
        at = self.everybody.index(self.me)
        return (*self.everybody[at + 1 :], *self.everybody[:at])

    @cached_property
    def fragments(self) -> tuple[Seat, ...]:
        """A seat for each fragment, which knows its own layout alone: what travels of it is marked as its own."""
        count = self.method.cadence.fragments
        if count == 1:
            return (self,)
        if self.ranges is None:
            return tuple(replace(self, layout=piece, fragment=p) for p, piece in enumerate(fragments(self.layout, count)))
        pieces = enumerate(fragments(self.whole, count))
        return tuple(replace(self, layout=self._held(piece), whole=piece, fragment=p) for p, piece in pieces)

    def _held(self, layout: Layout) -> Layout:
        """What this rank holds of a layout of all ranks."""
        assert self.ranges is not None
        return self.ranges.held(layout, self.me, self.rank)

    @cached_property
    def whole_slices(self) -> tuple[Layout, ...]:
        """Slice j is worker j's to average (shard and ring exchanges). Who does not take part has an empty one."""
        mine = dict(zip(self.everybody, shards(self.whole or self.layout, len(self.everybody)), strict=True))
        return tuple(mine.get(j, ()) for j in range(self.method.n))

    @cached_property
    def slices(self) -> tuple[Layout, ...]:
        """What this rank holds of each slice."""
        return self.whole_slices if self.ranges is None else tuple(map(self._held, self.whole_slices))

    def content(self, j: Addr | None = None, format: Format | None = None) -> Content | None:
        """What a payload with slice j holds, or with all; None where every worker is one rank."""
        if self.ranges is None:
            return None
        layout, whole = (self.layout, self.whole) if j is None else (self.slices[j], self.whole_slices[j])
        return Content(layout, whole, format or self.method.wire)

    @cached_property
    def mark(self) -> int:
        """Hash of the layout, that of all ranks."""
        return layout_hash(self.whole or self.layout)

    @cached_property
    def elements(self) -> int:
        """Elements of the layout."""
        return numel(self.layout)

    @cached_property
    def slice_elements(self) -> tuple[int, ...]:
        """Elements of each slice."""
        return tuple(numel(piece) for piece in self.slices)

    @cached_property
    def whole_bytes(self) -> int:
        """Size of a packet with the whole layout."""
        return HEADER_BYTES + self.method.wire.nbytes(self.layout)

    def part_of(self, tree: Mapping[str, Tensor]) -> Tree:
        """The tensors of `tree` that the layout names, not copied; none of a tree that is empty (a timing-only run)."""
        return {part.name: tree[part.name] for part in self.layout} if tree else {}

    def slice_bytes(self, j: Addr) -> int:
        """Size of a packet with slice j."""
        return HEADER_BYTES + self.method.codec.nbytes(self.slices[j])

    def mixing(self, round: int) -> Mixing:
        """Who hears whom in `round`."""
        return over(self.method.topology, self.roll.absent(round), round)

    def links(self, round: int) -> tuple[tuple[Addr, ...], tuple[Addr, ...]]:
        """(whom this worker hears, who hears it) in `round`. Asked for several times a round, so the last two are kept."""
        found = self._links.get(round)
        if found is None:
            mixing = self.mixing(round)
            if len(self._links) > 1:
                self._links.clear()
            inn, out = (self.roll.heard(round, side(self.me)) for side in (mixing.inn, mixing.out))
            found = self._links[round] = inn, out
        return found

    def pack(self, tree: Tree | None, layout: Layout, kind: int, said: Said, tokens: int | None = None) -> Packet:
        """Encodes `layout`'s part of `tree`, if it is not written yet; only its size where there are no tensors."""
        codec, wire = self.method.codec, self.method.wire
        header = Header(
            run_id=self.run_id, round=said.round, sender=self.me, kind=kind, codec_id=wire.id, codec_version=wire.version,
            layout=self.mark, digest=said.digest, tokens=said.tokens if tokens is None else tokens, flags=said.flags,
            step_s=said.step_s,
        )  # fmt: skip
        if tree is None:
            return Packet(header, self.whole_bytes if layout is self.layout else HEADER_BYTES + codec.nbytes(layout), None)
        for written in said.written:
            if written.layout is layout:
                return seal(written.data, header)._replace(zeros=written.zeros)
        data = blank(codec.nbytes(layout))
        zeros = codec.encode(tree, layout, codec.stats(tree, layout), data[HEADER_BYTES:])
        return seal(data, header)._replace(zeros=zeros)

    def check(self, packet: Packet, round: int, sender: Addr) -> None:
        """Refuses a foreign packet by name."""
        wire = self.method.wire
        check(packet, run_id=self.run_id, round=round, sender=sender, codec=(wire.id, wire.version), layout=self.mark)
