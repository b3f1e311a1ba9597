"""The communication graph of each round, as a pure function of the round: every worker computes the same graph without talking.

Three that you know: `Complete` is an all-reduce; `Ring` is always the same two neighbours; `OnePeer` is a fresh random
partner each round. All are frozen dataclasses that are their own configuration.

In every topology W = I - alpha*Lambda, with W at alpha = 1 as named below and alpha = 1 the default; alpha < 1 mixes less.

>>> Ring(4).at(0).row(1)
((0, 0.25), (1, 0.5), (2, 0.25))
>>> OnePeer(8, seed=1).at(5).row(3) == OnePeer(8, seed=1).at(5).row(3)
True
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gossamer.core.errors import BadInput
from gossamer.core.mixing import Mixing
from gossamer.core.rng import Stream, permutation

KEPT = 32
"""Rounds of each kind that stay memoised."""
KNOWN = ("ring", "complete", "one_peer", "two_peer", "one_peer_exp")
"""Names of topologies."""


class Topology(Protocol):
    """Who averages with whom, round by round."""

    @property
    def n(self) -> int:
        """Workers."""

    @property
    def random(self) -> bool:
        """True when the graph is drawn anew each round from (seed, round)."""

    def at(self, round: int) -> Mixing:
        """The mixing matrix of `round` >= 0. Pure (the same in every process) and memoised."""


@dataclass(frozen=True)
class Graph:
    """Which pairs of workers may talk at all: undirected, connected. Hashable, so that it can be part of a topology.

    Raises:
        BadInput: an edge to itself or outside 0..n-1, a worker that may talk to nobody, or a graph in several pieces.
    """

    n: int
    edges: frozenset[tuple[int, int]]
    """Pairs (i, j) with i < j."""

    def __post_init__(self) -> None:
        _check_n(self.n)
        for i, j in self.edges:
            if not 0 <= i < j < self.n:
                raise BadInput(f"admissible edge ({i}, {j}): expected 0 <= i < j < n = {self.n}")
        links: list[list[int]] = [[] for _ in range(self.n)]
        for i, j in self.edges:
            links[i].append(j)
            links[j].append(i)
        alone = [i for i in range(self.n) if not links[i]]
        if alone and self.n > 1:
            raise BadInput(f"worker {alone[0]} may talk to nobody in the admissible graph: give it a link, or leave it out of the run")
        seen, todo = {0}, [0]
        while todo:
            new = [j for j in links[todo.pop()] if j not in seen]
            seen.update(new)
            todo += new
        if len(seen) < self.n:
            cut = min(set(range(self.n)) - seen)
            raise BadInput(
                f"the admissible graph is not connected: worker 0 reaches {len(seen)} of {self.n} workers and never worker {cut}; "
                "add a link between the pieces"
            )

    @staticmethod
    def of(n: int, pairs: Iterable[tuple[int, int]]) -> Graph:
        """From pairs in any order and direction, repeats allowed."""
        return Graph(n, frozenset((min(i, j), max(i, j)) for i, j in pairs))

    @staticmethod
    def from_adjacency(matrix: ArrayLike) -> Graph:
        """From a symmetric array, shape [n, n], nonzero where two workers may talk; the diagonal is not looked at."""
        a = np.asarray(matrix) != 0
        if a.ndim != 2 or a.shape[0] != a.shape[1]:
            raise BadInput(f"an adjacency of shape {a.shape}: expected [n, n]")
        if (a != a.T).any():
            i, j = (int(k[0]) for k in np.nonzero(a != a.T))
            raise BadInput(f"the adjacency lets {i} and {j} talk in one direction only: make it symmetric")
        return Graph.of(len(a), [(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(a, 1)), strict=True)])

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """The edges in ascending order, shape [m, 2]."""
        return np.array(sorted(self.edges), dtype=np.int64).reshape(-1, 2)


# Graphs as pure functions of what was drawn ------------------------------------------------------------------------------------------


def matching(perm: NDArray[np.int64], alpha: float = 1.0) -> Mixing:
    """Neighbours along the permutation pair up, (p0, p1), (p2, p3), ...: W = 1/2, 1/2. For odd n the last one sits out."""
    n = len(perm)
    return _symmetric(n, perm[: n - n % 2].reshape(-1, 2), alpha / 2)


def cycle(perm: NDArray[np.int64], alpha: float = 1.0) -> Mixing:
    """The permutation closed to a cycle: own weight 1/2, 1/4 per neighbour (n = 2: the one neighbour has both quarters)."""
    return _symmetric(len(perm), np.stack([perm, np.roll(perm, -1)], 1), alpha / 4)


def greedy_matching(graph: Graph, order: NDArray[np.int64], alpha: float = 1.0) -> Mixing:
    """A maximal matching on `graph`: take its edges (`graph.pairs`) in the given order, keep those whose two ends are still free."""
    free = [True] * graph.n
    kept = []
    for i, j in graph.pairs[order].tolist():
        if free[i] and free[j]:
            free[i] = free[j] = False
            kept.append((i, j))
    return _symmetric(graph.n, np.array(kept, dtype=np.int64).reshape(-1, 2), alpha / 2)


def nearest_two(graph: Graph, perm: NDArray[np.int64], alpha: float = 1.0) -> Mixing:
    """Each worker asks the two admissible workers nearest to it along the permutation (a cycle; of two at one distance the later one
    first); who is asked also hears the asker. Metropolis weights W_ij = 1/(1 + max(deg_i, deg_j)), so degrees may exceed 2."""
    n = graph.n
    if n == 1:
        return Mixing.complete(1)
    place = np.empty(n, np.int64)
    place[perm] = np.arange(n)
    i, j = np.concatenate([graph.pairs, graph.pairs[:, ::-1]]).T
    ahead = (place[j] - place[i]) % n
    order = np.lexsort((n - ahead, np.minimum(ahead, n - ahead), i))
    i, j = i[order], j[order]
    rank = np.arange(len(i)) - np.searchsorted(i, i)
    i, j = i[rank < 2], j[rank < 2]
    pair = np.unique(np.minimum(i, j) * n + np.maximum(i, j))
    a, b = pair // n, pair % n
    degree = np.bincount(np.concatenate([a, b]), minlength=n)
    return _symmetric(n, np.stack([a, b], 1), alpha / (1.0 + np.maximum(degree[a], degree[b])))


def _symmetric(n: int, pairs: NDArray[np.int64], weight: ArrayLike) -> Mixing:
    w = np.broadcast_to(np.asarray(weight, np.float64), (len(pairs),))
    return Mixing.from_edges(n, np.concatenate([pairs, pairs[:, ::-1]]), np.concatenate([w, w]))


# Topologies ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """The fixed ring 0, 1, ..., n-1: own weight 1/2, 1/4 per neighbour. Consensus slows as n^2: W's gap is (1 - cos(2 pi/n))/2."""

    random: ClassVar[bool] = False
    n: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check(self.n, self.alpha, 2.0)

    def at(self, round: int) -> Mixing:
        """The same in every round."""
        return _ring(self.n, self.alpha)


@dataclass(frozen=True)
class Complete:
    """Everybody averages with everybody, 1/n each. In the normalisation of GASLoC's paper this is its alpha = 2(n-1)/n."""

    random: ClassVar[bool] = False
    n: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check(self.n, self.alpha, self.n / (self.n - 1) if self.n > 1 else math.inf)

    def at(self, round: int) -> Mixing:
        """The same in every round."""
        return _complete(self.n, self.alpha)


@dataclass(frozen=True)
class OnePeer:
    """A fresh random matching each round: 1/2 own, 1/2 the partner's (GASLoC, Cagnasso et al. 2026, sec. 3.2).

    For odd n one worker sits out, a different one each time; `perfect` refuses that. With an `admissible` graph the matching is the
    maximal one that takes its edges in random order. E[Lambda] = E[Lambda^2] = n/(2(n-1)) pi for even n, pi/2 for odd n.
    """

    random: ClassVar[bool] = True
    n: int
    seed: int
    alpha: float = 1.0
    perfect: bool = False
    """Promise that nobody ever sits out."""
    admissible: Graph | None = None

    def __post_init__(self) -> None:
        _check(self.n, self.alpha, 2.0, self.admissible)
        if self.perfect and self.n % 2:
            raise BadInput(
                f"perfect=True with n = {self.n}: an odd number of workers cannot pair up; add or drop one, or set perfect=False"
            )
        if self.perfect and self.admissible is not None:
            raise BadInput(
                "perfect=True with an admissible graph: a random maximal matching on it may leave workers out; set perfect=False"
            )

    def at(self, round: int) -> Mixing:
        """The matching of `round`."""
        return _one_peer(self, _check_round(round))


@dataclass(frozen=True)
class TwoPeer:
    """A fresh random cycle each round: own weight 1/2, 1/4 per neighbour.

    With an `admissible` graph each worker takes its two nearest admissible ones along the permutation, symmetrised, with Metropolis
    weights (`nearest_two`; 1/3 each where all degrees are 2, so an admissible graph that allows everything is not the same method).
    E[Lambda] = n/(2(n-1)) pi, E[Lambda^2] = 3n/(8(n-1)) pi for n >= 3.
    """

    random: ClassVar[bool] = True
    n: int
    seed: int
    alpha: float = 1.0
    admissible: Graph | None = None

    def __post_init__(self) -> None:
        _check(self.n, self.alpha, 2.0 if self.admissible is None else 1.0, self.admissible)

    def at(self, round: int) -> Mixing:
        """The cycle of `round`."""
        return _two_peer(self, _check_round(round))


@dataclass(frozen=True)
class OnePeerExp:
    """The one-peer exponential graph (Ying et al. 2021, arXiv 2110.13363): in round t worker i hears i - 2^(t mod ceil(log2 n)), 1/2 each.

    Directed and doubly stochastic; when n is a power of two, log2 n rounds give the exact mean.
    """

    random: ClassVar[bool] = False
    n: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check(self.n, self.alpha, 2.0)

    @property
    def period(self) -> int:
        """Rounds after which the schedule repeats."""
        return max(1, (self.n - 1).bit_length())

    def at(self, round: int) -> Mixing:
        """The shift of `round`."""
        return _shift(self.n, 2 ** (_check_round(round) % self.period), self.alpha)


def topology(name: str, n: int, seed: int = 0, *, alpha: float = 1.0, perfect: bool = False, admissible: Graph | None = None) -> Topology:
    """A topology by name: ring, complete, one_peer, two_peer or one_peer_exp. `seed` is used by the random ones.

    Raises:
        BadInput: an unknown name, or an option that the named topology does not have.
    """
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"unknown topology {name!r}: known are {', '.join(KNOWN)}{hint}")
    if perfect and name != "one_peer":
        raise BadInput(f"perfect=True belongs to one_peer, not to {name}: leave it out")
    if admissible is not None and name not in ("one_peer", "two_peer"):
        raise BadInput(f"{name} takes no admissible graph: leave it out, or use one_peer or two_peer")
    match name:
        case "one_peer":
            return OnePeer(n, seed, alpha, perfect, admissible)
        case "two_peer":
            return TwoPeer(n, seed, alpha, admissible)
        case "ring":
            return Ring(n, alpha)
        case "complete":
            return Complete(n, alpha)
        case _:
            return OnePeerExp(n, alpha)


@lru_cache(KEPT)
def _one_peer(t: OnePeer, round: int) -> Mixing:
    if t.admissible is None:
        return matching(permutation(t.n, t.seed, Stream.TOPOLOGY, round), t.alpha)
    order = permutation(len(t.admissible.edges), t.seed, Stream.TOPOLOGY, round)
    return greedy_matching(t.admissible, order, t.alpha)


@lru_cache(KEPT)
def _two_peer(t: TwoPeer, round: int) -> Mixing:
    perm = permutation(t.n, t.seed, Stream.TOPOLOGY, round)
    return cycle(perm, t.alpha) if t.admissible is None else nearest_two(t.admissible, perm, t.alpha)


@lru_cache(KEPT)
def _ring(n: int, alpha: float) -> Mixing:
    return cycle(np.arange(n, dtype=np.int64), alpha)


@lru_cache(KEPT)
def _complete(n: int, alpha: float) -> Mixing:
    return Mixing.complete(n, alpha)


@lru_cache(KEPT)
def _shift(n: int, offset: int, alpha: float) -> Mixing:
    i = np.arange(n, dtype=np.int64)
    return Mixing.from_edges(n, np.stack([i, (i - offset) % n], 1), alpha / 2)


def _check_n(n: int) -> None:
    if n < 1:
        raise BadInput(f"n = {n} workers: a topology needs at least 1")


def _check(n: int, alpha: float, limit: float, admissible: Graph | None = None) -> None:
    _check_n(n)
    if not 0 < alpha <= limit * (1 + 1e-12):
        raise BadInput(f"alpha = {alpha}: expected 0 < alpha <= {limit:.6g} (beyond, a worker's own weight is negative); 1 is the default")
    if admissible is not None and admissible.n != n:
        raise BadInput(f"the admissible graph has {admissible.n} workers and the topology {n}: they must agree")


def _check_round(round: int) -> int:
    if round < 0:
        raise BadInput(f"round = {round}: rounds are counted from 0")
    return round
