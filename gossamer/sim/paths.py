"""What lies between two workers, ready for arithmetic: shared by the two ways of sharing a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from gossamer.core.fleet import Fleet, Link
from gossamer.core.rng import Stream, uniform
from gossamer.core.trace import Trace

Event: TypeAlias = tuple[float, int, int]
"""(when in seconds, key of the message, version): to be given back to `finish` at that time."""

MBPS = 125_000.0
"""Bytes per second in one Mbit/s."""
_JITTER_BLOCK = 64
_JITTER_KEPT = 4096


class Route(NamedTuple):
    """What two places have between them, ready for arithmetic."""

    s_per_byte: float
    """1 / what one message can get on the link."""
    delay_s: float
    """One-way latency and the constant per message."""
    jitter_s: float
    trace: Trace | None


class Paths:
    """The constants of a fleet, and the jitter of its pairs. Shared by the two modes. Each node stands where the worker `hosts[node]` does,
    with links like that worker's own; by default the nodes are the workers."""

    def __init__(self, fleet: Fleet, seed: int, hosts: Sequence[int] | None = None) -> None:
        self._hosts = range(fleet.n) if hosts is None else tuple(hosts)
        self.n = len(self._hosts)
        self.up_s_per_byte = [1.0 / (MBPS * fleet.site(i).up_mbps) for i in self._hosts]
        self.down_s_per_byte = [1.0 / (MBPS * fleet.site(i).down_mbps) for i in self._hosts]
        self.traces = [fleet.site(i).trace for i in self._hosts]
        self.traced = any(t is not None for t in self.traces) or any(
            link.trace is not None for link in (fleet.local, *fleet.links.values())
        )
        self.counts: list[dict[int, int]] = [{} for _ in range(self.n)]
        """counts[src][dst]: messages so far, kept for pairs with jitter."""
        self._fleet, self._seed = fleet, seed
        self._places = [fleet.place(i) for i in self._hosts]
        self._width = max(self._places) + 1
        self._routes: dict[int, Route] = {}
        self._drawn: dict[tuple[int, int], tuple[int, list[float]]] = {}

    def route(self, src: int, dst: int) -> Route:
        """The constants of the link from src to dst."""
        key = self._places[src] * self._width + self._places[dst]
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._made(self._fleet.link(self._hosts[src], self._hosts[dst]))
        return found

    def _made(self, link: Link) -> Route:
        return Route(1.0 / (MBPS * link.flow_mbps), 1e-3 * link.latency_ms + self._fleet.message_s, 1e-3 * link.jitter_ms, link.trace)

    def jitter_s(self, src: int, dst: int, mean_s: float) -> float:
        """The extra delay of the next message from src to dst: exponential with the given mean."""
        count = self.counts[src].get(dst, 0)
        self.counts[src][dst] = count + 1
        block, offset = divmod(count, _JITTER_BLOCK)
        drawn = self._drawn.get((src, dst))
        if drawn is None or drawn[0] != block:
            drawn = (block, [-math.log(u) for u in uniform(_JITTER_BLOCK, self._seed, Stream.JITTER, src, dst, block).tolist()])
            if len(self._drawn) >= _JITTER_KEPT:
                self._drawn.clear()
            self._drawn[src, dst] = drawn
        return mean_s * drawn[1][offset]
