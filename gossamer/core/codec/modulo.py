"""Numbers modulo a range: what Moniqua (Lu and De Sa 2020, arXiv 2002.11787) sends in gossip, with b bits a number.

A block of z has a step s = 2^e. With a dither u in [0, 1) that all workers share, k = floor(z / s + u) and k mod 2^b is sent. Two packets
tell k_j - k_i as long as it is below 2^(b-1) in size, so the difference is

    delta_ij = s * wrap(c_j - c_i),    |z_j - z_i| <= (2^(b-1) - 1) s  makes it right

of mean z_j - z_i over the dither, and with an error that vanishes with the difference itself:

    E delta^2 = d^2 + s^2 f (1 - f),   f = |d| / s - floor(|d| / s)      (so s |d| for |d| < s, and 0 at d = 0)

>>> import torch
>>> from gossamer.core.tree import layout_of
>>> a, b = {"w": torch.tensor([100.0, -7.0])}, {"w": torch.tensor([100.5, -7.5])}
>>> codec, layout = Modulo(bits=8), layout_of(a)
>>> said = []
>>> for z in (a, b):
...     said.append(torch.empty(codec.nbytes(layout), dtype=torch.uint8))
...     _ = codec.encode(z, {"w": torch.tensor([0.5, 0.5])}, layout, codec.start(layout), 0, said[-1])
>>> meeting = codec.meet(a, said[0], layout, 0)
>>> meeting.hear(said[1], 0.5)
{}
>>> meeting.mixed["w"].round(decimals=2).tolist(), said[0].numel()
([100.25, -7.25], 4)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec.pair import Wrong
from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, uniform, words
from gossamer.core.tree import Layout, Part, Tree

PRIME = 251
"""Check sums are modulo this: the largest prime that a byte holds."""
TAIL = 4.5
"""How many times its mean the largest of a block's differences is taken to be; 4.1 for 256 normal ones."""
_BIAS = 128
"""A step 2^e travels as the byte e + 128; 0 is none."""
_LOWEST, _HIGHEST = -120, 105
"""Exponents of steps: the inverse of one is a float32, and so is 2^22 times one."""
_DIGITS = 22
"""A step is at least 2^-22 of the largest number of its block: |k| stays below 2^22, which float32 holds exactly."""
_GOLDEN = 0.6180339887498949

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Modulo:
    """`bits` a number, one step and one check sum (a byte each) per block of `block` numbers. See the module for what is sent.

    **Mean.** delta_ij is a function of the two packets, the same on both ends but for its sign, so a symmetric W keeps the mean over
    workers to rounding, wherever the ranges are and whether they hold or not. Steps are powers of two, so that unlike steps have a common
    range (the smaller one) and all arithmetic is exact.

    **Outside the range.** h = sum_l a_l k_l mod 251, with fixed a_l, is linear in k, so both ends can hold h_j - h_i against
    sum_l a_l wrap(c_j - c_i)_l, and come to the same verdict. One number outside the range is found unless it is off by a multiple of 251
    ranges; of blocks with several, one in 251 passes, and moves by at most half a range then, mean kept. What does not pass goes in full.

    **Ranges.** A block's range widens at once to what was last seen in it, and to the widest heard; in every second round it halves where
    `margin` times what was seen still fits, so that workers agree on most ranges. It always holds twice the worker's own largest
    drift: two workers' drifts are apart by no more, if they are alike in size. Seen is max |delta|, but not above 4.5 times the mean
    |delta| (unbiased, while a coarse grid makes a whole step of the smallest difference), nor below max |delta| less a step.

    **How much is mixed** (`adaptive`): per block and pair, the difference is multiplied by alpha = D2 / mean(delta^2) <= 1, where D2 is
    the larger of two lower bounds of the mean of d^2: (mean |delta|)^2 and mean(delta^2) - s^2 / 4. For a pair of weight w = 1/2,
    E |d'|^2 = (1 - alpha)^2 d^2 + alpha^2 v with v = E delta^2 - d^2, smallest at alpha = d^2 / (d^2 + v), where it is (1 - alpha) d^2: it
    contracts at any number of bits, as exact mixing does that takes place in a share alpha of the rounds. Both ends see the same packets,
    so W stays symmetric.

    **One bit.** One bit modulo 2 s tells that two numbers differ by an odd multiple of s, not in which direction. Two bits tell it, and
    are sent of every other number, even and odd places in turn: one bit a number and round.

    Payload of a part: a step byte and a check byte for each block, then the codes, lowest bits first, padded to 4 bytes.
    """

    bits: int = 8
    """1, 2, 4 or 8."""
    block: int = 256
    """Numbers that share a step: a multiple of 8."""
    margin: float = 1.5
    """A range halves when the half would hold this many times the largest difference last seen."""
    adaptive: bool = True
    """False: alpha = 1."""

    id: ClassVar[int] = 7
    version: ClassVar[int] = 1
    of_drift: ClassVar[bool] = False
    by_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise BadInput(f"bits of codec modulo = {self.bits!r}: expected 1, 2, 4 or 8")
        p.checked_int("block of codec modulo", self.block, 8, 1 << 18)
        if self.block % 8:
            raise BadInput(f"block of codec modulo = {self.block}: expected a multiple of 8")
        if not 1.0 <= self.margin <= 1e6:
            raise BadInput(f"margin of codec modulo = {self.margin}: expected 1 or more, and at most 1e6 (1.5 is usual)")

    @property
    def width(self) -> int:
        """Bits of a code."""
        return max(2, self.bits)

    @property
    def every(self) -> int:
        """A round sends every so many-th number."""
        return 2 if self.bits == 1 else 1

    @property
    def reach(self) -> int:
        """Steps that a difference may be long: 2^(b-1) - 1."""
        return (1 << (self.width - 1)) - 1

    def blocks(self, part: Part) -> int:
        """Blocks of a part, counted from the start of its range."""
        return -(-part.size // self.block)

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        codes = -(-part.size // self.every)
        return p.padded(2 * self.blocks(part) + -(-codes * self.width // 8))

    def nbytes(self, layout: Layout) -> int:
        """bits / 8 a number and 2 bytes a block, each part padded to 4."""
        return p.nbytes(self, layout)

    def start(self, layout: Layout) -> Tree:
        """No steps yet: uint8 zeros, one a block."""
        return {part.name: torch.zeros(self.blocks(part), dtype=torch.uint8) for part in layout}

    def encode(self, z: Tree, drift: Tree, layout: Layout, memory: Tree, round: int, out: Tensor) -> int:
        """Writes steps, check sums and codes. Returns 0. BadInput where trees, layout, memory and `out` do not fit."""
        mask, per_byte = (1 << self.width) - 1, 8 // self.width
        for part, values, raw in p.encoding(self, z, layout, out):
            count = self.blocks(part)
            known = memory[part.name].numpy()
            if known.shape != (count,):
                raise BadInput(f"the memory of codec modulo has {known.size} blocks of {part.name!r}, expected {count}: pass what it gave")
            moved = p.source(drift, part) if drift else None
            for rows, grid in self._grids(values, round):
                e = np.maximum(known[rows].astype(np.int32) - _BIAS, _finest(np.abs(grid).max(axis=1)))
                if moved is not None:
                    e = np.maximum(e, self.exponent_for(2 * self._largest(moved, rows)))
                e = np.clip(e, _LOWEST, _HIGHEST)
                k = np.multiply(grid, np.ldexp(np.float32(1), -e)[:, None], out=grid)
                k += _dither(grid.shape[1], round)
                np.floor(k, out=k)
                raw[rows] = e + _BIAS
                raw[count + rows.start : count + rows.stop] = np.mod(k.astype(np.float64) @ _factors(grid.shape[1]), PRIME)
                codes = (k.astype(np.int32) & mask).astype(np.uint8).reshape(-1, per_byte)
                packed = codes[:, 0].copy()
                for place in range(1, per_byte):
                    packed |= codes[:, place] << (place * self.width)
                self._codes(raw, count, rows)[:] = packed[: self._codes(raw, count, rows).size]
        return 0

    def meet(self, z: Tree, own: Tensor, layout: Layout, round: int) -> ModuloMeeting:
        """Begins a round's mixing, from a copy of z."""
        return ModuloMeeting(self, z, own, layout, round)

    def unpacked(self, raw: p.Bytes, count: int, rows: slice) -> tuple[Ints, Ints, Ints]:
        """Of some blocks of a part's payload: exponents of the steps [rows], check sums [rows], codes [rows, numbers]."""
        per_byte, width = 8 // self.width, self.block // self.every
        codes = np.zeros(((rows.stop - rows.start) * width // per_byte, per_byte), np.uint8)
        packed = self._codes(raw, count, rows)
        for place in range(per_byte):
            codes[: packed.size, place] = packed >> (place * self.width)
        codes &= (1 << self.width) - 1
        e, check = raw[rows].astype(np.int32) - _BIAS, raw[count + rows.start : count + rows.stop].astype(np.int32)
        return e, check, codes.reshape(-1, width).astype(np.int32)

    def spans(self, count: int) -> Iterator[slice]:
        """The blocks of a part in steps that stay in cache."""
        step = max(1, p.CHUNK // self.block)
        for a in range(0, count, step):
            yield slice(a, min(a + step, count))

    def sent(self, values: p.Floats, rows: slice, round: int) -> p.Floats:
        """The numbers of some blocks that are sent in `round`: a view."""
        first = (round + rows.start * self.block) % self.every
        return values[rows.start * self.block : rows.stop * self.block][first :: self.every]

    def exponent_for(self, difference: p.Floats) -> Ints:
        """Of the smallest step whose range holds a difference, ceil(log2(difference / reach)); the lowest for 0."""
        m, e = np.frexp(difference / np.float32(self.reach))
        return np.where(difference > 0, e - (m == 0.5), _LOWEST).astype(np.int32)

    def _codes(self, raw: p.Bytes, count: int, rows: slice) -> p.Bytes:
        """Where the codes of some blocks lie; cut short at the part's end."""
        size = self.block // self.every * self.width // 8
        return raw[2 * count + rows.start * size : 2 * count + rows.stop * size]

    def _grids(self, values: p.Floats, round: int) -> Iterator[tuple[slice, p.Floats]]:
        """What is sent, block by block: (blocks, a copy [blocks, numbers], short blocks filled with zeros)."""
        width = self.block // self.every
        for rows in self.spans(-(-values.size // self.block)):
            grid = np.zeros((rows.stop - rows.start) * width, np.float32)
            sent = self.sent(values, rows, round)
            grid[: sent.size] = sent
            yield rows, grid.reshape(-1, width)

    def _largest(self, values: p.Floats, rows: slice) -> p.Floats:
        """The largest size in each of some blocks."""
        part = np.abs(values[rows.start * self.block : rows.stop * self.block])
        starts = np.arange(0, part.size, self.block)
        found: p.Floats = np.maximum.reduceat(part, starts)
        return found


class ModuloMeeting:
    """One worker's side of a round of `Modulo`."""

    def __init__(self, codec: Modulo, z: Tree, own: Tensor, layout: Layout, round: int) -> None:
        self._codec, self._like, self._own, self._layout, self._round = codec, z, own, layout, round
        self._z = {part.name: p.source(z, part) for part in layout}
        self._mixed = {name: values.copy() for name, values in self._z.items()}
        self._seen = {part.name: np.zeros(codec.blocks(part), np.float32) for part in layout}
        self._steps = {part.name: raw[: codec.blocks(part)].copy() for part, raw in p.to_read(codec, own, layout)}

    @property
    def mixed(self) -> Tree:
        """z plus what was heard so far, where z is."""
        return {
            name: torch.from_numpy(values).view(self._like[name].shape).to(self._like[name].device) for name, values in self._mixed.items()
        }

    def hear(self, payload: Tensor, weight: float) -> Wrong:
        """Adds weight * alpha * delta; returns the blocks outside the range. BadInput where the payload does not fit."""
        codec, wrong, w = self._codec, Wrong(), np.float32(weight)
        mine = p.to_read(codec, self._own, self._layout)
        for (part, own), (_, other) in zip(mine, p.to_read(codec, payload, self._layout), strict=True):
            count = codec.blocks(part)
            bad = np.zeros(count, np.bool_)
            np.maximum(self._steps[part.name], other[:count], out=self._steps[part.name])
            for rows in codec.spans(count):
                spot = codec.sent(self._mixed[part.name], rows, self._round)
                delta, unit, apart, bad[rows] = _differences(codec, codec.unpacked(own, count, rows), codec.unpacked(other, count, rows))
                size = np.abs(delta)
                valid, seen = _valid(size.shape, spot.size), self._seen[part.name][rows]
                np.maximum(seen, _largest(size, valid, apart) * unit, out=seen)
                gain = unit * w
                if codec.adaptive:
                    gain = gain * _alpha(size, valid, apart)
                spot += (delta.astype(np.float32) * gain[:, None]).reshape(-1)[: spot.size]
            if bad.any():
                wrong[part.name] = bad
        return wrong

    def full(self, wrong: Wrong) -> Tensor:
        """The worker's own z of those blocks, as float32 bytes."""
        pieces = [self._z[part.name][places] for part, places in self._places(wrong)]
        joined = np.concatenate([np.zeros(0, np.float32), *pieces]).astype(p.F4, copy=False)
        return torch.from_numpy(joined.view(np.uint8))

    def hear_full(self, payload: Tensor, wrong: Wrong, weight: float) -> None:
        """Adds weight * (z_j - z_i) in those blocks."""
        values, at, block = payload.numpy().view(p.F4), 0, self._codec.block
        for part, places in self._places(wrong):
            own = self._z[part.name][places]
            delta = values[at : at + own.size] - own
            at += own.size
            self._mixed[part.name][places] += delta * np.float32(weight)
            np.maximum.at(self._seen[part.name], places // block, np.abs(delta))

    def memory(self) -> Tree:
        """The steps of the next round."""
        found: Tree = {}
        for name, seen in self._seen.items():
            now = self._steps[name].astype(np.int32) - _BIAS
            halves = (self._codec.exponent_for(seen * np.float32(self._codec.margin)) < now) & (self._round % 2 == 1)
            e = np.clip(np.maximum(self._codec.exponent_for(seen), now - halves), _LOWEST, _HIGHEST)
            found[name] = torch.from_numpy((e + _BIAS).astype(np.uint8))
        return found

    def _places(self, wrong: Wrong) -> Iterator[tuple[Part, NDArray[np.int64]]]:
        """Where in their parts the numbers of those blocks are."""
        block = self._codec.block
        for part in self._layout:
            if part.name in wrong:
                places = (np.flatnonzero(wrong[part.name])[:, None] * block + np.arange(block)).reshape(-1)
                yield part, places[places < part.size]


def _differences(
    codec: Modulo, mine: tuple[Ints, Ints, Ints], other: tuple[Ints, Ints, Ints]
) -> tuple[Ints, p.Floats, Ints, NDArray[np.bool_]]:
    """Block by block: delta in units of the smaller step [rows, numbers], 0 where wrong; that unit; how many times the larger step was
    halved to it; and whether the block is wrong."""
    (e_i, h_i, c_i), (e_j, h_j, c_j) = mine, other
    e, half = np.minimum(e_i, e_j), 1 << (codec.width - 1)
    apart = np.maximum(e_i, e_j) - e
    up_i, up_j = np.minimum(e_i - e, codec.width), np.minimum(e_j - e, codec.width)
    delta = (((c_j << up_j[:, None]) - (c_i << up_i[:, None]) + half) & (2 * half - 1)) - half
    told = delta.astype(np.float64) @ _factors(delta.shape[1])
    passes = np.mod((h_i << up_i) + told - (h_j << up_j), PRIME) == 0
    bad = ~passes | (apart >= codec.width) | (delta == -half).any(axis=1)
    delta[bad] = 0
    return delta, np.ldexp(np.float32(1), e), apart, bad


def _largest(size: Ints, valid: Ints, apart: Ints) -> p.Floats:
    """The largest |d| of each block, as far as |delta| tells it: at least max |delta| less a step; and not above TAIL times the mean, whose
    expectation is that of |d|, since a coarse grid makes a whole step of the smallest difference."""
    largest, mean = size.max(axis=1), size.sum(axis=1) / valid
    found: p.Floats = np.maximum(largest - np.exp2(apart), np.minimum(largest, TAIL * mean)).astype(np.float32)
    return found


def _alpha(size: Ints, valid: Ints, apart: Ints) -> p.Floats:
    """How much of each block's difference is taken: see `Modulo`. `size`: |delta| in units of the smaller step, [rows, numbers]."""
    first, second = size.sum(axis=1) / valid, np.square(size).sum(axis=1) / valid
    noise = np.where(apart == 0, 0.25, np.square((1.0 + np.exp2(apart)) / 2.0))
    lower = np.maximum(second - noise, np.where(apart == 0, np.square(first), 0.0))
    alpha = np.zeros(len(size))
    np.divide(lower, second, out=alpha, where=second > 0)
    found: p.Floats = np.clip(alpha, 0.0, 1.0).astype(np.float32)
    return found


def _valid(shape: tuple[int, ...], count: int) -> Ints:
    """How many numbers of each block there are, `count` in all."""
    starts = np.arange(shape[0]) * shape[1]
    return np.clip(count - starts, 1, shape[1]).astype(np.int32)


def _finest(largest: p.Floats) -> Ints:
    """The smallest exponent under which numbers of that size have |k| < 2^22."""
    _, e = np.frexp(largest)
    return np.where(largest > 0, e - _DIGITS, _LOWEST).astype(np.int32)


@lru_cache(maxsize=8)
def _factors(numbers: int) -> NDArray[np.float64]:
    """The a_l of the check sum, from 1 to 250."""
    return (words(numbers, 0, Stream.DITHER) % np.uint64(PRIME - 1)).astype(np.float64) + 1.0


@lru_cache(maxsize=8)
def _dither(numbers: int, round: int) -> p.Floats:
    """u of each place in a block: evenly spread over a block, and uniform over the rounds. Multiples of 2^-12, so that z / s + u is
    exact while k has 12 bits."""
    u = np.mod(uniform(1, 0, Stream.DITHER, round)[0] + _GOLDEN * np.arange(numbers), 1.0)
    found: p.Floats = (np.floor(u * 4096.0) / 4096.0).astype(np.float32)
    return found
