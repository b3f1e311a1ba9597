"""Who averages with whom in one round: the row-stochastic matrix W, kept sparse.

W_ij != 0 means that worker i hears worker j. Gossip matrices are symmetric and doubly stochastic, so that the mean over workers stays.
Three that you know: the identity (everybody alone), a pair (1/2, 1/2), and the complete graph (1/n everywhere).

>>> pair = Mixing.from_edges(3, [(0, 2), (2, 0)], 0.5)
>>> pair.row(0), pair.row(1)
(((0, 0.5), (2, 0.5)), ((1, 1.0),))
>>> Mixing.complete(4).row(2)
((0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gossamer.core.errors import BadInput

Row: TypeAlias = tuple[tuple[int, float], ...]
"""(address, weight) pairs in ascending order of address."""

ROUNDING = 1e-12
"""What float64 rounding may leave of an exact zero in a row sum."""


class Mixing(ABC):
    """The mixing matrix W of one round, shape [n, n], rows sum to 1. Immutable; compare two by `dense()` or row by row."""

    n: int
    """Workers."""

    @staticmethod
    def from_edges(n: int, edges: ArrayLike, weight: ArrayLike) -> Mixing:
        """W from directed edges: for (i, j) = edges[k], worker i hears j with weight[k]; repeated edges add up. What is left of 1 in a
        row is the worker's own weight, so an edge from a worker to itself changes nothing.

        edges: shape [m, 2]; weight: shape [m], or one number for all.

        Raises:
            BadInput: an address outside 0..n-1, a weight that is negative or not finite, or a row whose weights exceed 1.
        """
        if n < 1:
            raise BadInput(f"n = {n} workers: a mixing matrix needs at least 1")
        e = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
        w = np.broadcast_to(np.asarray(weight, dtype=np.float64), (len(e),))
        if len(e) and (e.min() < 0 or e.max() >= n):
            raise BadInput(f"an edge names worker {int(e.min()) if e.min() < 0 else int(e.max())}; addresses run from 0 to {n - 1}")
        if not (np.isfinite(w).all() and (w >= 0).all()):
            raise BadInput(f"an edge weight is {float(w[~(w >= 0) | ~np.isfinite(w)][0])}, expected a finite number of at least 0")
        use = (e[:, 0] != e[:, 1]) & (w > 0)
        i, j, w = e[use, 0], e[use, 1], w[use]
        own = 1.0 - np.bincount(i, w, minlength=n)
        own[np.abs(own) < ROUNDING] = 0.0
        if own.min() < 0:
            k = int(own.argmin())
            raise BadInput(f"worker {k} gives others {1 - own[k]:.6g} in total, at most 1 is left for them: lower alpha or the weights")
        keep = np.flatnonzero(own)
        key = np.concatenate([i * n + j, keep * n + keep])
        order = np.argsort(key, kind="stable")
        key, w = key[order], np.concatenate([w, own[keep]])[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        key, w = key[first], np.add.reduceat(w, first)
        start = np.searchsorted(key, np.arange(n + 1, dtype=np.int64) * n)
        return _Sparse(n, start, key % n, w)

    @staticmethod
    def from_dense(matrix: ArrayLike) -> Mixing:
        """W from a square array, validated.

        Raises:
            BadInput: not square, a negative or non-finite weight, or a row that does not sum to 1.
        """
        a = np.asarray(matrix, dtype=np.float64)
        if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size:
            raise BadInput(f"a mixing matrix of shape {a.shape}: expected [n, n] with n >= 1")
        i, j = np.nonzero(a)
        start = np.concatenate([[0], np.cumsum(np.bincount(i, minlength=len(a)))]).astype(np.int64)
        mixing = _Sparse(len(a), start, j.astype(np.int64), a[i, j])
        mixing.validate()
        return mixing

    @staticmethod
    def complete(n: int, alpha: float = 1.0) -> Mixing:
        """W = I - alpha*(I - 11^T/n) without storing n^2 numbers.

        Raises:
            BadInput: n < 1, or a weight below 0 (alpha < 0, or alpha > n/(n-1)).
        """
        if n < 1:
            raise BadInput(f"n = {n} workers: a mixing matrix needs at least 1")
        if n == 1 or alpha == 0:
            return Mixing.from_edges(n, [], 1.0)
        own = (1.0 - alpha) + alpha / n
        if not (alpha > 0 and own >= -ROUNDING):
            raise BadInput(f"alpha = {alpha}: expected 0 <= alpha <= n/(n-1) = {n / (n - 1):.6g}, so that no weight is negative")
        return _Complete(n, own if abs(own) > ROUNDING else 0.0, alpha / n)

    @abstractmethod
    def row(self, i: int) -> Row:
        """Row i: (j, W_ij) for every W_ij != 0, own weight included, in order of address. O(degree)."""

    @abstractmethod
    def inn(self, i: int) -> tuple[int, ...]:
        """Whom worker i hears, itself excluded, in order of address. O(degree)."""

    @abstractmethod
    def out(self, i: int) -> tuple[int, ...]:
        """Who hears worker i, itself excluded, in order of address. O(degree)."""

    @abstractmethod
    def apply(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """W x in float64, x of shape [n, ...]: for analysis. Workers mix with `row` in float32."""

    @abstractmethod
    def damped(self, alpha: float) -> Mixing:
        """W_alpha = I - alpha*(I - W).

        Raises:
            BadInput: a worker's own weight would be negative.
        """

    @abstractmethod
    def column_sums(self) -> NDArray[np.float64]:
        """What each worker's contribution weighs in total, shape [n]; all 1 when the mean is preserved."""

    @property
    @abstractmethod
    def is_symmetric(self) -> bool:
        """W = W^T, up to rounding."""

    @abstractmethod
    def validate(self) -> None:
        """Checks that every weight is finite and not negative, and that every row sums to 1.

        Raises:
            BadInput: names the first worker whose row is wrong.
        """

    def dense(self) -> NDArray[np.float64]:
        """W as an array, shape [n, n]."""
        return self.apply(np.eye(self.n))

    def is_doubly_stochastic(self, tol: float = 1e-9) -> bool:
        """Columns sum to 1 too: averaging preserves the mean over workers."""
        return bool(np.abs(self.column_sums() - 1.0).max() <= tol)


@dataclass(frozen=True, eq=False)
class _Sparse(Mixing):
    """Compressed rows: row i is peers[start[i]:start[i + 1]] with the weights at the same places."""

    n: int
    start: NDArray[np.int64]
    """Shape [n + 1]."""
    peers: NDArray[np.int64]
    """Shape [nonzeros], ascending within a row."""
    weights: NDArray[np.float64]
    """Shape [nonzeros]."""

    def row(self, i: int) -> Row:
        lo, hi = self.start[_address(i, self.n)], self.start[i + 1]
        return tuple(zip(self.peers[lo:hi].tolist(), self.weights[lo:hi].tolist(), strict=True))

    def inn(self, i: int) -> tuple[int, ...]:
        start, peers = self._heard
        return tuple([j for j in peers[start[_address(i, self.n)] : start[i + 1]] if j != i])

    def out(self, i: int) -> tuple[int, ...]:
        start, listeners = self._hearing
        return tuple([j for j in listeners[start[_address(i, self.n)] : start[i + 1]] if j != i])

    def apply(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        w = self.weights.reshape(-1, *[1] * (x.ndim - 1))
        mixed: NDArray[np.float64] = np.add.reduceat(w * x[self.peers], self.start[:-1], axis=0)
        return mixed

    def damped(self, alpha: float) -> Mixing:
        return self if alpha == 1.0 else Mixing.from_edges(self.n, np.stack([self._hearers, self.peers], 1), alpha * self.weights)

    def column_sums(self) -> NDArray[np.float64]:
        return np.bincount(self.peers, self.weights, minlength=self.n).astype(np.float64, copy=False)

    @cached_property
    def is_symmetric(self) -> bool:
        order = np.argsort(self.peers * self.n + self._hearers)
        same = np.array_equal(self.peers[order], self._hearers) and np.array_equal(self._hearers[order], self.peers)
        return same and bool(np.abs(self.weights[order] - self.weights).max() <= ROUNDING)

    def validate(self) -> None:
        bad = ~np.isfinite(self.weights) | (self.weights < 0)
        if bad.any():
            k = int(bad.argmax())
            i, j = int(self._hearers[k]), int(self.peers[k])
            raise BadInput(f"W[{i}, {j}] = {self.weights[k]}: a mixing weight is a finite number of at least 0")
        off = np.bincount(self._hearers, self.weights, minlength=self.n) - 1.0
        i = int(np.abs(off).argmax())
        if abs(off[i]) > 1e-9:
            raise BadInput(f"row {i} of W sums to {off[i] + 1.0:.9g}, expected 1: divide the row by its sum")

    @cached_property
    def _heard(self) -> tuple[list[int], list[int]]:
        """start and peers as lists, which are quicker to ask for one worker's."""
        return self.start.tolist(), self.peers.tolist()

    @cached_property
    def _hearing(self) -> tuple[list[int], list[int]]:
        """`_columns`, likewise."""
        start, listeners = self._columns
        return start.tolist(), listeners.tolist()

    @cached_property
    def _hearers(self) -> NDArray[np.int64]:
        """The row of each nonzero, shape [nonzeros]."""
        return np.repeat(np.arange(self.n, dtype=np.int64), np.diff(self.start))

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same by column: where column j starts, shape [n + 1], and who hears j in order of address, shape [nonzeros]."""
        order = np.argsort(self.peers, kind="stable")
        start = np.concatenate([[0], np.cumsum(np.bincount(self.peers, minlength=self.n))]).astype(np.int64)
        return start, self._hearers[order]


@dataclass(frozen=True, eq=False)
class _Complete(Mixing):
    """Everybody hears everybody with one weight: two numbers instead of n^2."""

    n: int
    own: float
    other: float

    def row(self, i: int) -> Row:
        _address(i, self.n)
        if self.own == self.other:
            return self._shared_row
        return tuple((j, self.own if j == i else self.other) for j in range(self.n) if j != i or self.own)

    def inn(self, i: int) -> tuple[int, ...]:
        _address(i, self.n)
        return (*range(i), *range(i + 1, self.n))

    def out(self, i: int) -> tuple[int, ...]:
        return self.inn(i)

    def apply(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        mixed: NDArray[np.float64] = (self.own - self.other) * x + self.other * x.sum(axis=0, keepdims=True)
        return mixed

    def damped(self, alpha: float) -> Mixing:
        return self if alpha == 1.0 else Mixing.complete(self.n, alpha * self.other * self.n)

    def column_sums(self) -> NDArray[np.float64]:
        return np.full(self.n, self.own + (self.n - 1) * self.other)

    @property
    def is_symmetric(self) -> bool:
        return True

    def validate(self) -> None:
        """Nothing to find: `Mixing.complete` has checked."""

    @cached_property
    def _shared_row(self) -> Row:
        return tuple((j, self.own) for j in range(self.n))


def _address(i: int, n: int) -> int:
    if not 0 <= i < n:
        raise BadInput(f"worker {i} does not exist: addresses run from 0 to {n - 1}")
    return i
