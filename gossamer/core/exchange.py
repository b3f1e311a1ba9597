"""Who sends what to whom to form a weighted mean, and how many bytes that is. The message plans live in gossamer.worker.exchange.

Gather   everybody sends all it says to those who hear it          (n - 1) * payload on the complete graph
Shard    worker j means slice j and sends the mean on              2 (n - 1) / n * payload, as a ring; lossy codecs encode twice
Ring     partial sums go round, then the means                     2 (n - 1) / n * payload in 2 (n - 1) hops
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from gossamer.core.codec.base import Format
from gossamer.core.fragment import shards
from gossamer.core.tree import Layout


@dataclass(frozen=True)
class Gather:
    """Straight to those who hear it. Any topology, any codec."""

    everybody: ClassVar[bool] = False
    """Whether it is a mean over all workers, formed slice by slice."""
    meets: ClassVar[bool] = False
    """Whether it has two phases: somebody must act between what is said and what is heard."""

    def sent_bytes(self, codec: Format, layout: Layout, heard_by: int, n: int, header_bytes: int) -> int:
        """Bytes a worker heard by `heard_by` others sends a round, headers included."""
        return heard_by * (header_bytes + codec.nbytes(layout))


@dataclass(frozen=True)
class Shard:
    """Reduce-scatter and all-gather made of sends; complete graph only. Where the codec is lossless the mathematics is Gather's, bit for
    bit; where it is lossy the mean is encoded a second time, which is another method: ask for it by name."""

    everybody: ClassVar[bool] = True
    meets: ClassVar[bool] = True

    def sent_bytes(self, codec: Format, layout: Layout, heard_by: int, n: int, header_bytes: int) -> int:
        """Bytes a worker sends a round, headers included (the mean over workers, whose slices differ by a few bytes)."""
        sizes = [header_bytes + codec.nbytes(piece) for piece in shards(layout, n)]
        return round(2 * (n - 1) * sum(sizes) / n)


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce of weighted sums; complete graph and a lossless codec only. For comparing with the literature's time models."""

    everybody: ClassVar[bool] = True
    meets: ClassVar[bool] = False

    def sent_bytes(self, codec: Format, layout: Layout, heard_by: int, n: int, header_bytes: int) -> int:
        """Bytes a worker sends a round, headers included."""
        return Shard().sent_bytes(codec, layout, heard_by, n, header_bytes)


Exchange: TypeAlias = Gather | Shard | Ring
