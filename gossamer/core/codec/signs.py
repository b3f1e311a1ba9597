"""The work of `gossamer.core.codec.sign.Sign` on one flat range, in NumPy: bits and sums in one pass, and signs back to numbers.

A range is walked in chunks that stay in cache: what is needed of a chunk is taken while it is warm, and nothing as large as the range is
allocated. gossamer.core.codec.signs_device does the same where a tensor is on an accelerator. `start` is the place of a range in its full
tensor, `group` how many elements share a magnitude; groups are counted in the full tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.core.codec.payload import CHUNK, Bytes, Floats

Counts: TypeAlias = NDArray[np.int64]
Sums: TypeAlias = NDArray[np.float64]

SIGNS: Floats = 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32) - 1
"""[256, 8]: what the eight bits of a byte mean, 2s - 1."""

_SPAN = 4096
"""Elements of a long group that are summed in one go; the sums of such spans are added pairwise."""


class Place(NamedTuple):
    """Where a range lies: its first element in the full tensor, elements of a group, and the groups that it touches, from the first to
    one after the last."""

    start: int
    group: int
    first: int
    after: int


def runs(lo: int, hi: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts the elements lo to hi of a tensor into runs of equal pieces of groups: (from, to, first group, groups), from and to counted
    from lo. A piece of a group at the start, whole groups, a piece at the end.

    >>> list(runs(2, 11, 4))
    [(0, 2, 0, 1), (2, 6, 1, 1), (6, 9, 2, 1)]
    >>> list(runs(4, 14, 4))
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


def scan(
    values: Floats, place: Place, bits: Bytes | None, sums: Sums | None, said: Floats | None = None, decay: float = 1.0
) -> Counts | None:
    """One pass over a range.

    Args:
        values: the range. With `said`, it is first changed in place to decay * values + said.
        bits: filled with [values >= 0], the lowest bit of a byte first, if given.
        sums: [2, groups of the full tensor]; the float64 sums of |values| and their counts are added, if given.

    Returns:
        Exact zeros of each group that the range touches, int64; None where there are none, and without `bits`.
    """
    size, zeros = min(CHUNK, values.size), None
    mask, absolute = np.empty(size, np.bool_), np.empty(size if sums is not None else 0, np.float32)
    for at in range(0, values.size, CHUNK):
        v = values[at : at + CHUNK]
        if said is not None:
            if decay != 1:
                np.multiply(v, np.float32(decay), out=v)
            np.add(v, said[at : at + CHUNK], out=v)
        if bits is not None:
            packed = np.packbits(np.greater_equal(v, 0, out=mask[: v.size]), bitorder="little")
            bits[at // 8 : at // 8 + packed.size] = packed
        if sums is not None:
            a = np.abs(v, out=absolute[: v.size])
            _add_sums(a, place.start + at, place.group, sums)
            some = bits is not None and a.view(np.int32).min() == 0
        else:
            some = np.equal(v, 0, out=mask[: v.size]).any()
        if some and bits is not None:
            zeros = np.zeros(place.after - place.first, np.int64) if zeros is None else zeros
            _add_zeros(np.equal(v, 0, out=mask[: v.size]), place.start + at, place, zeros)
    return zeros


def _add_sums(a: Floats, start: int, group: int, sums: Sums) -> None:
    for lo, hi, g, n in runs(start, start + a.size, group):
        if n == 1:
            whole = lo + (hi - lo) // _SPAN * _SPAN
            spans = np.einsum("ij->i", a[lo:whole].reshape(-1, _SPAN), dtype=np.float64)
            sums[0, g] += np.add.reduce(spans) + np.einsum("i->", a[whole:hi], dtype=np.float64)
        else:
            sums[0, g : g + n] += np.einsum("ij->i", a[lo:hi].reshape(n, -1), dtype=np.float64)
        sums[1, g : g + n] += (hi - lo) // n


def _add_zeros(zero: NDArray[np.bool_], start: int, place: Place, zeros: Counts) -> None:
    for lo, hi, g, n in runs(start, start + zero.size, place.group):
        grouped = zero[lo:hi].reshape(n, -1)
        found = np.where(grouped.all(axis=1), grouped.shape[1], 0)  # quick for the rows that no token touched
        mixed = np.flatnonzero(grouped.any(axis=1) & (found == 0))
        found[mixed] = np.count_nonzero(grouped[mixed], axis=1)
        zeros[g - place.first : g - place.first + n] += found


def add(target: Floats, bits: Bytes, place: Place, scaled: Floats) -> None:
    """target += scaled * (2s - 1), in place. `scaled`: a number for each group that the range touches."""
    scratch = np.empty((-(-min(CHUNK, target.size) // 8), 8), np.float32)
    table = SIGNS * scaled[0] if scaled.size == 1 else SIGNS
    for at in range(0, target.size, CHUNK):
        piece = target[at : at + CHUNK]
        rows = -(-piece.size // 8)
        # "clip" only spares the check of the indices (a byte is never out of range) and with it a buffered copy.
        np.take(table, bits[at // 8 : at // 8 + rows], axis=0, out=scratch[:rows], mode="clip")
        values = scratch[:rows].reshape(-1)[: piece.size]
        if scaled.size == 1:
            np.add(piece, values, out=piece)
            continue
        # addcmul may fuse its product into the sum, which changes nothing: +-1 times a number is exact.
        whole, signs = torch.from_numpy(piece), torch.from_numpy(values)
        for lo, hi, g, n in runs(place.start + at, place.start + at + piece.size, place.group):
            m = torch.from_numpy(scaled[g - place.first : g - place.first + n, None])
            whole[lo:hi].view(n, -1).addcmul_(signs[lo:hi].view(n, -1), m)
