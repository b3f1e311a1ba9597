"""Sites that are past the deadline (quorum = "deadline"): the others go on without them."""

from __future__ import annotations

import threading
import time

from gossamer.core.ranges import Ranges
from gossamer.real.board import PeerLost
from gossamer.real.group import Group
from gossamer.wan.deadlines import Deadline
from gossamer.wan.neighbours import Neighbours
from gossamer.wan.roster.records import Spec


class Slow:
    """Looks for them while a session runs. `places`: the ranks of all sites, as the group numbers them."""

    def __init__(self, spec: Spec, deadline: Deadline, neighbours: Neighbours, group: Group, places: Ranges) -> None:
        self._spec, self._deadline, self._neighbours, self._group, self._places = spec, deadline, neighbours, group, places
        self._over = threading.Event()
        self._members = sorted({places.workers[j] for j in group.members if j < places.n})  # and no servers
        on = spec.synchronous and spec.quorum == "deadline" and len(self._members) > spec.min_sites
        self._thread = threading.Thread(target=self._look, daemon=True) if on else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _look(self) -> None:
        group = self._group
        seen = group.board.round - 1
        while not self._over.wait(min(0.25, self._spec.floor_s / 20)):
            round = group.board.round
            for past in range(seen + 1, round):
                self._all_came(past)
            seen = max(seen, round - 1)
            ready_s = self._ready(round)
            if self._places.workers[group.me] not in ready_s:
                continue
            first_s = min(ready_s.values())
            lacking = [j for j in self._members if j not in ready_s]
            if not lacking:
                continue
            waited_s = time.monotonic() - first_s
            if waited_s > self._deadline.seconds and len(ready_s) >= self._spec.min_sites:
                for _ in lacking:
                    self._deadline.missed(waited_s)
                self._neighbours.late(frozenset(lacking))
                late = self._places.seats(lacking[0])[0]
                group.board.fail(PeerLost(late, round, f"past the deadline of {self._deadline.seconds:.3g} s"))
                return

    def _all_came(self, round: int) -> None:
        """A round is over: how long the first has waited for each."""
        ready_s = self._ready(round)
        for at_s in ready_s.values():
            self._deadline.arrived(at_s - min(ready_s.values()))

    def _ready(self, round: int) -> dict[int, float]:
        """Which sites are ready, with all of their ranks, and since when. The ranks of this one keep step by themselves."""
        ready_s, own = self._group.notes.ready_at(round), self._places.workers[self._group.me]
        found: dict[int, float] = {}
        for worker in self._members:
            ranks = [self._group.me] if worker == own else self._places.seats(worker)
            if all(j in ready_s for j in ranks):
                found[worker] = max(ready_s[j] for j in ranks)
        return found
