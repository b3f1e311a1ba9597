"""Which processes of a run are the ranks of one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.worker.effects import Addr


class Seats:
    """Which worker each seat (process) of a run belongs to, seats numbered worker by worker. `names`: of seats that are none (servers).

    >>> seats = Seats([0, 1, 1])
    >>> seats.site(2), seats.name(0), seats.name(2)
    ((1, 2), 'worker 0', 'worker 1 (rank 1)')
    """

    def __init__(self, workers: Sequence[Addr], names: Mapping[Addr, str] | None = None) -> None:
        self.workers = tuple(workers)
        self._names = dict(names or {})

    def site(self, seat: Addr) -> tuple[Addr, ...]:
        """All seats of the worker that has this one."""
        return tuple(s for s, worker in enumerate(self.workers) if worker == self.workers[seat])

    def rank(self, seat: Addr) -> int:
        """Its number within its worker."""
        return self.site(seat).index(seat)

    def name(self, seat: Addr) -> str:
        """As messages have it."""
        worker = self.workers[seat]
        if seat in self._names:
            return self._names[seat]
        return f"worker {worker}" if len(self.site(seat)) == 1 else f"worker {worker} (rank {self.rank(seat)})"
