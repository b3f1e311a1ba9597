"""Gossip goes on without members that are lost. When that has to end: too few are left, or one that was lost is there again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gossamer.core.ranges import Ranges
from gossamer.real.group import Group
from gossamer.wan.neighbours import Neighbours
from gossamer.wan.roster.records import Member, Spec


class Missing:
    """Who of a run is gone, in words: each loss is said once, and so is each return.

    Args:
        called: what the site of a seat is called.
    """

    def __init__(self, say: Callable[[str], None], called: Callable[[int], str]) -> None:
        self._say, self._called = say, called
        self._gone: set[int] = set()
        self._left: set[int] = set()
        """Who of these went of its own will, as the roster said."""
        self._members: frozenset[int] = frozenset()

    def lost(self, seat: int, why: str, then: str) -> None:
        """A site is gone. `then`: what the others do."""
        if seat not in self._gone:
            self._gone.add(seat)
            self._say(f"{self._called(seat)} is gone ({why}): {then}")

    def listed(self, members: Iterable[Member]) -> None:
        """What the roster says of the sites, while no session opens: who of the last one has left, and who of these is there again."""
        for member in members:
            if member.left and member.seat in self._members - self._gone:
                self._gone.add(member.seat)
                self._left.add(member.seat)
                self._say(f"{self._called(member.seat)} has left")
            elif member.there and member.seat in self._left:
                self._is_back(member.seat)

    def met(self, members: Iterable[int]) -> None:
        """These have met in a session."""
        before, self._members = self._members, frozenset(members)
        for seat in sorted(self._members & self._gone):
            self._is_back(seat)
        for seat in sorted(before - self._members - self._gone):
            self._gone.add(seat)
            self._say(f"{self._called(seat)} has left")

    def _is_back(self, seat: int) -> None:
        self._gone.discard(seat)
        self._left.discard(seat)
        self._say(f"{self._called(seat)} is back")


class Apart:
    """Whom this site has lost in a session.

    A line that was cut, or a machine that stood still, leaves a process alive whom the others count as dead, and who counts them so: they
    would stay apart for good, each part training by itself. The next session brings them together.

    Args:
        name: of a seat's site.
        missing: told of each loss when it is noticed.
        places: the ranks of all sites, as the group numbers them.
    """

    def __init__(
        self,
        spec: Spec,
        neighbours: Neighbours,
        group: Group,
        name: Callable[[int], str | None],
        missing: Missing,
        places: Ranges,
    ) -> None:
        self._spec, self._neighbours, self._group, self._name, self._missing = spec, neighbours, group, name, missing
        self._places = places
        self._lost: set[int] = set()
        if not spec.synchronous:
            learn = group.board.on_death

            def on_death(gone: frozenset[int]) -> None:
                learn(gone)
                self._say()

            group.board.on_death = on_death
            self._say()

    def _say(self) -> None:
        for number, why in sorted(self._group.board.dead.items()):
            for seat in self._seats([number]):
                self._missing.lost(seat, why, "the others go on without it")

    def _seats(self, numbers: Iterable[int]) -> set[int]:
        """Of the sites; beyond these are servers, which are in the processes of sites."""
        return {self._places.workers[j] for j in numbers if j < self._places.n}

    def why(self) -> str:
        """Why the session must end for this site, in words; empty: it goes on. To be asked at each boundary."""
        if self._spec.synchronous:
            return ""  # there a loss ends the session
        living = self._seats(self._group.living)
        for seat in self._seats(self._group.members) - living - self._lost:
            self._lost.add(seat)
            self._neighbours.lost(seat)  # from now on it has to answer anew
        if len(living) < self._spec.min_sites:
            return f"{len(living)} of the sites of this session are left, the run needs {self._spec.min_sites}: it waits"
        back = sorted(self._lost & self._neighbours.alive() - living)
        return f"there again: {', '.join(self._name(j) or f'seat {j}' for j in back)}" if back else ""
