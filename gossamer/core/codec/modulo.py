"""Numbers modulo a range: what Moniqua (Lu and De Sa 2020, arXiv 2002.11787) sends in gossip, with b bits a number, of rotated blocks.

A block of z, B numbers, is rotated with signs that all workers share (`gossamer.core.codec.rotation`) to X. It has a step s = 2^e. With a
dither u in [0, 1), also shared, k = floor(X / s + u) and k mod 2^b is sent. Two packets tell k_j - k_i as long as it is below
half = 2^(b-1) in size:

    delta_ij = s * wrap(c_j - c_i),    |X_j - X_i| <= (half - 1) s  makes it right,    wrap to (-half, half), and half itself to 0

of mean X_j - X_i over the dither, and with an error that vanishes with the difference itself:

    E delta^2 = d^2 + s^2 f (1 - f),   f = |d| / s - floor(|d| / s)      (so s |d| for |d| < s, and 0 at d = 0)

Rotated back and divided by B it is the difference of the block.

>>> import torch
>>> from gossamer.core.tree import layout_of
>>> a, b = {"w": torch.tensor([100.0, -7.0])}, {"w": torch.tensor([100.5, -7.5])}
>>> codec, layout = Modulo(bits=8), layout_of(a)
>>> said = []
>>> for z in (a, b):
...     said.append(torch.empty(codec.nbytes(layout), dtype=torch.uint8))
...     memory = codec.start(layout)
...     _ = codec.encode(z, {"w": torch.tensor([0.5, 0.5])}, layout, memory, 0, said[-1])
>>> meeting = codec.meet(a, said[0], layout, 0)
>>> meeting.hear(said[1], 0.5)
{}
>>> [round(v, 1) for v in meeting.mixed["w"].tolist()], said[0].numel()
([100.2, -7.2], 12)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec.codes import Coded, Ints, checks, pack, tell, unpack
from gossamer.core.codec.pair import Wrong
from gossamer.core.codec.rotation import rotated, turned_back
from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, uniform
from gossamer.core.tree import Layout, Part, Tree

KEEP = 2.2
"""A step stays while it is at most so many times the least that its block needs; a new one is at most twice that."""
GROWTH = 4.0
"""Differences are expected to grow as many times as the own drift of their tensor has, up to this."""
FALL = 2
"""Octaves by which a step may fall in a round."""
_CHUNK = 1 << 16
"""Numbers worked on at a time: scratch of this size, six times over, stays in a cache."""
_BIAS = 128
"""A step 2^e travels as the byte e + 128."""
_LOWEST, _HIGHEST = -120, 105
"""Exponents of steps: the inverse of one is a float32, and so is 2^22 times one."""
_DIGITS = 22
"""A step is at least 2^-22 of the largest coordinate of its block: |k| stays below 2^22, which float32 holds exactly."""
_GOLDEN = 0.6180339887498949
_LEAST = {2: 1.35, 4: 0.55, 8: 0.05}
"""s / (root mean square of a block's rotated differences), at least: by bits of a code."""
_STEP, _SEEN, _MOVED = 0, 1, 2
"""Rows of the memory: exponents in force, differences seen and own drifts (lengths of blocks as vectors)."""


class Span(NamedTuple):
    """Some blocks of one part that are worked on together."""

    rows: slice
    """Which blocks."""
    size: int
    """Numbers of each when rotated, a power of two."""
    lo: int
    hi: int
    """Their numbers in the part. Fewer than rows x size where the last block is filled up with zeros."""
    codes: slice
    """Their codes in the part's payload."""


@dataclass(frozen=True)
class Modulo:
    """`bits` a number, one step and one check (a byte each) per block of `block` numbers. See the module for what is sent.

    **Mean.** delta_ij is a function of the two packets, the same on both ends but for its sign, so a symmetric W keeps the mean over
    workers to rounding, wherever the ranges are and whether they hold or not. Steps are powers of two, so that unlike steps have a common
    range (the smaller one) and all arithmetic on differences is exact.

    **Ranges.** Rotated, the differences of a block are near normal, with its length as standard deviation. So a block's step follows one
    number, r: the length of the difference last seen ((pi/2)^(1/2) times mean |delta|, which is unbiased), times |D| / |D_before| where the
    worker's own drift of the tensor has grown (up to 4 times). |D_before| follows |D| by half of the way, in octaves, in each round, since
    what is left of larger differences, and what an outer momentum repeats, comes a round or two later. With D of the block, r^2 is at least
    r_seen^2 + 2 max(0, |D|^2 - |D_before|^2), as two independent drifts differ by 2 |D|^2: so before anything was seen r^2 = 2 |D|^2.
    s is the smallest power of two >= c r, with c = 0.05, 0.55, 1.35 at 8, 4, 2 bits: ranges of 6.4, 4.1 and 2 standard deviations at
    least. The step in force stays while it is c r to 2.2 c r; the one in force is the widest that the worker heard, so that workers agree
    on most. It falls by at most two octaves a round.

    **Outside the range.** 8 and 4 bits: h = sum_l a_l k_l mod 251, with fixed a_l, is linear in k, so both ends can hold h_j - h_i against
    sum_l a_l wrap(c_j - c_i)_l, and come to the same verdict. One coordinate outside the range is found unless it is off by a multiple of
    251 ranges; of blocks with several, one in 251 passes, mean kept. 2 bits: single coordinates outside do little harm, and the best step
    has some (one in 12 at c = 1.2). A block is outside where the sign of more than 3/16 of its differences is open (half a range, taken as
    0), or where one coordinate, another one each round, of which 10 bits are sent, is. What is outside goes in full.

    **How much is mixed** (`adaptive`): per block and pair of weight w, the difference is multiplied by

        alpha = d^2 / (d^2 + 2 w v) <= 1,   d^2 = max((pi/2) (mean |delta|)^2, mean(delta^2) - s^2 / 4),   v = mean(delta^2) - d^2

    (`patience` times v). Both ends see the same packets, so W stays symmetric.

    **When it contracts.** Let all edges have weight w (1/2 on one_peer, 1/4 on two_peer), E[Lambda] = l1 pi, E[Lambda^2] = l2 pi, and
    beta = v / d^2. Noise on the edges is independent of d, so a round multiplies the mean square disagreement by

        1 - 2 alpha l1 + alpha^2 (l2 + 2 w l1 beta)        below 1 if alpha < 2 l1 / (l2 + 2 w l1 beta)

    At alpha = 1 that needs beta < (2 l1 - l2) / (2 w l1), 2 l1 - l2 being what exact mixing takes away: 1 on one_peer, 5/2 on two_peer.
    For normal differences and c = s / d, beta = c^2 / 6 up to c = 1 and (2/pi)^(1/2) c - 1 from c = 2 on. A range of t standard deviations
    makes c = t / (half - 1): b bits contract at alpha = 1 on pairs if t <= 2.5 (half - 1), which 2 bits fail with t = 4. With alpha =
    1 / (1 + 2 w beta), as here, the factor is at most 1 - alpha l1 (l2 <= l1) and below 1 at any beta: always.
    With a fixed step and alpha = 1, v <= s^2 / 4, and disagreement ends at a mean square of at most (w s^2 / 8) / (2 l1 - l2).

    **One bit.** One bit modulo 2 s tells that two numbers differ by an odd multiple of s, not in which direction. Two bits tell it, and
    are sent of half the coordinates: new signs each round make it a new half of the space.

    Payload of a part: a step byte and a check byte for each block, then the codes, padded to 4 bytes. A last block that is not full is
    filled up to a power of two, 8 at least.
    """

    bits: int = 8
    """1, 2, 4 or 8."""
    block: int = 256
    """Numbers that share a step: a power of two, up to 1024 (float32 sums of their codes are exact)."""
    adaptive: bool = True
    """False: alpha = 1."""
    patience: float = 1.0
    """How many times its own size the noise of a round does harm: more than 1 with an outer momentum, which repeats it."""

    id: ClassVar[int] = 7
    version: ClassVar[int] = 2
    of_drift: ClassVar[bool] = False
    by_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise BadInput(f"bits of codec modulo = {self.bits!r}: expected 1, 2, 4 or 8")
        p.checked_int("block of codec modulo", self.block, 8, 1024)
        if self.block & (self.block - 1):
            raise BadInput(f"block of codec modulo = {self.block}: expected a power of two")
        if not 1.0 <= self.patience <= 1e6:
            raise BadInput(f"patience of codec modulo = {self.patience}: expected 1 or more, and at most 1e6")

    @property
    def width(self) -> int:
        """Bits of a code."""
        return max(2, self.bits)

    @property
    def every(self) -> int:
        """One in so many coordinates is sent."""
        return 2 if self.bits == 1 else 1

    @property
    def reach(self) -> int:
        """Steps that a difference may be long: 2^(b-1) - 1."""
        return (1 << (self.width - 1)) - 1

    @property
    def least(self) -> float:
        """c: a step is at least so many times the root mean square of its block's rotated differences."""
        return _LEAST[self.width]

    def blocks(self, part: Part) -> int:
        """Blocks of a part, counted from the start of its range."""
        return -(-part.size // self.block)

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        return p.padded(max((span.codes.stop for span in self.spans(part.size)), default=0))

    def nbytes(self, layout: Layout) -> int:
        """bits / 8 a number and 2 bytes a block, each part padded to 4."""
        return p.nbytes(self, layout)

    def start(self, layout: Layout) -> Tree:
        """Nothing seen: float32 [3, blocks]."""
        memory = {part.name: torch.zeros(3, self.blocks(part)) for part in layout}
        for known in memory.values():
            known[_STEP] = _LOWEST
        return memory

    def encode(self, z: Tree, drift: Tree, layout: Layout, memory: Tree, round: int, out: Tensor) -> int:
        """Writes steps, checks and codes; notes the drift's size in `memory`. Returns 0. BadInput where trees, layout, memory and `out` do
        not fit."""
        for part, values, raw in p.encoding(self, z, layout, out):
            count = self.blocks(part)
            known = memory[part.name].numpy()
            if known.shape != (3, count):
                raise BadInput(
                    f"the memory of codec modulo has shape {known.shape} for {part.name!r}, expected {(3, count)}: pass what it gave"
                )
            if drift and count:
                moved, before = p.source(drift, part), known[_MOVED].copy()
                now = np.concatenate([_lengths(_grid(moved, span)) for span in self.spans(part.size)])
                known[_SEEN] = _grown(known[_SEEN], before, now)
                known[_MOVED] = np.where(before > 0, np.sqrt(before * now), now)
            for span in self.spans(part.size):
                rows = span.rows
                X = rotated(_grid(values, span), round)[:, : span.size // self.every]
                e = np.maximum(self._steps(known[:, rows]), _finest(np.maximum(X.max(axis=1), -X.min(axis=1))))
                e = np.clip(e, _LOWEST, _HIGHEST)
                k = np.multiply(X, np.ldexp(np.float32(1), -e)[:, None])
                k += _dither(k.shape[1], round)
                np.floor(k, out=k)
                raw[rows] = e + _BIAS
                raw[count + rows.start : count + rows.stop] = checks(k, self.width, round)
                codes = np.ascontiguousarray(k.astype(np.int32).astype(np.uint8))
                raw[span.codes] = pack(codes, self.width)
        return 0

    def meet(self, z: Tree, own: Tensor, layout: Layout, round: int) -> ModuloMeeting:
        """Begins a round's mixing, from a copy of z."""
        return ModuloMeeting(self, z, own, layout, round)

    def spans(self, numbers: int) -> Iterator[Span]:
        """The blocks of a part in steps that stay in cache, and the last block alone if it is not full."""
        full, rest, step = numbers // self.block, numbers % self.block, max(1, _CHUNK // self.block)
        at = 2 * (full + bool(rest))
        for a in range(0, full, step):
            b = min(a + step, full)
            end = at + (b - a) * self.block * self.width // (8 * self.every)
            yield Span(slice(a, b), self.block, a * self.block, b * self.block, slice(at, end))
            at = end
        if rest:
            size = max(8, 1 << (rest - 1).bit_length())
            yield Span(slice(full, full + 1), size, full * self.block, numbers, slice(at, at + size * self.width // (8 * self.every)))

    def unpacked(self, raw: p.Bytes, count: int, span: Span) -> Coded:
        """Of some blocks of a part's payload: exponents of the steps [rows], checks [rows], codes [rows, coordinates] (low bits)."""
        rows = span.rows
        codes = unpack(raw[span.codes].reshape(rows.stop - rows.start, -1), self.width)
        return Coded(raw[rows].astype(np.int32) - _BIAS, raw[count + rows.start : count + rows.stop].astype(np.int32), codes)

    def _steps(self, known: p.Floats) -> Ints:
        """Exponents of the steps, from the memory of some blocks."""
        before, need = known[_STEP].astype(np.int32), known[_SEEN] * np.float32(self.least)
        e, highest = _ceil_log2(need), _ceil_log2(need * np.float32(KEEP / 2))
        found: Ints = np.where((before >= e) & (before <= highest), before, np.maximum(e, before - FALL))
        return found


class ModuloMeeting:
    """One worker's side of a round of `Modulo`."""

    def __init__(self, codec: Modulo, z: Tree, own: Tensor, layout: Layout, round: int) -> None:
        self._codec, self._like, self._own, self._layout, self._round = codec, z, own, layout, round
        self._z = {part.name: p.source(z, part) for part in layout}
        self._mixed = {name: values.copy() for name, values in self._z.items()}
        self._seen = {part.name: np.zeros(codec.blocks(part), np.float32) for part in layout}
        self._steps = {part.name: raw[: codec.blocks(part)].copy() for part, raw in p.to_read(codec, own, layout)}
        self._met = False

    @property
    def mixed(self) -> Tree:
        """z plus what was heard so far, where z is."""
        return {
            name: torch.from_numpy(values).view(self._like[name].shape).to(self._like[name].device) for name, values in self._mixed.items()
        }

    def hear(self, payload: Tensor, weight: float) -> Wrong:
        """Adds weight * alpha * delta; returns the blocks outside the range. BadInput where the payload does not fit."""
        codec, wrong, w, self._met = self._codec, Wrong(), np.float32(weight), True
        mine = p.to_read(codec, self._own, self._layout)
        for (part, own), (_, other) in zip(mine, p.to_read(codec, payload, self._layout), strict=True):
            count, mixed, seen = codec.blocks(part), self._mixed[part.name], self._seen[part.name]
            bad = np.zeros(count, np.bool_)
            np.maximum(self._steps[part.name], other[:count], out=self._steps[part.name])
            for span in codec.spans(part.size):
                told = tell(codec.unpacked(own, count, span), codec.unpacked(other, count, span), codec.width, self._round)
                bad[span.rows] = told.bad
                np.maximum(seen[span.rows], told.length, out=seen[span.rows])
                gain = told.unit * w / np.float32(span.size)
                if codec.adaptive:
                    gain *= told.alpha(2 * w * np.float32(codec.patience))
                delta = told.delta
                if codec.every > 1:
                    delta = np.concatenate([delta, np.zeros_like(delta)], axis=1)
                step = turned_back(delta, self._round)
                step *= gain[:, None]
                mixed[span.lo : span.hi] += step.reshape(-1)[: span.hi - span.lo]
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
            squares = np.bincount(places // block, np.square(delta, dtype=np.float64), self._codec.blocks(part))
            np.maximum(self._seen[part.name], np.sqrt(squares).astype(np.float32), out=self._seen[part.name])

    def memory(self) -> Tree:
        """The steps in force, the widest heard, and the lengths seen; nothing where nobody was heard."""
        if not self._met:
            return {}
        rows = {name: (self._steps[name].astype(np.float32) - _BIAS, seen) for name, seen in self._seen.items()}
        return {name: torch.from_numpy(np.stack(known)) for name, known in rows.items()}

    def _places(self, wrong: Wrong) -> Iterator[tuple[Part, NDArray[np.int64]]]:
        """Where in their parts the numbers of those blocks are."""
        block = self._codec.block
        for part in self._layout:
            if part.name in wrong:
                places = (np.flatnonzero(wrong[part.name])[:, None] * block + np.arange(block)).reshape(-1)
                yield part, places[places < part.size]


def _grid(values: p.Floats, span: Span) -> p.Floats:
    """The numbers of some blocks, [rows, size]: a view where they are full."""
    found = values[span.lo : span.hi]
    if found.size < span.size * (span.rows.stop - span.rows.start):
        found = np.concatenate([found, np.zeros(span.size - found.size, np.float32)])
    return found.reshape(-1, span.size)


def _grown(seen: p.Floats, before: p.Floats, now: p.Floats) -> p.Floats:
    """The differences to expect after those of lengths `seen`, when a tensor's own drift has grown to `now` from `before`, by blocks."""
    whole = np.sqrt(np.square(now, dtype=np.float64).sum() / max(np.square(before, dtype=np.float64).sum(), 1e-60))
    fresh = np.sqrt(np.square(seen) + 2 * np.maximum(np.square(now) - np.square(before), 0))
    found: p.Floats = np.maximum(fresh, seen * np.float32(np.clip(whole, 1, GROWTH)))
    return found


def _lengths(grid: p.Floats) -> p.Floats:
    found: p.Floats = np.sqrt(np.einsum("ij,ij->i", grid, grid))
    return found


def _ceil_log2(x: p.Floats) -> Ints:
    """ceil(log2(x)); the lowest for 0."""
    m, e = np.frexp(x)
    return np.where(x > 0, e - (m == 0.5), _LOWEST).astype(np.int32)


def _finest(largest: p.Floats) -> Ints:
    """The smallest exponent under which coordinates of that size have |k| < 2^22."""
    _, e = np.frexp(largest)
    return np.where(largest > 0, e - _DIGITS, _LOWEST).astype(np.int32)


@lru_cache(maxsize=32)
def _dither(numbers: int, round: int) -> p.Floats:
    """u of each place in a block: evenly spread over a block, and uniform over the rounds. Multiples of 2^-12, so that X / s + u is
    exact while k has 12 bits."""
    u = np.mod(uniform(1, 0, Stream.DITHER, round)[0] + _GOLDEN * np.arange(numbers), 1.0)
    found: p.Floats = (np.floor(u * 4096.0) / 4096.0).astype(np.float32)
    return found
