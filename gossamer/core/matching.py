"""Peers drawn with a preference for fast links: still random, still the same on every worker, still symmetric and doubly stochastic.

The uniform law takes a random order of the workers and joins neighbours along it. Here the order is drawn link by link: workers pick, in
uniform random order, one of those who are still free, and worker i picks j with probability proportional to

    w_ij = (r_ij / the fastest r)^prefer,     r_ij = what a message gets alone, in Mbit/s, in the slower of the two directions.

`prefer` = 0 is the uniform law. Above 0 fast links are used more often and slow ones less, never not at all: as long as all w_ij > 0 all
graphs of the uniform law remain possible, so that the mean over rounds still joins everybody. What it costs is consensus: see
`gossamer.core.consensus.spectral_gap`. Two sites of two workers each, joined by a link of a hundredth of the local rate:

>>> rates = Rates((1000.0,) * 4, (1000.0,) * 4, (0, 0, 1, 1), ((1000.0, 10.0), (10.0, 1000.0)))
>>> [sum(near.at(t).row(0)[1][0] == 1 for t in range(100)) for near in (Preferred(4, 0, 1, rates, p) for p in (0.25, 0.5, 1.0))]
[54, 75, 98]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.mixing import Mixing
from gossamer.core.rng import Stream, permutation, words
from gossamer.core.topology import KEPT, cycle, matching

KINDS = 2048
"""Unlike workers, at most."""
_UNIT = 1 << 20
"""The weight of the fastest link. Weights are whole numbers, so that all machines draw the same; the smallest is 1."""
_PICKS = 1
"""Of the topology's random stream: key of the words that pick peers, beside the order's."""


@dataclass(frozen=True)
class Rates:
    """What a message gets alone between two workers: r_ij = min over both directions of min(up_i, link[place_i][place_j], down_j), Mbit/s.

    Raises:
        BadInput: unlike lengths, a rate that is not above 0, a place without a link, or more than `KINDS` unlike workers.
    """

    up: tuple[float, ...]
    """Of each worker, in Mbit/s."""
    down: tuple[float, ...]
    place: tuple[int, ...]
    """Of each worker: a row of `link`."""
    link: tuple[tuple[float, ...], ...]
    """[from place, to place], in Mbit/s; the diagonal is between two workers of one place."""

    def __post_init__(self) -> None:
        if not len(self.up) == len(self.down) == len(self.place) > 0:
            raise BadInput(f"{len(self.up)} uplinks, {len(self.down)} downlinks and {len(self.place)} places: give one each a worker")
        if any(len(row) != len(self.link) for row in self.link) or not 0 <= min(self.place) <= max(self.place) < len(self.link):
            raise BadInput(f"links between {len(self.link)} places, for workers at places {sorted(set(self.place))}: give each pair one")
        if not all(rate > 0 for rate in (*self.up, *self.down, *(rate for row in self.link for rate in row))):
            raise BadInput("the rates of links and lines must be above 0 Mbit/s")
        if len(self.kinds) > KINDS:
            raise BadInput(f"{len(self.kinds)} unlike workers: peers are drawn by link among at most {KINDS} kinds; set prefer to 0")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.up, self.down, self.place, self.link))

    @property
    def n(self) -> int:
        """Workers."""
        return len(self.up)

    @cached_property
    def kinds(self) -> dict[tuple[int, float, float], int]:
        """Workers with one place and one line are alike: (place, up, down) -> a small number."""
        return {line: k for k, line in enumerate(dict.fromkeys(zip(self.place, self.up, self.down, strict=True)))}

    @cached_property
    def kind(self) -> tuple[int, ...]:
        """Of each worker."""
        return tuple(self.kinds[line] for line in zip(self.place, self.up, self.down, strict=True))

    def between(self) -> NDArray[np.float64]:
        """r, shape [kinds, kinds], symmetric; 0 from the only worker of a kind to itself."""
        place, up, down = (np.array(column) for column in zip(*self.kinds, strict=True))
        one_way = np.minimum(np.minimum(up[:, None], np.array(self.link)[place][:, place]), down)
        r: NDArray[np.float64] = np.minimum(one_way, one_way.T)
        r[np.diag(np.bincount(self.kind) == 1)] = 0.0
        return r

    def among(self, workers: Sequence[int]) -> Rates:
        """Of these workers alone, in this order."""
        up, down = (tuple(line[i] for i in workers) for line in (self.up, self.down))
        return Rates(up, down, tuple(self.place[i] for i in workers), self.link)

    @staticmethod
    def of(fleet: Fleet) -> Rates:
        """Of the workers of a fleet, as declared; traces of rates are not looked at. Reads a link once for each pair of places."""
        place = [fleet.place(i) for i in range(fleet.n)]
        ends: list[list[int]] = [[] for _ in range(max(place) + 1)]
        for i, p in enumerate(place):
            ends[p].append(i)
        link = tuple(tuple(fleet.link(a[0], b[-1]).flow_mbps for b in ends) for a in ends)
        sites = [fleet.site(i) for i in range(fleet.n)]
        return Rates(tuple(s.up_mbps for s in sites), tuple(s.down_mbps for s in sites), tuple(place), link)


@dataclass(frozen=True)
class Preferred:
    """A fresh random graph each round, drawn with a preference for fast links: a matching (`peers` = 1, weights 1/2 and 1/2; for odd n one
    worker sits out) or a cycle (`peers` = 2, own weight 1/2, 1/4 per neighbour).

    A cycle is a walk: from a random worker on to one of those not yet met, and from the last back to the first. Weighted picks cost
    O(kinds of workers) each, n of them a round.

    Raises:
        BadInput: `prefer` is not above 0, alpha outside (0, 2], rates of other workers, or `perfect` with an odd n or a cycle.
    """

    random: ClassVar[bool] = True
    n: int
    seed: int
    peers: Literal[1, 2]
    rates: Rates
    prefer: float
    """Exponent of the rate: 1 draws a link ten times as fast ten times as readily. 0 is the uniform law: `OnePeer` and `TwoPeer`."""
    alpha: float = 1.0
    perfect: bool = False
    """Promise that nobody ever sits out (of a matching)."""

    def __post_init__(self) -> None:
        if not 0 < self.prefer <= 16:
            raise BadInput(f"prefer = {self.prefer}: expected above 0 and at most 16 (0 is the uniform law, one_peer or two_peer itself)")
        if self.peers not in (1, 2):
            raise BadInput(f"peers = {self.peers}: expected 1 (a matching) or 2 (a cycle)")
        if not 0 < self.alpha <= 2.0:
            raise BadInput(f"alpha = {self.alpha}: expected 0 < alpha <= 2 (beyond, a worker's own weight is negative); 1 is the default")
        if self.rates.n != self.n:
            raise BadInput(f"link rates of {self.rates.n} workers for a topology of {self.n}: they must agree")
        if self.perfect and (self.n % 2 or self.peers == 2):
            raise BadInput(f"perfect=True with n = {self.n}, peers = {self.peers}: it belongs to pairs among an even number of workers")

    @cached_property
    def weights(self) -> NDArray[np.int64]:
        """w, shape [kinds, kinds]: whole numbers from 1 to 2^20."""
        r = self.rates.between()
        shares = np.power(r / (r.max() or 1.0), self.prefer)
        whole: NDArray[np.int64] = np.maximum(1, np.rint(_UNIT * shares)).astype(np.int64)
        return whole

    def among(self, workers: Sequence[int]) -> Preferred:
        """The same law among these workers alone, renumbered in this order. One of an odd number sits out then, promise or not."""
        return replace(self, n=len(workers), rates=self.rates.among(workers), perfect=False)

    def at(self, round: int) -> Mixing:
        """The graph of `round`."""
        if round < 0:
            raise BadInput(f"round = {round}: rounds are counted from 0")
        return _drawn(self, round)


@lru_cache(KEPT)
def _drawn(t: Preferred, round: int) -> Mixing:
    first = permutation(t.n, t.seed, Stream.TOPOLOGY, round)
    lots = words(t.n, t.seed, Stream.TOPOLOGY, round, _PICKS).tolist()
    order = pairs(t.weights, t.rates.kind, first, lots) if t.peers == 1 else walk(t.weights, t.rates.kind, first, lots)
    return matching(order, t.alpha) if t.peers == 1 else cycle(order, t.alpha)


class _Free:
    """Who is still free, by kind, in the order of a permutation; the weighted pick."""

    def __init__(self, weights: NDArray[np.int64], kind: tuple[int, ...], first: NDArray[np.int64]) -> None:
        self._weights = weights
        self._kind = kind
        self._left: list[list[int]] = [[] for _ in weights]
        for i in reversed(first.tolist()):
            self._left[kind[i]].append(i)
        self._count = np.array([len(left) for left in self._left], dtype=np.int64)

    def drop(self, i: int) -> None:
        """Worker i, the first of its kind, is free no more."""
        popped = self._left[self._kind[i]].pop()
        assert popped == i
        self._count[self._kind[i]] -= 1

    def pick(self, i: int, lot: int) -> int:
        """One of the free, j with probability w_ij / their sum. `lot`: a uniform 64-bit word."""
        upto = (self._weights[self._kind[i]] * self._count).cumsum()
        k = int(upto.searchsorted(lot * int(upto[-1]) >> 64, side="right"))
        self._count[k] -= 1
        return self._left[k].pop()


def pairs(weights: NDArray[np.int64], kind: tuple[int, ...], first: NDArray[np.int64], lots: list[int]) -> NDArray[np.int64]:
    """An order whose neighbours (0, 1), (2, 3), ... are pairs: in the order of `first`, each who is free picks among the free. The last of
    an odd number is alone. Within a kind the earliest in `first` is taken: those of a kind are alike, and `first` is random.

    weights: whole numbers above 0, shape [kinds, kinds]; lots: one uniform 64-bit word a worker.
    """
    free, taken, order = _Free(weights, kind, first), [False] * len(kind), []
    for i in first.tolist():
        if taken[i]:
            continue
        free.drop(i)
        order.append(i)
        if len(order) < len(kind):
            j = free.pick(i, lots[i])
            taken[j] = True
            order.append(j)
    return np.array(order, dtype=np.int64)


def walk(weights: NDArray[np.int64], kind: tuple[int, ...], first: NDArray[np.int64], lots: list[int]) -> NDArray[np.int64]:
    """An order in which each is picked by the one before, beginning with the first of `first`. Arguments as for `pairs`."""
    free, i = _Free(weights, kind, first), int(first[0])
    free.drop(i)
    order = [i]
    for _ in range(len(kind) - 1):
        i = free.pick(i, lots[i])
        order.append(i)
    return np.array(order, dtype=np.int64)
