"""The network of a run with servers: what stays within a site takes its local link, the rest goes by the site's up- and downlink."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gossamer.core.fleet import Fleet
from gossamer.sim.network import Network, Sharing
from gossamer.sim.paths import Event


class SeatNetwork:
    """Moves messages between seats: workers, and servers that stand at the sites of some of them.

    Every seat has an up- and a downlink of its own, like those of a worker of its site. A message between two seats of one site does not
    pass them: it takes the fleet's local link of its ordered pair.

    Args:
        hosts: the worker at whose site each seat stands (`gossamer.core.tiers.hosts`).
        seed, sharing: as for `Network`.
    """

    def __init__(self, fleet: Fleet, hosts: Sequence[int], seed: int = 0, sharing: Sharing = "queue") -> None:
        yard = replace(fleet.sites[0], workers=len(hosts), up_mbps=math.inf, down_mbps=math.inf, trace=None)
        self._sites = [fleet.site(i).name for i in hosts]
        self._inside = Network(replace(fleet, sites=(yard,), links={}), seed, sharing)
        self._outside = Network(fleet, seed, sharing, hosts)
        self._staying: set[int] = set()

    def launch(self, now_s: float, key: int, src: int, dst: int, nbytes: int) -> list[Event]:
        """As `Network.launch`; src and dst are seats."""
        if self._sites[src] != self._sites[dst]:
            return self._outside.launch(now_s, key, src, dst, nbytes)
        self._staying.add(key)
        return self._inside.launch(now_s, key, src, dst, nbytes)

    def finish(self, when_s: float, key: int, version: int) -> tuple[bool, list[Event]]:
        """As `Network.finish`."""
        delivered, later = (self._inside if key in self._staying else self._outside).finish(when_s, key, version)
        if delivered:
            self._staying.discard(key)
        return delivered, later
