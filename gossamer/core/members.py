"""Who takes part in which round, and the graph of those who do.

Workers die, and some come back. From an agreed round on, the graph of a round is drawn over the living alone: a fresh matching or cycle of
m instead of n workers, the same on all of them. Before that round an exchange whose peer is gone is skipped, and its weight stays at home.

>>> from gossamer.core.topology import OnePeer
>>> roll = Roll()
>>> roll.enter(10, {3})
>>> roll.absent(9), roll.absent(10)
(frozenset(), frozenset({3}))
>>> over(OnePeer(4, seed=1), roll.absent(12), 12).row(3)
((3, 1.0),)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from gossamer.core.averaging import Averaged
from gossamer.core.matching import Preferred
from gossamer.core.mixing import Mixing
from gossamer.core.topology import KEPT, Complete, OnePeer, OnePeerExp, Ring, Topology, TwoPeer

Absent = frozenset[int]
"""Workers that are left out."""

NOBODY: Absent = frozenset()


@dataclass
class Roll:
    """Membership over the rounds. It grows at the end only: what holds in a round that somebody has entered never changes."""

    epochs: list[tuple[int, Absent]] = field(default_factory=list)
    """(first round, who is left out from it on), rounds rising."""
    unheard: tuple[int, Absent] = (0, NOBODY)
    """(round, workers): exchanges of rounds before it with these workers do not take place, whatever the graph says. For those who came
    back in another process, and hold nothing of what they had said."""

    def absent(self, round: int) -> Absent:
        """Who is left out in `round`."""
        if not self.epochs:
            return NOBODY
        place = bisect_right(self.epochs, round, key=lambda epoch: epoch[0])
        return self.epochs[place - 1][1] if place else NOBODY

    def enter(self, round: int, absent: Iterable[int]) -> None:
        """From `round` on, which nobody has entered, these are left out."""
        self.epochs = [epoch for epoch in self.epochs if epoch[0] < round]
        if (left := frozenset(absent)) != self.absent(round):
            self.epochs.append((round, left))

    def heard(self, round: int, workers: Sequence[int]) -> tuple[int, ...]:
        """Of these peers of `round`, those with whom the exchange can take place."""
        before, unheard = self.unheard
        return tuple(j for j in workers if j not in unheard) if round < before else tuple(workers)


def over(topology: Topology, absent: Absent, round: int) -> Mixing:
    """The mixing matrix of `round` over those who are not absent, who keep their addresses; an absent worker is by itself.

    Of a topology that is a rule for any number of workers (all the named ones) it is the graph of m workers, relabelled in order of
    address: with the seed and round of the whole, so that nobody needs to talk. Of any other (with an admissible graph, or a user's own)
    it is the graph of all without the absent, whose weight stays at home: that keeps a symmetric matrix symmetric.
    """
    return _over(topology, absent, round) if absent else topology.at(round)  # type: ignore[arg-type]  # frozen dataclasses, all of them


@lru_cache(KEPT)
def _over(topology: Topology, absent: Absent, round: int) -> Mixing:
    n = topology.n
    living = [i for i in range(n) if i not in absent]
    if not living:
        return Mixing.from_edges(n, [], 1.0)
    if (smaller := _of(topology, living)) is not None:
        few = smaller.at(round)
        entries = [(living[i], living[j], w) for i in range(few.n) for j, w in few.row(i)]
    else:
        entries = [(i, j, w) for i in living for j, w in topology.at(round).row(i) if j not in absent]
    return Mixing.from_edges(n, np.array([(i, j) for i, j, _ in entries]), np.array([w for _, _, w in entries]))


@lru_cache(KEPT)
def _drawn(topology: Preferred, absent: Absent) -> Preferred:
    return topology.among([i for i in range(topology.n) if i not in absent])


def _of(topology: Topology, living: Sequence[int]) -> Topology | None:
    """The same rule among the living, where it is one."""
    m = len(living)
    if type(topology) is Preferred:
        return _drawn(topology, frozenset(range(topology.n)).difference(living))
    if type(topology) is Averaged:
        return None if (base := _of(topology.base, living)) is None else replace(topology, base=base)
    if type(topology) is OnePeer and topology.admissible is None:
        return replace(topology, n=m, perfect=False)
    if type(topology) is TwoPeer and topology.admissible is None:
        return replace(topology, n=m)
    if type(topology) in (Ring, Complete, OnePeerExp):
        return replace(topology, n=m)  # type: ignore[type-var]
    return None
