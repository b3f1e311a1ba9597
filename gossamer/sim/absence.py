"""Who is dead in a simulated run, which exchanges are skipped for it, and from which round on the graphs are drawn without them.

The simulator sees everything, so that agreeing costs neither time nor messages; what is agreed on is what real workers agree on
(gossamer.real.members): a death holds from the first round that none of the living has entered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gossamer.core.errors import RunFailed
from gossamer.core.members import Roll
from gossamer.sim.mailbox import Flight
from gossamer.sim.worker import Worker
from gossamer.worker.effects import Addr, Gather, Go, Program

Restart: TypeAlias = Callable[[Addr, int, Addr, Roll], Program]
"""(worker, round, sponsor, roll) -> the program of a worker that comes back with a round (gossamer.worker.entry.back)."""


class Absences:
    """The deaths and returns of a run.

    Args:
        kills: worker -> rounds that it completes before it dies.
        returns: worker -> the boundary that brings it back when the first worker comes to it: with the next round that nobody has entered.
        restart: makes the program of a worker that comes back.
        kept: what `snapshot` gave, of a run that goes on.
        goes_on: whether the others go on without a worker that has died; if not, that ends the run.
        end: rounds of the run: nobody comes back when there is none left.
    """

    def __init__(
        self,
        kills: Mapping[Addr, int] | None = None,
        returns: Mapping[Addr, int] | None = None,
        restart: Restart | None = None,
        kept: Mapping[str, Any] | None = None,
        goes_on: bool = True,
        end: float = math.inf,
    ) -> None:
        self.roll = Roll()
        self.gone: dict[Addr, float] = {}
        """Who has died -> the round that it came back with; infinity while it is dead."""
        self.active = bool(kills)
        """Whether anything can be absent at all; without, nothing here is asked."""
        self.restart = restart
        self._goes_on, self._end = goes_on, end
        self._kills, self._returns = dict(kills or {}), dict(returns or {})
        self._skipped: dict[int, set[frozenset[Addr]]] = defaultdict(set)
        self._ended: dict[int, set[Addr]] = defaultdict(set)
        if kept:
            self.roll.epochs = [(round, frozenset(absent)) for round, absent in kept["epochs"]]
            self.gone = {int(j): math.inf if r is None else float(r) for j, r in kept["gone"].items()}

    def snapshot(self) -> dict[str, Any]:
        """What a run that goes on must know, in values that JSON holds."""
        return {
            "epochs": [[round, sorted(absent)] for round, absent in self.roll.epochs],
            "gone": {str(j): None if r == math.inf else int(r) for j, r in self.gone.items()},
        }

    # ---- deaths and returns

    def living(self, workers: Sequence[Worker]) -> list[Worker]:
        """All but the dead; who is to come back is dead until it does."""
        return [w for w in workers if self.gone.get(w.addr, 0) <= w.round]

    def dies(self, worker: Addr, round: int) -> bool:
        """Whether `worker` is dead once it has completed `round` rounds."""
        return self._kills.get(worker, -1) == round and worker not in self.gone

    def bury(self, worker: Addr, rounds: Iterable[int]) -> None:
        """`worker` is dead. `rounds`: where those who are not stand.

        Raises:
            RunFailed: the run does not go on without it.
        """
        if not self._goes_on:
            raise RunFailed(f"worker {worker} died after round {self._kills[worker]} (clock.kill), and the run cannot go on without it")
        self.gone[worker] = math.inf
        since = 1 + max(rounds, default=0)
        self.roll.enter(since, {*self.roll.absent(since), worker})

    def missing(self, round: int) -> frozenset[Addr]:
        """Who never comes to the boundary of `round`: dead before, and not back before."""
        return frozenset(j for j, last in self._kills.items() if last < round and not self.gone.get(j, math.inf) < round)

    def due(self, round: int, rounds: Iterable[int]) -> None:
        """Somebody has come to the boundary of `round`: whoever is to come back then, does so with a round that is agreed on now."""
        for worker, at in self._returns.items():
            if round >= at and self.gone.get(worker) == math.inf and (since := 1 + max(rounds)) < self._end:
                self.gone[worker] = since
                self.roll.enter(since, self.roll.absent(since) - {worker})

    def welcome(self, round: int, workers: Sequence[Worker]) -> tuple[Addr, ...]:
        """Who comes back with `round`, asked at its boundary: the first to ask is the sponsor."""
        return tuple(j for j, since in sorted(self.gone.items()) if since == round and workers[j].finished and workers[j].round < round)

    def reply(self, round: int, welcome: tuple[Addr, ...]) -> Go:
        """To a worker at the boundary of `round`."""
        return Go(self.roll.absent(round), welcome)

    # ---- exchanges that do not take place

    def reduced(self, worker: Worker, gather: Gather, flight: Flight, seats: int) -> Gather:
        """The wait without those who will not be heard. What the dead had sent arrives, and counts."""
        absent = [j for j in gather.frm if self._is_out(worker, gather.tag, j, flight, seats)]
        for j in absent:
            gather = without(worker, gather, j)
        return gather

    def _is_out(self, worker: Worker, tag: int, j: Addr, flight: Flight, seats: int) -> bool:
        if self.was_skipped(tag, worker.addr, j):
            return True
        return self.lost(j, tag) and not worker.mail.holds(tag, j) and not flight.carries((tag * seats + j) * seats + worker.addr)

    def lost(self, j: Addr, tag: int) -> bool:
        """Whether worker j, being dead, sends and takes no message of `tag` any more."""
        return tag // 8 < self.gone.get(j, 0)

    def was_skipped(self, tag: int, a: Addr, b: Addr) -> bool:
        """Whether the two have given up their exchange."""
        return frozenset((a, b)) in self._skipped.get(tag, ())

    def skip(self, tag: int, a: Addr, b: Addr) -> bool:
        """Worker a gives up its exchange with b, unless b has gone on with what it heard. Returns whether it is skipped, by both."""
        if b in self._ended[tag]:
            return False
        self._skipped[tag].add(frozenset((a, b)))
        return True

    def ended(self, worker: Addr, tag: int) -> None:
        """`worker` has gone on with what it heard of `tag`."""
        self._ended[tag].add(worker)

    def forget(self, round: int) -> None:
        """Nobody will ask for rounds before `round` any more."""
        for book in (self._skipped, self._ended):
            for old in [tag for tag in book if tag // 8 < round]:
                del book[old]


def without(worker: Worker, gather: Gather, j: Addr) -> Gather:
    """The wait without worker j, whose message is let go."""
    worker.mail.drop(gather.tag, j)
    return gather._replace(frm=tuple(i for i in gather.frm if i != j))
