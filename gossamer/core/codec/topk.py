"""The few largest numbers of each chunk, with their positions.

>>> import torch
>>> from gossamer.core.tree import layout_of, zeros_like
>>> tree = {"w": torch.tensor([0.1, -3.0, 0.2, 2.0])}
>>> codec, layout = TopK(share=0.5), layout_of(tree)
>>> out = torch.empty(codec.nbytes(layout), dtype=torch.uint8)
>>> codec.encode(tree, layout, {}, out), out.numel()
(0, 12)
>>> mean = zeros_like(tree)
>>> codec.accumulate(out, layout, mean, 1.0)
>>> mean["w"].tolist()
[0.0, -3.0, 0.0, 2.0]
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
from gossamer.core.codec.dense import read_16, write_16
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.tree import Layout, Part, Tree

_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _select(key: NDArray[np.int32], k: int) -> NDArray[np.int64]:
    """Columns of the k largest of each row of key [rows, n], ascending, [rows, k]. Among equals the lowest column wins."""
    n = key.shape[1]
    threshold = np.partition(key, n - k, axis=1)[:, n - k, None]
    keep = key >= threshold
    if np.count_nonzero(keep) > keep.shape[0] * k:  # ties at the threshold
        above, equal = key > threshold, key == threshold
        room = k - np.count_nonzero(above, axis=1, keepdims=True)
        keep = above | (equal & (np.cumsum(equal, axis=1) <= room))
    columns: NDArray[np.int64] = (np.flatnonzero(keep) % n).reshape(-1, k)
    return columns


def _largest(v: p.Floats, k: int) -> NDArray[np.int64]:
    """Positions of the k largest |v| of each row of v [rows, n], ascending, [rows, k]. Among equals the lowest position wins. A NaN
    counts as larger than any number, so that it is sent and not hidden."""
    key = v.view(np.int32) & np.int32(0x7FFFFFFF)  # the bits of |v|: ordered like |v| itself
    rows, n = key.shape
    if n % 8 or n < 16 * k:
        return _select(key, k)
    # A quick sieve: the k-th largest of n/8 maxima of disjoint groups is at most the k-th largest of all, and hardly smaller.
    peaks = key.reshape(rows, 8, n // 8).max(axis=1)
    bound = np.partition(peaks, n // 8 - k, axis=1)[:, n // 8 - k, None]
    found = np.flatnonzero(key >= bound)
    row, position = found // n, found % n
    counts = np.bincount(row, minlength=rows)
    column = np.arange(found.size) - (np.cumsum(counts) - counts)[row]
    few = np.full((rows, int(counts.max())), -1, np.int32)
    few[row, column] = key.reshape(-1)[found]
    where = np.zeros(few.shape, np.int64)
    where[row, column] = position
    return np.take_along_axis(where, _select(few, k), axis=1)


@dataclass(frozen=True)
class TopK:
    """Keeps k = max(1, round(share * n)) numbers of each chunk of n, those of largest |v| (SparseLoCo, arXiv 2508.15706).

    The rest decodes to zero: `accumulate` leaves it untouched. Chunks are counted from the start of each range; the last may be shorter.
    A part's bytes: its values, chunk by chunk in ascending position, then their positions within the chunk (uint16), then padding.
    """

    share: float = 1 / 64
    """Share of the numbers kept, above 0 and at most 1."""
    chunk: int = 4096
    """Elements of a chunk, at most 65536 (a position has 16 bits)."""
    values: Literal["fp32", "fp16", "bf16"] = "fp32"
    """How the kept numbers travel. The 16-bit forms round to nearest even and saturate."""

    id: ClassVar[int] = 6
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise BadInput(f"share of codec topk = {self.share!r}: expected a number above 0 and at most 1, such as 1/64")
        p.checked_int("chunk of codec topk", self.chunk, 1, 1 << 16)
        p.checked_name("values of codec topk", self.values, _WIDTH)

    @property
    def lossy(self) -> bool:
        """False only where everything is kept in float32."""
        return self.share != 1 or self.values != "fp32"

    def kept(self, n: int) -> int:
        """How many numbers a chunk of n keeps."""
        return max(1, round(self.share * n))

    def _total(self, part: Part) -> int:
        whole, rest = divmod(part.size, self.chunk)
        return whole * self.kept(self.chunk) + (self.kept(rest) if rest else 0)

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        return p.padded((_WIDTH[self.values] + 2) * self._total(part))

    def nbytes(self, layout: Layout) -> int:
        """Value and position of every number kept, each part padded to 4."""
        return p.nbytes(self, layout)

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """Nothing."""
        return {}

    def _pieces(self, part: Part) -> Iterator[tuple[int, int, int, int, int]]:
        """(first element, chunks, elements of each, kept of each, first kept) covering a range."""
        whole, rest = divmod(part.size, self.chunk)
        k, step = self.kept(self.chunk), max(1, p.CHUNK // self.chunk)
        for c in range(0, whole, step):
            yield c * self.chunk, min(step, whole - c), self.chunk, k, c * k
        if rest:
            yield whole * self.chunk, 1, rest, self.kept(rest), whole * k

    def _split(self, part: Part, raw: p.Bytes) -> tuple[p.Bytes, NDArray[np.uint16]]:
        total, width = self._total(part), _WIDTH[self.values]
        return raw[: width * total], raw[width * total : (width + 2) * total].view("<u2")

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Keeps the largest. Returns 0: zero is exact. BadInput where tree, layout and `out` do not fit."""
        width = _WIDTH[self.values]
        for part, values, raw in p.encoding(self, tree, layout, out):
            kept, positions = self._split(part, raw)
            for a, chunks, n, k, at in self._pieces(part):
                v = values[a : a + chunks * n].reshape(chunks, n)
                where = _largest(v, k)
                positions[at : at + chunks * k] = where.reshape(-1)
                chosen = np.take_along_axis(v, where, axis=1).reshape(-1)
                place = kept[width * at : width * (at + chosen.size)]
                if self.values == "fp32":
                    np.copyto(place.view(p.F4), chosen)
                else:
                    write_16(chosen, place, _HALVES[self.values], chosen)
        return 0

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc[position] += weight * value, multiply, then add; everything else is left as it is.

        Raises:
            BadInput: payload, layout and `acc` do not fit.
            RunFailed: a position lies outside its chunk.
        """
        w = np.float32(weight)
        width = _WIDTH[self.values]
        for part, raw, target in p.decoding(self, payload, layout, acc):
            kept, positions = self._split(part, raw)
            for a, chunks, n, k, at in self._pieces(part):
                place = kept[width * at : width * (at + chunks * k)]
                v = np.empty(chunks * k, np.float32)
                if self.values == "fp32":
                    np.copyto(v, place.view(p.F4))
                else:
                    read_16(place, _HALVES[self.values], v)
                where = positions[at : at + chunks * k].astype(np.int64).reshape(chunks, k)
                if where.max() >= n:
                    raise RunFailed(f"a top-k payload names position {where.max()} in a chunk of {n} elements of {part.name!r}: damaged")
                where += a + n * np.arange(chunks)[:, None]
                index = where.reshape(-1)
                target[index] += np.multiply(v, w, out=v)
