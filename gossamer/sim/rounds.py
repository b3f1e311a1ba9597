"""Which rounds the workers are in, how far apart they may be, and when each was ready: what tells straggler idle from network idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gossamer.sim.worker import Worker
from gossamer.worker.effects import Addr, Boundary

_KEPT_ROUNDS = 2
"""Stamps are kept for this many rounds behind the slowest worker: an exchange in flight across a boundary still asks for them."""


class Rounds:
    """READY stamps, and how many workers are in each round.

    Args:
        rounds: the round of each worker at the start.
        forget: told of a round, when nobody will ask for earlier ones any more.
        wake: a worker that was held may go on.
        ahead: the most rounds that a worker may have completed more than the slowest; 0: as many as its peers let it.
    """

    __slots__ = ("_ahead", "_at", "_forget", "_held", "_wake", "ready_s")

    def __init__(
        self, rounds: Iterable[int], forget: Callable[[int], None], wake: Callable[[Worker], None] = lambda worker: None, ahead: int = 0
    ) -> None:
        self.ready_s: dict[tuple[int, int], dict[Addr, float]] = {}
        """(round, fragment) -> worker -> when its compute ended."""
        self._at: dict[int, int] = {}
        self._forget, self._wake, self._ahead = forget, wake, ahead
        self._held: list[Worker] = []
        for r in rounds:
            self.enter(r)

    def ready(self, worker: Worker, round: int, fragment: int) -> None:
        """The worker's compute of a round, as far as a fragment carries it, is done."""
        self.ready_s.setdefault((round, fragment), {})[worker.addr] = worker.now_s

    def enter(self, round: int) -> None:
        """A worker begins a round."""
        self._at[round] = self._at.get(round, 0) + 1

    def lets(self, worker: Worker, boundary: Boundary) -> bool:
        """Whether a worker may pass; if not, it is woken when it may."""
        if not self._ahead or boundary.round - min(self._at) <= self._ahead:
            return True
        worker.parked = boundary
        self._held.append(worker)
        return False

    def cross(self, worker: Worker, round: int) -> None:
        """A worker has completed `round` rounds."""
        self.enter(round)
        worker.step = 0
        self.leave(worker)
        worker.round = round

    def leave(self, worker: Worker) -> None:
        """A worker is in its round no more: forgets the stamps that nobody will ask for any more."""
        at, ready_s = self._at, self.ready_s
        at[worker.round] -= 1
        if at[worker.round] == 0:
            del at[worker.round]
            slowest = min(at, default=None)
            if slowest is not None and slowest > worker.round:
                first = slowest - _KEPT_ROUNDS
                for old in [key for key in ready_s if key[0] < first]:
                    del ready_s[old]
                self._forget(first)
                held, self._held = self._held, []
                for waiting in held:
                    self._wake(waiting)  # and it asks again
