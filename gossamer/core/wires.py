"""When messages arrive, worked out for all workers at once: the arithmetic under `gossamer.core.predict`.

A message of b bytes from i to j passes i's uplink, the link and j's downlink, and flows on while it is still coming in, as in the
simulator's queues. An exchange among everybody is worked out per group of senders with one place and one uplink: n times the number of
groups, not n squared.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gossamer.core.fleet import Fleet
from gossamer.core.topology import Topology

Seconds: TypeAlias = NDArray[np.float64]
"""One number a worker, shape [n]."""

_BYTES_PER_MBPS = 125_000.0
_GROUPS = 64
"""Unlike senders that are told apart."""
_BLOCK = 1 << 21
"""Elements of a block of (groups, workers): what is worked on at a time."""


class Net:
    """What lies between the workers of a fleet, as arrays. Reads a link once for each pair of places."""

    def __init__(self, fleet: Fleet) -> None:
        self.n = n = fleet.n
        sites = [fleet.site(i) for i in range(n)]
        self.up: Seconds = np.array([1.0 / (_BYTES_PER_MBPS * site.up_mbps) for site in sites])
        """Seconds a byte takes on each worker's uplink."""
        self.down: Seconds = np.array([1.0 / (_BYTES_PER_MBPS * site.down_mbps) for site in sites])
        """Likewise downlink."""
        named = {end for pair in fleet.links for end in pair}
        names = [site.name if site.name in named else site.region for site in sites]
        index = {name: k for k, name in enumerate(dict.fromkeys(names))}
        self.place = np.array([index[name] for name in names])
        """A small number a worker. The link from i to j depends on their places alone (within one site it may be better)."""
        self.people = np.bincount(self.place)
        """Workers of each place."""
        self.link_s, self.delay_s = np.zeros((len(index), len(index))), np.zeros((len(index), len(index)))
        """[from place, to place]: seconds a byte takes on a link, and seconds of delay: latency, mean jitter, the constant a message."""
        members: list[list[int]] = [[] for _ in index]
        for i, k in enumerate(self.place.tolist()):
            members[k].append(i)
        for a, from_a in enumerate(members):
            for b, from_b in enumerate(members):
                i, j = from_a[0], from_b[0]
                if a == b:
                    j = next((k for k in from_a if sites[k] is not sites[i]), i)
                link = fleet.link(i, j)
                self.link_s[a, b] = 1.0 / (_BYTES_PER_MBPS * link.flow_mbps)
                self.delay_s[a, b] = 1e-3 * (link.latency_ms + link.jitter_ms) + fleet.message_s

    @cached_property
    def groups(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Seconds]:
        """(each worker's group, each group's place, each group's uplink): workers of a group send alike.

        A group is a place and an uplink. Where that makes more than some 64, uplinks of about one size are taken together, and for the
        slowest of them.
        """
        band = np.unique(self.up, return_inverse=True)[1].reshape(-1)
        if len(np.unique(np.stack([self.place, band]), axis=1).T) > _GROUPS:
            size = np.log(self.up / self.up.min())
            bands = max(1, _GROUPS // len(self.people))
            band = np.minimum(size / max(size.max(), 1e-12) * bands, bands - 1).astype(np.int64)
        keys, group = np.unique(np.stack([self.place, band]), axis=1, return_inverse=True)
        group = group.reshape(-1)
        up = np.zeros(keys.shape[1])
        np.maximum.at(up, group, self.up)
        return group, keys[0], up

    def farthest(self, nbytes: float) -> tuple[Seconds, Seconds]:
        """(seconds of one message on the slowest link, longest delay) from each worker to any other."""
        there = np.broadcast_to(self.people > 0, self.link_s.shape).copy()
        np.fill_diagonal(there, self.people > 1)
        slow = np.where(there, self.link_s, 0.0).max(axis=1) * nbytes
        far = np.where(there, self.delay_s, 0.0).max(axis=1)
        return slow[self.place], far[self.place]


class Free(NamedTuple):
    """When each worker's uplink and downlink are free, in seconds; changed in place."""

    up: Seconds
    down: Seconds

    @staticmethod
    def new(n: int) -> Free:
        """All free."""
        return Free(np.zeros(n), np.zeros(n))


class Arrival(NamedTuple):
    """What a worker waits for."""

    heard_s: Seconds
    """When the last message has come."""
    ready_s: Seconds
    """When the sender of that message had done its compute."""


def everybody(net: Net, free: Free, launch_s: Seconds, ready_s: Seconds, nbytes: float) -> Arrival:
    """Everybody sends a message of `nbytes` to each other worker, the next higher id first, from `launch_s` on.

    With k = (j - i) mod n the message from i to j begins at launch_i + (k - 1) nbytes up_i. The maximum over the senders of a group is a
    running maximum over ids. A downlink is busy for all that comes; it is bounded by each set of later groups: their first head, and the
    service of all of them.
    """
    n = net.n
    start_s = np.maximum(launch_s, free.up)
    free.up[:] = start_s + (n - 1) * nbytes * net.up
    group, places, ups = net.groups
    ids = np.arange(n)
    heard, last = np.full(n, -np.inf), np.zeros(n, np.int64)
    service = nbytes * net.down
    busy = free.down + (n - 1) * service
    floor, left = np.full(n, np.inf), np.zeros(n)
    count = np.bincount(group)
    first = np.full(len(count), np.inf)
    np.minimum.at(first, group, start_s)
    order = np.argsort(-first, kind="stable")  # the latest group first, so that a running set is "this group and all later ones"
    block = max(1, _BLOCK // n)
    for lo in range(0, len(order), block):
        rows = order[lo : lo + block]
        mine = group[None, :] == rows[:, None]
        slope = (nbytes * ups[rows])[:, None]
        place = places[rows]
        delay = net.delay_s[place][:, net.place]
        late, who = _latest(np.where(mine, start_s, -np.inf), slope, ids)
        tail = late + np.maximum(slope, nbytes * net.link_s[place][:, net.place]) + delay
        best = tail.argmax(axis=0)
        better = tail[best, ids] > heard
        heard = np.where(better, tail[best, ids], heard)
        last = np.where(better, who[best, ids], last)
        early = _first(np.where(mine, start_s, np.inf), slope, ids)
        heads = np.minimum.accumulate(np.vstack([floor, delay + early]), axis=0)
        counts = left + np.cumsum(count[rows, None] - mine, axis=0)
        floor, left = heads[-1], counts[-1]
        some = np.where(counts > 0, heads[1:] + counts * service, -np.inf)
        busy = np.maximum(busy, some.max(axis=0))
    free.down[:] = busy
    return Arrival(np.maximum(heard, busy), ready_s[last])


def _latest(value: Seconds, slope: Seconds, ids: NDArray[np.int64]) -> tuple[Seconds, NDArray[np.int64]]:
    """max over i != j of value[g, i] + ((j - i) mod n - 1) slope[g], for each group g and worker j; and which i. Shapes [groups, n]."""
    n = len(ids)
    lower = value - slope * ids
    of_lower = _where(lower, most := np.maximum.accumulate(lower, axis=1))
    upper = (lower + n * slope)[:, ::-1]
    of_upper = n - 1 - _where(upper, more := np.maximum.accumulate(upper, axis=1))[:, ::-1]
    a, b = _apart(most, more[:, ::-1])
    who = np.zeros(value.shape, np.int64)
    who[:, 1:] = of_lower[:, :-1]
    late = b > a
    who[:, :-1][late[:, :-1]] = of_upper[:, 1:][late[:, :-1]]
    return np.maximum(a, b) + slope * (ids - 1), who


def _first(value: Seconds, slope: Seconds, ids: NDArray[np.int64]) -> Seconds:
    """min over i != j of the same."""
    lower = value - slope * ids
    upper = (lower + len(ids) * slope)[:, ::-1]
    a, b = _apart(np.minimum.accumulate(lower, axis=1), np.minimum.accumulate(upper, axis=1)[:, ::-1], np.inf)
    return np.minimum(a, b) + slope * (ids - 1)


def _apart(lower: Seconds, upper: Seconds, none: float = -np.inf) -> tuple[Seconds, Seconds]:
    """The two without the worker itself: moved by one to either side."""
    a, b = np.full(lower.shape, none), np.full(upper.shape, none)
    a[:, 1:] = lower[:, :-1]
    b[:, :-1] = upper[:, 1:]
    return a, b


def _where(value: Seconds, running: Seconds) -> NDArray[np.int64]:
    """Where a running maximum along the last axis was reached."""
    return np.maximum.accumulate(np.where(value == running, np.arange(value.shape[1]), 0), axis=1)


class Walk:
    """Gossip over `rounds` rounds. Iterating gives (worker, heard_s, ready_s, peers) whenever a worker has heard all its peers of its
    round; the caller answers with `launch`, which begins the worker's next round."""

    def __init__(self, net: Net, topology: Topology, rounds: int, nbytes: float) -> None:
        self._net, self._topology, self._rounds, self._nbytes = net, topology, rounds, nbytes
        n = net.n
        self._place, self._up, self._down = net.place.tolist(), (nbytes * net.up).tolist(), (nbytes * net.down).tolist()
        self._link, self._delay = (nbytes * net.link_s).tolist(), net.delay_s.tolist()
        self._up_free, self._down_free = [0.0] * n, [0.0] * n
        self._round = [-1] * n
        self._heads: list[tuple[float, int, int, int, float, float]] = []  # head, round, from, to, tail, when the sender was ready
        self._came: dict[tuple[int, int], tuple[int, float, float]] = {}  # (to, round) -> messages, the last one's time, its sender's ready
        self._full: list[int] = []  # workers that have heard all

    def launch(self, i: int, at_s: float, ready_s: float) -> None:
        """Worker i begins its next round's exchange: it speaks at `at_s`, and had done its compute at `ready_s`."""
        self._round[i] += 1
        r = self._round[i]
        if r >= self._rounds:
            return
        graph, a = self._topology.at(r), self._place[i]
        at_s = max(at_s, self._up_free[i])
        for j in graph.out(i):
            b = self._place[j]
            tail_s = at_s + max(self._up[i], self._link[a][b]) + self._delay[a][b]
            heapq.heappush(self._heads, (at_s + self._delay[a][b], r, i, j, tail_s, ready_s))
            at_s += self._up[i]
        self._up_free[i] = at_s
        self._check(i)

    def _check(self, i: int) -> None:
        r = self._round[i]
        if r < self._rounds and self._came.get((i, r), (0, 0.0, 0.0))[0] == len(self._topology.at(r).inn(i)):
            self._full.append(i)

    def __iter__(self) -> Iterator[tuple[int, float, float, int]]:
        while self._full or self._heads:
            if self._full:
                i = self._full.pop()
                count, heard_s, ready_s = self._came.pop((i, self._round[i]), (0, -math.inf, -math.inf))
                yield i, heard_s, ready_s, count
                continue
            head_s, r, _, j, tail_s, ready_s = heapq.heappop(self._heads)
            self._down_free[j] = max(self._down_free[j], head_s) + self._down[j]
            end_s = max(tail_s, self._down_free[j])
            count, last_s, last_ready_s = self._came.get((j, r), (0, -math.inf, 0.0))
            self._came[j, r] = (count + 1, end_s, ready_s) if end_s > last_s else (count + 1, last_s, last_ready_s)
            if r == self._round[j]:
                self._check(j)


def together(net: Net, topology: Topology, nbytes: float) -> Seconds:
    """Seconds until each worker has heard its peers of round 0, when all speak at 0."""
    walk, heard = Walk(net, topology, 1, nbytes), np.zeros(net.n)
    for i in range(net.n):
        walk.launch(i, 0.0, 0.0)
    for i, heard_s, _, _ in walk:
        heard[i] = max(0.0, heard_s)
    return heard


def by_law(net: Net, topology: Topology, nbytes: float, rounds: int) -> tuple[Seconds, Seconds]:
    """(u, d) of gossip, seconds, means over `rounds` graphs: until the last of what a worker says has left its uplink, passed its links and
    come; and what all it hears takes on its downlink.

        u_i = mean_t max_k (k b up_i + max(b up_i, b link_ij) + delay_ij),  j the peer told as number k = 0, 1, ...
        d_i = mean_t deg_i b down_i

    Where peers are drawn from all workers, those with one place and one line are alike, and get the mean of theirs.
    """
    place, up, down = net.place.tolist(), (nbytes * net.up).tolist(), (nbytes * net.down).tolist()
    link, delay = (nbytes * net.link_s).tolist(), net.delay_s.tolist()
    u, d = [0.0] * net.n, [0.0] * net.n
    for r in range(rounds):
        graph = topology.at(r)
        for i in range(net.n):
            a, last_s = place[i], 0.0
            for k, j in enumerate(graph.out(i)):
                b = place[j]
                last_s = max(last_s, k * up[i] + max(up[i], link[a][b]) + delay[a][b])
            u[i] += last_s
            d[i] += len(graph.inn(i)) * down[i]
    drawn = topology.random and getattr(topology, "admissible", None) is None
    alike: dict[Hashable, list[int]] = {}
    for i in range(net.n):
        alike.setdefault((place[i], up[i], down[i]) if drawn else i, []).append(i)
    said, heard = np.zeros(net.n), np.zeros(net.n)
    for those in alike.values():
        said[those] = math.fsum(u[i] for i in those) / (rounds * len(those))
        heard[those] = math.fsum(d[i] for i in those) / (rounds * len(those))
    return said, heard
