"""One bit a number and one magnitude a group: what GeoMesh calls CSS (Shin et al. 2026).

>>> import torch
>>> from gossamer.core.tree import layout_of, zeros_like
>>> tree = {"w": torch.tensor([3.0, -1.0, 0.5, -0.5])}
>>> codec, layout = Sign(), layout_of(tree)
>>> out = torch.empty(codec.nbytes(layout), dtype=torch.uint8)
>>> codec.encode(tree, layout, codec.stats(tree, layout), out), out.numel()
(0, 8)
>>> mean = zeros_like(tree)
>>> codec.accumulate(out, layout, mean, 1.0)
>>> mean["w"].tolist()
[1.25, -1.25, 1.25, -1.25]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec.base import Stats
from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, Part, Tree

_SIGNS: p.Floats = 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32) - 1
"""[256, 8]: what the eight bits of a byte mean, 2s - 1."""


def _runs(lo: int, hi: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts the elements lo to hi of a tensor into runs of equal pieces of groups: (from, to, first group, groups), from and to counted
    from lo. A piece of a group at the start, whole groups, a piece at the end.

    >>> list(_runs(2, 11, 4))
    [(0, 2, 0, 1), (2, 6, 1, 1), (6, 9, 2, 1)]
    >>> list(_runs(4, 14, 4))
    [(0, 8, 1, 2), (8, 10, 3, 1)]
    """
    at, g = lo, lo // group
    if at % group:
        end = min((g + 1) * group, hi)
        yield 0, end - lo, g, 1
        at, g = end, g + 1
    whole = (hi - at) // group
    if whole > 0:
        yield at - lo, at - lo + whole * group, g, whole
        at, g = at + whole * group, g + whole
    if at < hi:
        yield at - lo, hi - lo, g, 1


@dataclass(frozen=True)
class Sign:
    """Bits s = [D >= 0] and magnitudes m = mean|D| of each group; decoded m * (2s - 1).

    mean|D| is the scale of a sign that minimises sum (D - m * sign D)^2. Groups are counted in the full tensor, so that the slices of
    a tensor decode to what the whole does; the statistics may be those of a larger layout than the one encoded. A group of magnitude 0
    (an embedding row that no token touched) decodes to zero; elsewhere an exact zero takes bit 1 and is counted by `encode`.
    A part's bytes: the magnitudes (float32) of every group that the range touches, then its bits in linear order, lowest bit of a byte
    first, then padding.
    """

    magnitude: Literal["tensor", "row", "block"] = "tensor"
    """What shares a magnitude: a tensor, a row of it (numel / shape[0] elements), or a block of `block` elements."""
    block: int = 256
    """Elements of a block, where magnitude = "block"."""
    embeddings: Literal["row", "same"] = "row"
    """Parts marked `by_row` (embeddings, output layers) take one magnitude a row whatever `magnitude` says, or the same as all."""

    id: ClassVar[int] = 5
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        p.checked_name("magnitude of codec sign", self.magnitude, ("tensor", "row", "block"))
        p.checked_name("embeddings of codec sign", self.embeddings, ("row", "same"))
        p.checked_int("block of codec sign", self.block, 1, 2**31 - 1)

    @property
    def lossy(self) -> bool:
        """True."""
        return True

    def group(self, part: Part) -> int:
        """Elements of the full tensor that share a magnitude."""
        if self.magnitude == "row" or (part.by_row and self.embeddings == "row"):
            return part.row
        return self.block if self.magnitude == "block" else max(1, part.numel)

    def _span(self, part: Part) -> tuple[int, int]:
        """The groups that the range touches: first, and one after the last."""
        group = self.group(part)
        return part.lo // group, -(-part.hi // group) if part.size else part.lo // group

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        first, after = self._span(part)
        return 4 * (after - first) + p.padded(-(-part.size // 8))

    def nbytes(self, layout: Layout) -> int:
        """1 bit a number, each part padded to 4 bytes, and 4 bytes a magnitude."""
        return p.nbytes(self, layout)

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """Per tensor [2, groups of the full tensor], float64: sum|D| over the elements carried, and how many they are. Sums of disjoint
        layouts (the ranks of a site) add up."""
        result: Stats = {}
        size = p.scratch_size(layout)
        narrow, wide = np.empty(size, np.float32), np.empty(size, np.float64)
        for part in layout:
            group = self.group(part)
            if part.name not in result:
                result[part.name] = torch.zeros(2, -(-part.numel // group), dtype=torch.float64)
            sums, counts = result[part.name].numpy()
            values = p.source(tree, part)
            for a in range(0, part.size, p.CHUNK):
                v = values[a : a + p.CHUNK]
                d = wide[: v.size]
                np.copyto(d, np.abs(v, out=narrow[: v.size]))
                for lo, hi, g, n in _runs(part.lo + a, part.lo + a + v.size, group):
                    # Pairwise summation for one long group; einsum is the fast way to sum many short rows.
                    sums[g : g + n] += np.add.reduce(d[lo:hi]) if n == 1 else np.einsum("ij->i", d[lo:hi].reshape(n, -1))
                    counts[g : g + n] += (hi - lo) // n
        return result

    def _magnitudes(self, stats: Stats, part: Part) -> p.Floats:
        """float32(sum|D| / count) of the groups that the range touches; 0 where nothing was counted."""
        first, after = self._span(part)
        want = (2, -(-part.numel // self.group(part)))
        s = stats.get(part.name)
        if s is None or s.dtype != torch.float64 or tuple(s.shape) != want:
            got = "nothing" if s is None else f"{s.dtype} of shape {tuple(s.shape)}"
            raise BadInput(
                f"the statistics hold {got} for {part.name!r}, expected float64 of shape {want}: pass what {self}.stats returned"
            )
        both = s.detach().cpu().numpy()[:, first:after]
        mean = np.zeros(after - first)
        np.divide(both[0], both[1], out=mean, where=both[1] != 0)
        return mean.astype(np.float32)

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Writes magnitudes and bits. Returns how many exact zeros will be decoded as +m with m > 0.
        BadInput where tree, layout, statistics and `out` do not fit."""
        zeros = 0
        scratch = np.empty(p.scratch_size(layout), np.bool_)
        for part, values, raw in p.encoding(self, tree, layout, out):
            m = self._magnitudes(stats, part)
            raw[: 4 * m.size].view(p.F4)[:] = m
            bits = raw[4 * m.size :]
            for a in range(0, part.size, p.CHUNK):
                v = values[a : a + p.CHUNK]
                mask = scratch[: v.size]
                packed = np.packbits(np.greater_equal(v, 0, out=mask), bitorder="little")
                bits[a // 8 : a // 8 + packed.size] = packed
                np.equal(v, 0, out=mask)
                if np.count_nonzero(mask):
                    zeros += self._lost(part, a, mask, m)
        return zeros

    def _lost(self, part: Part, a: int, zero: NDArray[np.bool_], m: p.Floats) -> int:
        """Of the zeros among the elements from a of the range, those in groups of magnitude above 0."""
        group, first = self.group(part), part.lo // self.group(part)
        lost = 0
        for lo, hi, g, n in _runs(part.lo + a, part.lo + a + zero.size, group):
            alive = m[g - first : g - first + n] > 0
            lost += int(np.count_nonzero(zero[lo:hi].reshape(n, -1)[alive]))
        return lost

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc += (weight * m) * (2s - 1) with weight * m rounded to float32 once, which is the same as weight * decoded.
        BadInput where payload, layout and `acc` do not fit."""
        w = np.float32(weight)
        scratch = np.empty((-(-p.scratch_size(layout) // 8), 8), np.float32)
        for part, raw, target in p.decoding(self, payload, layout, acc):
            group = self.group(part)
            first, after = self._span(part)
            scaled = raw[: 4 * (after - first)].view(p.F4) * w
            bits = raw[4 * (after - first) :]
            table = _SIGNS * scaled[0] if scaled.size == 1 else _SIGNS
            for a in range(0, part.size, p.CHUNK):
                piece = target[a : a + p.CHUNK]
                rows = -(-piece.size // 8)
                # "clip" only spares the check of the indices (a byte is never out of range) and with it a buffered copy.
                np.take(table, bits[a // 8 : a // 8 + rows], axis=0, out=scratch[:rows], mode="clip")
                values = scratch[:rows].reshape(-1)[: piece.size]
                if scaled.size > 1:
                    for lo, hi, g, n in _runs(part.lo + a, part.lo + a + piece.size, group):
                        grouped = values[lo:hi].reshape(n, -1)
                        np.multiply(grouped, scaled[g - first : g - first + n, None], out=grouped)
                np.add(piece, values, out=piece)
