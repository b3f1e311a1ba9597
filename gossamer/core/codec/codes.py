"""Codes of b bits: packed, unpacked, checked, and what two workers' codes of the same blocks tell (`gossamer.core.codec.modulo`)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gossamer.core.codec.payload import Bytes, Floats
from gossamer.core.rng import Stream, words

PRIME = 251
"""Check sums are modulo this: the largest prime that a byte holds."""
ERASED = 3 / 16
"""2-bit codes: a block is outside its range where more than this share of its differences may be of either sign; 1/4 are where nothing is
told, and 1/8 where s is what the differences are in the mean square."""

Ints: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]


class Coded(NamedTuple):
    """What a packet says of some blocks."""

    e: Ints
    """Exponents of the steps, [rows]."""
    check: Ints
    """[rows]."""
    codes: Bytes
    """[rows, coordinates]; the low bits count."""


class Told(NamedTuple):
    """What two packets tell of the differences of some blocks, in units of the smaller step."""

    delta: Floats
    """[rows, coordinates]; 0 in blocks that are outside the range, and where the sign is open."""
    unit: Floats
    """The smaller step, [rows]."""
    apart: Ints
    """How many times the larger step was halved to it."""
    bad: Flags
    """Outside the range."""
    length: Floats
    """Of the blocks' differences as vectors, an estimate; 0 where bad."""

    def alpha(self, noise: np.float32) -> Floats:
        """d^2 / (d^2 + noise v): see `Modulo`."""
        count = self.delta.shape[1]
        first = np.abs(self.delta).sum(axis=1) / np.float32(count)
        second = np.einsum("ij,ij->i", self.delta, self.delta) / np.float32(count)
        rounding = np.where(self.apart == 0, np.float32(0.25), np.square((1 + np.exp2(np.minimum(self.apart, 8))) / 2)).astype(np.float32)
        square = np.clip(np.maximum(second - rounding, np.where(self.apart == 0, np.float32(np.pi / 2) * first * first, 0)), 0, second)
        found: Floats = np.zeros(len(first), np.float32)
        np.divide(square, square + noise * (second - square), out=found, where=square > 0)
        return found


def tell(mine: Coded, other: Coded, width: int, round: int) -> Told:
    """Compares two workers' codes of some blocks."""
    (e_i, h_i, c_i), (e_j, h_j, c_j) = mine, other
    e, half = np.minimum(e_i, e_j), 1 << (width - 1)
    apart = np.maximum(e_i, e_j) - e
    up_i, up_j = np.minimum(e_i - e, 8), np.minimum(e_j - e, 8)
    if apart.any():
        c_i, c_j = (c << np.minimum(up, 7).astype(np.uint8)[:, None] for c, up in ((c_i, up_i), (c_j, up_j)))
    places = ((c_j - c_i) << np.uint8(8 - width)).view(np.int8) >> np.int8(8 - width)
    delta = places.astype(np.float32)
    count = delta.shape[1]
    open_sign = places == -half
    erased = open_sign.sum(axis=1)
    if width == 2:
        at = _witness(count, round)
        k_i, k_j = (((h << 2) + (c[:, at] & 3)) << up for h, c, up in ((h_i, mine.codes, up_i), (h_j, other.codes, up_j)))
        far = np.mod(k_j - k_i + 512, 1024) - 512
        bad = (erased > ERASED * count) | (np.abs(far) > half)
    else:
        told = np.mod((h_i << up_i) + (delta @ _factors(count)) - (h_j << up_j), PRIME)
        bad = (told != 0) | (erased > 0)
    bad |= apart >= width
    length = (np.abs(delta).sum(axis=1) * np.float32(np.sqrt(np.pi / 2) / count) * np.ldexp(np.float32(1), e)).astype(np.float32)
    length[bad] = 0
    np.copyto(delta, 0, where=open_sign)
    delta[bad] = 0
    return Told(delta, np.ldexp(np.float32(1), e), apart, bad, length)


def checks(k: Floats, width: int, round: int) -> Floats:
    """The check of each block, 0 to 255: a sum modulo 251, or (2 bits) eight more bits of one coordinate. `k`: whole numbers below 2^22."""
    found: Floats
    if width == 2:
        found = np.mod(np.floor(k[:, _witness(k.shape[1], round)] / 4), 256)
        return found
    small = k - PRIME * np.floor(k * np.float32(1 / PRIME))
    found = np.mod(small @ _factors(k.shape[1]), PRIME)
    return found


def pack(codes: Bytes, width: int) -> Bytes:
    """Low bits of each row's parts (halves, quarters) beside each other."""
    if width == 8:
        return codes.reshape(-1)
    parts = 8 // width
    size = codes.shape[1] // parts
    packed = codes[:, :size] & np.uint8((1 << width) - 1)
    for place in range(1, parts):
        packed |= (codes[:, place * size : (place + 1) * size] & np.uint8((1 << width) - 1)) << np.uint8(place * width)
    return packed.reshape(-1)


def unpack(packed: Bytes, width: int) -> Bytes:
    """The rows' codes; higher bits are not theirs."""
    if width == 8:
        return packed
    return np.concatenate([packed >> np.uint8(place * width) for place in range(8 // width)], axis=1)


@lru_cache(maxsize=32)
def _factors(numbers: int) -> Floats:
    """The a_l of the check sum, from 1 to 250 where float32 holds the sum of so many, else less."""
    most = min(PRIME - 1, (1 << 24) // (PRIME * numbers))
    return (words(numbers, 0, Stream.DITHER) % np.uint64(most)).astype(np.float32) + np.float32(1)


@lru_cache(maxsize=32)
def _witness(numbers: int, round: int) -> int:
    """The coordinate of which more bits are sent in `round`."""
    return int(words(1, 0, Stream.DITHER, round, 2)[0] % np.uint64(numbers))
