"""Codecs that send every number: float32 as it is, or rounded to 16 bits.

>>> import torch
>>> from gossamer.core.tree import layout_of, zeros_like
>>> tree = {"w": torch.tensor([1.0, -0.5, 1e6])}
>>> codec, layout = Fp16(), layout_of(tree)
>>> out = torch.empty(codec.nbytes(layout), dtype=torch.uint8)
>>> codec.encode(tree, layout, {}, out), out.numel()
(0, 8)
>>> mean = zeros_like(tree)
>>> codec.accumulate(out, layout, mean, 0.5)
>>> mean["w"].tolist()
[0.5, -0.25, 32752.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec.base import Stats
from gossamer.core.tree import Layout, Part, Tree


@dataclass(frozen=True)
class Fp32:
    """float32, unchanged: 4 bytes a number, lossless."""

    id: ClassVar[int] = 1
    version: ClassVar[int] = 1

    @property
    def lossy(self) -> bool:
        """False: decode(encode(x)) == x bit for bit."""
        return False

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        return 4 * part.size

    def nbytes(self, layout: Layout) -> int:
        """4 bytes a number."""
        return p.nbytes(self, layout)

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """Nothing."""
        return {}

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Copies. Returns 0. BadInput where tree, layout and `out` do not fit."""
        for _, values, raw in p.encoding(self, tree, layout, out):
            np.copyto(raw.view(p.F4), values)
        return 0

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc += weight * payload, multiply, then add. BadInput where payload, layout and `acc` do not fit."""
        w = np.float32(weight)
        scratch = np.empty(p.scratch_size(layout), np.float32)
        for _, raw, target in p.decoding(self, payload, layout, acc):
            values = raw.view(p.F4)
            for a in range(0, target.size, p.CHUNK):
                piece = values[a : a + p.CHUNK]
                if w == 1:
                    np.add(target[a : a + p.CHUNK], piece, out=target[a : a + p.CHUNK])
                else:
                    scaled = np.multiply(piece, w, out=scratch[: piece.size])
                    np.add(target[a : a + p.CHUNK], scaled, out=target[a : a + p.CHUNK])


def write_16(values: p.Floats, raw: p.Bytes, dtype: torch.dtype, scratch: p.Floats) -> None:
    """raw = round(clamp(values)) in a 16-bit dtype, to nearest even. Finite and infinite values beyond the largest finite number of the
    dtype become that number; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    np.clip(values, -limit, limit, out=scratch)
    torch.from_numpy(raw).view(dtype).copy_(torch.from_numpy(scratch))


def read_16(raw: p.Bytes, dtype: torch.dtype, scratch: p.Floats) -> p.Floats:
    """scratch = float32(raw), exactly."""
    torch.from_numpy(scratch).copy_(torch.from_numpy(raw).view(dtype))
    return scratch


class _Half:
    """What float16 and bfloat16 share. Both round to nearest even and saturate."""

    _dtype: ClassVar[torch.dtype]

    @property
    def lossy(self) -> bool:
        """True."""
        return True

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        return p.padded(2 * part.size)

    def nbytes(self, layout: Layout) -> int:
        """2 bytes a number, each part padded to 4."""
        return p.nbytes(self, layout)

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """Nothing."""
        return {}

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Rounds to nearest even; values beyond the largest finite number become that number. Returns 0: zero is exact.
        BadInput where tree, layout and `out` do not fit."""
        scratch = np.empty(p.scratch_size(layout), np.float32)
        for _, values, raw in p.encoding(self, tree, layout, out):
            for a in range(0, values.size, p.CHUNK):
                piece = values[a : a + p.CHUNK]
                write_16(piece, raw[2 * a : 2 * (a + piece.size)], self._dtype, scratch[: piece.size])
        return 0

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc += weight * float32(payload), multiply, then add. BadInput where payload, layout and `acc` do not fit."""
        w = np.float32(weight)
        scratch = np.empty(p.scratch_size(layout), np.float32)
        for _, raw, target in p.decoding(self, payload, layout, acc):
            for a in range(0, target.size, p.CHUNK):
                piece = target[a : a + p.CHUNK]
                values = read_16(raw[2 * a : 2 * (a + piece.size)], self._dtype, scratch[: piece.size])
                p.add_scaled(piece, values, w)


@dataclass(frozen=True)
class Fp16(_Half):
    """IEEE float16: 2 bytes a number, relative error at most 2^-11 from 6.1e-5 to 65504, absolute error at most 2^-25 below."""

    id: ClassVar[int] = 2
    version: ClassVar[int] = 1
    _dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Bf16(_Half):
    """bfloat16: 2 bytes a number, relative error at most 2^-8 over the range of float32's normal numbers."""

    id: ClassVar[int] = 3
    version: ClassVar[int] = 1
    _dtype: ClassVar[torch.dtype] = torch.bfloat16
