"""Random rotations of blocks of numbers: signs that all workers share, then a Walsh-Hadamard transform.

    X = R S z,    S = diag(+-1), new in every round,    R R^T = B,  R = H_a' T H_b'  (kron of small Hadamard matrices, B = a b)

Whatever d is, each coordinate of R S d has, over the signs, mean 0, mean square |d|^2 and tails no heavier than a normal number's
(Hoeffding: P(|X_l| > t |d|) <= 2 exp(-t^2 / 2)). So one step fits a whole block, however unlike its numbers are.

>>> import numpy as np
>>> x = np.arange(16, dtype=np.float32).reshape(1, 16)
>>> X = rotated(x, round=3)
>>> bool(abs((X**2).mean() - (x**2).sum()) < 1e-2), np.allclose(turned_back(X, round=3) / 16, x)
(True, True)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gossamer.core.codec.payload import Floats
from gossamer.core.rng import Stream, words


def rotated(x: Floats, round: int) -> Floats:
    """R S x for each row of x, [rows, B] with B a power of two; not divided by sqrt(B)."""
    rows, size = x.shape
    a, b = _sides(size)
    y = torch.from_numpy(x * _signs(size, round)).view(rows * a, b) @ _hadamard(b)
    y = y.view(rows, a, b).transpose(1, 2).reshape(rows * b, a) @ _hadamard(a)
    found: Floats = y.view(rows, size).numpy()
    return found


def turned_back(X: Floats, round: int) -> Floats:
    """S R^T X for each row: B times what was rotated. Exact where X is whole numbers whose sizes add up to less than 2^24."""
    rows, size = X.shape
    a, b = _sides(size)
    y = torch.from_numpy(X).view(rows * b, a) @ _hadamard(a)
    y = y.view(rows, b, a).transpose(1, 2).reshape(rows * a, b) @ _hadamard(b)
    found: Floats = y.view(rows, size).numpy()
    found *= _signs(size, round)
    return found


def _sides(size: int) -> tuple[int, int]:
    a = 1 << ((size.bit_length() - 1) // 2)
    return a, size // a


@lru_cache(maxsize=32)
def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix, symmetric."""
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]]).astype(np.float32)
    return torch.from_numpy(h)


@lru_cache(maxsize=32)
def _signs(size: int, round: int) -> Floats:
    """The diagonal of S in `round`."""
    found: Floats = np.where(words(size, 0, Stream.DITHER, round, 1) >> np.uint64(63), np.float32(-1), np.float32(1))
    return found
