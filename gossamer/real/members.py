"""The agreement of real workers on who is dead, and from which round on the graphs are drawn without them. No coordinator, no clock.

A worker that learns of a death (a connection that closes, the word of another) publishes a *view* to all others: who is dead as far as it
knows, the first round that it has not entered, and what was agreed on before. From then on it passes no boundary until it has the same set
of dead from everybody who is not in it. Then, for each of the dead: the round that somebody has already agreed on, else the highest of the
first rounds. With another death the set is another one, and all publish again.

Why all agree. A set is settled from one view of each of its living, and everybody gets the same ones: a worker publishes a set once. Who
settles a set and then dies has told nobody but by entering rounds, which it did not survive. Who settles a set that others never do (since
they learn of the next death first) says in its next view what it had settled, and they take it over: its view of the next set is one
of those that they wait for. And nobody has entered a round of a new epoch before, since the epoch begins with the highest first round, and
whoever has published stands still. Publishing needs no progress of the program, so nobody waits for long.

A request to stop is one more element of the set, `stop`: the boundary to stop at is agreed on like the round of a death.

It is taken for granted that a closed connection is a death. Two halves of a fleet that lose sight of each other would both go on: on
one machine that does not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.worker.effects import Addr


class View(NamedTuple):
    """What a worker tells all others when the set of the dead has grown."""

    dead: frozenset[Addr]
    first: int
    """The first round that it has not entered."""
    since: dict[Addr, int]
    """Of those among the dead on whom it has agreed before: the first round without them."""


class Members:
    """What one of `n` workers knows of who is alive. Address n stands for the request to stop. Whoever is none of `everybody` is out of it
    from the start."""

    def __init__(self, me: Addr, n: int, everybody: Sequence[Addr] | None = None) -> None:
        self.me, self.stop = me, n
        self.dead: frozenset[Addr] = frozenset()
        """Known to be dead; with `stop`, when that was asked for."""
        self.since: dict[Addr, int] = {}
        """Agreed on: the first round without each."""
        self.passed = 0
        """The last boundary that this worker has passed: it is in the round of this number."""
        self._everybody = frozenset(range(n) if everybody is None else everybody)
        self._outside = frozenset(range(n)) - self._everybody
        self._views: dict[Addr, View] = {}

    @property
    def settled(self) -> bool:
        """Whether a boundary may be passed: all deaths known of are agreed on."""
        return len(self.since) == len(self.dead)

    def absent(self, round: int) -> frozenset[Addr]:
        """Who is left out in `round`."""
        return self._outside | {j for j, since in self.since.items() if since <= round and j != self.stop}

    def learn(self, dead: frozenset[Addr]) -> View | None:
        """These are dead. The view to publish, if that is news."""
        if dead <= self.dead:
            return None
        self.dead |= dead
        view = self._views[self.me] = View(self.dead, self.passed + 1, dict(self.since))
        self._settle()
        return view

    def hear(self, src: Addr, view: View) -> View | None:
        """Another worker's view. The own one to publish, if that is news."""
        self._views[src] = view
        mine = self.learn(view.dead)
        self._settle()
        return mine

    def _settle(self) -> None:
        living = self._everybody - self.dead
        views = [self._views[j] for j in living if j in self._views and self._views[j].dead == self.dead]
        if self.settled or len(views) < len(living):
            return
        agreed = {j: since for view in views for j, since in view.since.items()}
        first = max(view.first for view in views)
        self.since = {j: agreed.get(j, first) for j in self.dead}
