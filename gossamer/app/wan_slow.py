"""Sites that are past the deadline (quorum = "deadline"): the others go on without them."""

from __future__ import annotations

import threading
import time

from gossamer.real.board import PeerLost
from gossamer.real.group import Group
from gossamer.wan.deadlines import Deadline
from gossamer.wan.neighbours import Neighbours
from gossamer.wan.records import Spec


class Slow:
    """Looks for them while a session runs."""

    def __init__(self, spec: Spec, deadline: Deadline, neighbours: Neighbours, group: Group) -> None:
        self._spec, self._deadline, self._neighbours, self._group = spec, deadline, neighbours, group
        self._over = threading.Event()
        on = spec.synchronous and spec.quorum == "deadline" and len(group.members) > spec.min_sites
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
            ready_s = group.notes.ready_at(round)
            if not ready_s or group.me not in ready_s:
                continue
            first_s = min(ready_s.values())
            lacking = [j for j in group.members if j not in ready_s]
            if not lacking:
                continue
            waited_s = time.monotonic() - first_s
            if waited_s > self._deadline.seconds and len(ready_s) >= self._spec.min_sites:
                for _ in lacking:
                    self._deadline.missed(waited_s)
                self._neighbours.late(frozenset(lacking))
                group.board.fail(PeerLost(lacking[0], round, f"past the deadline of {self._deadline.seconds:.3g} s"))
                return

    def _all_came(self, round: int) -> None:
        """A round is over: how long the first has waited for each."""
        ready_s = self._group.notes.ready_at(round)
        for at_s in ready_s.values():
            self._deadline.arrived(at_s - min(ready_s.values()))
