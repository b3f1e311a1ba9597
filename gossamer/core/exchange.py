"""Who sends what to whom to form a weighted mean, and how many bytes that is. The message plans live in gossamer.worker.exchange.

Gather   everybody sends all it says to those who hear it          (n - 1) * payload on the complete graph
Shard    worker j means slice j and sends the mean on              2 (n - 1) / n * payload, as a ring; lossy codecs encode twice
Ring     partial sums go round, then the means                     2 (n - 1) / n * payload in 2 (n - 1) hops
Hub      over one worker, which hands on what all have said        payload; the hub (n - 1) times the less of (n - 1) * payload and 4 P
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from gossamer.core.codec import Fp32
from gossamer.core.codec.base import Format
from gossamer.core.fragment import shards
from gossamer.core.matching import Rates
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


@dataclass(frozen=True)
class Hub:
    """A star: everybody sends to one worker alone, and hears from it alone. The mathematics is Gather's, bit for bit, with any codec: the
    hub hands on the others' packets as they are, or, where that is less, the mean of what they say in float32, and their headers.
    Complete graph only. For sites that reach one of them better than each other."""

    at: int
    """The worker that is the hub, where it takes part."""
    rates: Rates | None = field(default=None, repr=False)
    """By which another one is chosen where it does not (`gossamer.core.star.middle`); None: the lowest."""
    everybody: ClassVar[bool] = False
    meets: ClassVar[bool] = True

    def hands(self, codec: Format, layout: Layout, n: int, header_bytes: int) -> tuple[int, ...]:
        """Sizes of the messages that the hub sends to each other worker, in order. With a mean there is one more than other workers."""
        whole, mean = codec.nbytes(layout), header_bytes + Fp32().nbytes(layout)
        if mean < (n - 1) * whole:
            return (*[header_bytes] * (n - 1), mean)
        return (header_bytes + whole,) * (n - 1)

    def sent_bytes(self, codec: Format, layout: Layout, heard_by: int, n: int, header_bytes: int) -> int:
        """Bytes a worker sends a round, headers included (the mean over workers: the hub sends far more than the others)."""
        handed = sum(self.hands(codec, layout, n, header_bytes))
        return round((n - 1) * (header_bytes + codec.nbytes(layout) + handed) / n)


Exchange: TypeAlias = Gather | Shard | Ring | Hub
