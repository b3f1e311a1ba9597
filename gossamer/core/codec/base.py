"""What a codec is: exact size, encode, and decode straight into a weighted mean.

Three that you know: `Fp32` copies; `Sign` keeps one bit a number and one magnitude a tensor (GeoMesh's CSS);
`TopK` keeps the largest few. All are frozen dataclasses that are their own configuration, and hold no state.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeAlias

from torch import Tensor

from gossamer.core.tree import Layout, Tree

Stats: TypeAlias = dict[str, Tensor]
"""Per tensor name, float64 numbers that add up over the ranks of a site (for Sign: sums of |D| and counts, shape [2, groups])."""


class Format(Protocol):
    """What a payload is, and how long."""

    id: ClassVar[int]
    """Travels in each header (0-255)."""
    version: ClassVar[int]

    def nbytes(self, layout: Layout) -> int:
        """Exact payload size in bytes, without encoding."""


class Codec(Format, Protocol):
    """Encodes float32 ranges of a tree to bytes."""

    @property
    def lossy(self) -> bool:
        """False when decode(encode(x)) == x bit for bit."""

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """What must be summed over the site's ranks before encoding; {} for most codecs."""

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Writes the payload into `out` (uint8, nbytes(layout) long). Returns how many exact zeros it could not represent.
        Must not modify `tree`."""

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc += weight * decode(payload), range by range: float32, multiply, then add (no fused multiply-add), so that the bits are
        the same on every machine. `weight` is a number that float32 holds exactly."""
