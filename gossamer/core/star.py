"""A star: the best-connected worker, and when messages to it and from it arrive (for `gossamer.core.predict`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gossamer.core.codec.base import Format
from gossamer.core.exchange import Hub
from gossamer.core.matching import Rates
from gossamer.core.tree import Part
from gossamer.core.wires import Arrival, Free, Net

_MILLION = (Part("million", 1_000_000, 0, 1_000_000, 1000),)


def best_connected(rates: Rates, handed: float) -> int:
    """The worker over which a star is quickest; of several the lowest. What each says counts 1, what the hub hands to each `handed`:

        max(max_i 1 / r_ih, (n - 1) / down_h) + handed * max((n - 1) / up_h, max_j 1 / r_hj)

    with r_ij = min(up_i, link_ij, down_j). Rates as declared; latency is left out.

    >>> links = ((100.0, 100.0, 9.0), (100.0, 100.0, 100.0), (9.0, 100.0, 100.0))
    >>> best_connected(Rates((500.0,) * 3, (500.0,) * 3, (0, 1, 2), links), 1.0)
    1
    """
    n, kinds = rates.n, list(rates.kinds)
    place, up, down = (np.array(column) for column in zip(*kinds, strict=True))
    link = np.array(rates.link)[place][:, place]
    pace = 1.0 / np.minimum(np.minimum(up[:, None], link), down)
    pace[np.diag(np.bincount(rates.kind) == 1)] = 0.0  # the only one of its kind sends nothing to itself
    inward = np.maximum(pace.max(axis=0), (n - 1) / down)
    outward = np.maximum(pace.max(axis=1), (n - 1) / up)
    cost = inward + handed * outward
    return min(range(n), key=lambda i: (cost[rates.kind[i]], i))


def middle(hub: Hub, codec: Format, workers: tuple[int, ...]) -> int:
    """The worker in the middle of a star among `workers`, the same wherever it is asked: the hub; where it is none of them the
    best-connected of them, for what the codec makes of a matrix of a million parameters; where no rates are known the lowest.

    >>> from gossamer.core.codec import Fp32
    >>> links = ((100.0, 100.0, 9.0), (100.0, 100.0, 100.0), (9.0, 100.0, 100.0))
    >>> rates = Rates((500.0, 500.0, 50.0), (500.0,) * 3, (0, 1, 2), links)
    >>> [middle(Hub(2, rates), Fp32(), workers) for workers in ((0, 1, 2), (0, 1), (0,))]
    [2, 0, 0]
    """
    if hub.at in workers:
        return hub.at
    if hub.rates is None or len(workers) == 1:
        return min(workers)
    return _best_of(hub.rates, workers, handed(codec, len(workers)))


@lru_cache(maxsize=1024)
def _best_of(rates: Rates, workers: tuple[int, ...], handed: float) -> int:
    return workers[best_connected(rates.among(workers), handed)]


def handed(codec: Format, n: int) -> float:
    """What the hub of n workers hands to each, counted in what each says, for a matrix of a million parameters."""
    return sum(Hub(0).hands(codec, _MILLION, n, 0)) / codec.nbytes(_MILLION)


def inward(net: Net, free: Free, hub: int, launch_s: np.ndarray, ready_s: np.ndarray, nbytes: float) -> Arrival:
    """Everybody else sends one message to the hub at `launch_s`. Nobody but the hub hears anything."""
    others = _others(net.n, hub)
    heard, ready = np.full(net.n, -np.inf), np.zeros(net.n)
    start_s = np.maximum(launch_s, free.up)[others]
    free.up[others] = start_s + nbytes * net.up[others]
    a, b = net.place[others], net.place[hub]
    head_s = start_s + net.delay_s[a, b]
    tail_s = head_s + nbytes * np.maximum(net.up[others], net.link_s[a, b])
    for k in np.argsort(head_s, kind="stable"):
        free.down[hub] = max(free.down[hub], head_s[k]) + nbytes * net.down[hub]
        end_s = max(tail_s[k], free.down[hub])
        if end_s > heard[hub]:
            heard[hub], ready[hub] = end_s, ready_s[others[k]]
    return Arrival(heard, ready)


def outward(net: Net, free: Free, hub: int, at_s: float, ready_s: float, waves: tuple[float, ...]) -> Arrival:
    """The hub sends to each other worker, the next higher first, a message of each size in `waves`, wave by wave, from `at_s` on. The hub
    hears nothing. `ready_s`: when the last whose data that is was ready."""
    others = _others(net.n, hub)
    heard = np.full(net.n, -np.inf)
    at_s, up, n = max(at_s, float(free.up[hub])), float(net.up[hub]), len(others)
    total, first, last = sum(waves), waves[0], waves[-1]
    place = np.arange(n)
    a, b = net.place[hub], net.place[others]
    delay_s, down = net.delay_s[a, b], net.down[others]
    begin_s = at_s + place * first * up
    last_s = at_s + (n * (total - last) + place * last) * up  # the last message for each begins
    free.up[hub] = at_s + n * total * up
    on_link_s = np.maximum(begin_s + total * net.link_s[a, b], last_s + last * net.link_s[a, b])
    tail_s = np.maximum(last_s + last * up, on_link_s) + delay_s
    busy_s = np.maximum(free.down[others], begin_s + delay_s) + total * down
    free.down[others] = np.maximum(busy_s, last_s + delay_s + last * down)
    heard[others] = np.maximum(tail_s, free.down[others])
    return Arrival(heard, np.full(net.n, ready_s))


def _others(n: int, hub: int) -> np.ndarray:
    return (hub + 1 + np.arange(n - 1)) % n
