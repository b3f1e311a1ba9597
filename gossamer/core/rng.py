"""Randomness as a pure function of its key: the same (seed, stream, ...) gives the same numbers on every worker, in every world, at any
time. Built on the raw words of Philox, whose values NumPy fixes for good (its derived distributions are not so fixed)."""

from __future__ import annotations

import enum
import hashlib

import numpy as np
from numpy.typing import NDArray


class Stream(enum.IntEnum):
    """One number per use, so that no two uses share a sequence."""

    TOPOLOGY = 1
    DATA = 2
    STEP_NOISE = 3
    DRIFT = 4
    JITTER = 5
    DITHER = 6
    INIT = 7
    SKETCH = 8
    DOCUMENTS = 9
    MIX = 10
    ITEMS = 11


def words(count: int, seed: int, stream: Stream, *key: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words for the key (seed, stream, *key)."""
    text = ",".join(map(str, (int(seed), int(stream), *map(int, key))))
    k = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(k, np.uint64)).random_raw(count)


def uniform(count: int, seed: int, stream: Stream, *key: int) -> NDArray[np.float64]:
    """`count` float64 in (0, 1)."""
    return ((words(count, seed, stream, *key) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(count: int, seed: int, stream: Stream, *key: int) -> NDArray[np.float64]:
    """`count` standard normal float64 (Box-Muller)."""
    u = uniform(2 * count, seed, stream, *key)
    return np.sqrt(-2.0 * np.log(u[:count])) * np.cos(2.0 * np.pi * u[count:])


def permutation(n: int, seed: int, stream: Stream, *key: int) -> NDArray[np.int64]:
    """A uniform permutation of range(n): the order of n random words."""
    return np.argsort(words(n, seed, stream, *key), kind="stable").astype(np.int64)
