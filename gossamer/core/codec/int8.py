"""Eight bits a number, one float32 scale a block.

>>> import torch
>>> from gossamer.core.tree import layout_of, zeros_like
>>> tree = {"w": torch.tensor([127.0, -64.2, 0.4, 0.0])}
>>> codec, layout = Int8(block=4), layout_of(tree)
>>> out = torch.empty(codec.nbytes(layout), dtype=torch.uint8)
>>> codec.encode(tree, layout, {}, out)
0
>>> mean = zeros_like(tree)
>>> codec.accumulate(out, layout, mean, 1.0)
>>> mean["w"].tolist()
[127.0, -64.0, 0.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec.base import Stats
from gossamer.core.tree import Layout, Part, Tree

_SMALLEST = np.float32(2.0**-126)
"""The smallest normal float32: a smaller scale would lose the bits that make the error bound true."""


@dataclass(frozen=True)
class Int8:
    """Symmetric absmax quantisation: s = max|v| / 127 of each block, q = round(v / s) to nearest even, decoded q * s.

    |decoded - v| <= s / 2, up to float32 rounding. A block of zeros has scale 0. A block with an infinity or a NaN decodes to NaN.
    Blocks are counted from the start of each range. A part's bytes: its scales (float32), then its q (int8), then padding.
    """

    block: int = 256
    """Elements that share a scale."""

    id: ClassVar[int] = 4
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        p.checked_int("block of codec int8", self.block, 1, 2**31 - 1)

    @property
    def lossy(self) -> bool:
        """True."""
        return True

    def _blocks(self, part: Part) -> int:
        return -(-part.size // self.block)

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        return 4 * self._blocks(part) + p.padded(part.size)

    def nbytes(self, layout: Layout) -> int:
        """1 byte a number, each part padded to 4, and 4 bytes a block."""
        return p.nbytes(self, layout)

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """Nothing."""
        return {}

    @property
    def _step(self) -> int:
        return max(1, p.CHUNK // self.block) * self.block

    def _pieces(self, size: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
        """(elements, blocks, shape [blocks, elements of each]) covering a range: steps of whole blocks, then what is left."""
        whole = size // self.block * self.block
        for a in range(0, whole, self._step):
            b = min(a + self._step, whole)
            yield slice(a, b), slice(a // self.block, b // self.block), ((b - a) // self.block, self.block)
        if whole < size:
            yield slice(whole, size), slice(whole // self.block, whole // self.block + 1), (1, size - whole)

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Quantises. Returns 0: zero is exact. BadInput where tree, layout and `out` do not fit."""
        scratch = np.empty(p.scratch_size(layout, self._step), np.float32)
        with np.errstate(invalid="ignore"):
            for part, values, raw in p.encoding(self, tree, layout, out):
                split = 4 * self._blocks(part)
                scales, q = raw[:split].view(p.F4), raw[split : split + part.size].view(np.int8)
                for elements, blocks, shape in self._pieces(part.size):
                    v = values[elements].reshape(shape)
                    work = scratch[: v.size].reshape(shape)
                    largest = np.abs(v, out=work).max(axis=1)
                    s = np.where(largest == 0, np.float32(1), np.maximum(largest / np.float32(127), _SMALLEST))
                    scales[blocks] = np.where(largest == 0, np.float32(0), s)
                    np.divide(v, s[:, None], out=work)
                    np.copyto(q[elements].reshape(shape), np.rint(work, out=work), casting="unsafe")
        return 0

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc += weight * (q * s), each product rounded to float32, then added. BadInput where payload, layout and `acc` do not fit."""
        w = np.float32(weight)
        scratch = np.empty(p.scratch_size(layout, self._step), np.float32)
        with np.errstate(invalid="ignore"):
            for part, raw, target in p.decoding(self, payload, layout, acc):
                split = 4 * self._blocks(part)
                scales, q = raw[:split].view(p.F4), raw[split : split + part.size].view(np.int8)
                for elements, blocks, shape in self._pieces(part.size):
                    values = scratch[: elements.stop - elements.start]
                    np.copyto(values, q[elements])
                    grouped = values.reshape(shape)
                    np.multiply(grouped, scales[blocks, None], out=grouped)
                    p.add_scaled(target[elements], values, w)
