"""Gossip goes on without members that are lost. When that has to end: too few are left, or one that was lost is there again."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.real.group import Group
from gossamer.wan.neighbours import Neighbours
from gossamer.wan.records import Spec


class Apart:
    """Whom this site has lost in a session.

    A line that was cut, or a machine that stood still, leaves a process alive whom the others count as dead, and who counts them so: they
    would stay apart for good, each part training by itself. The next session brings them together.

    Args:
        name: of a seat's site.
    """

    def __init__(self, spec: Spec, neighbours: Neighbours, group: Group, name: Callable[[int], str | None]) -> None:
        self._spec, self._neighbours, self._group, self._name = spec, neighbours, group, name
        self._lost: set[int] = set()

    def why(self) -> str:
        """Why the session must end for this site, in words; empty: it goes on. To be asked at each boundary."""
        if self._spec.synchronous:
            return ""  # there a loss ends the session
        living = self._group.living
        for seat in set(self._group.members) - set(living) - self._lost:
            self._lost.add(seat)
            self._neighbours.lost(seat)  # from now on it has to answer anew
        if len(living) < self._spec.min_sites:
            return f"{len(living)} of the sites of this session are left, the run needs {self._spec.min_sites}: it waits"
        back = sorted(self._lost & self._neighbours.alive() - set(living))
        return f"there again: {', '.join(self._name(j) or f'seat {j}' for j in back)}" if back else ""
