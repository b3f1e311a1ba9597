"""What the threads of one worker tell its main thread: something arrived, somebody is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from gossamer.core.errors import RunFailed
from gossamer.real.seats import Seats
from gossamer.worker.effects import Addr

_VERDICT_S = 0.5
"""How long a broken data connection waits for its reason to come over the notes connection."""


class PeerLost(RunFailed):
    """Another worker is gone. The run ends here; the cause is there."""

    def __init__(self, worker: Addr, round: int, why: str, name: str = "") -> None:
        super().__init__(f"{name or f'worker {worker}'} is gone (round {round}: {why}); the run cannot go on without it")
        self.worker = worker
        """Its seat: where all workers have one rank, its number."""
        self.round = round
        self.why = why
        self.name = name

    def __reduce__(self) -> tuple[type[PeerLost], tuple[Addr, int, str, str]]:
        return type(self), (self.worker, self.round, self.why, self.name)


class Board:
    """One condition variable for everything that a worker waits for, and the failure that ends all waits.

    A worker that ends tells why over the notes connection before it closes anything. So a broken data connection is only a suspicion, which
    stands when no reason has come within half a second: else the survivors would blame each other.
    """

    def __init__(self, survives: bool = False, seats: Seats | None = None, me: Addr = 0) -> None:
        self.changed = threading.Condition()
        self.survives = survives
        """Whether this worker goes on when another one is gone."""
        self.seats = seats
        """Which seats are ranks of one worker, that is there or gone with all of them; None where each is a worker."""
        self._me = me
        self.over = False
        """This worker closes its connections. That others go with them is no news, and nobody must be told of it."""
        self.dead: dict[Addr, str] = {}
        """Who is gone, and why; empty where that ends the run."""
        self.on_death: Callable[[frozenset[Addr]], None] = lambda gone: None
        """Told of each worker, as all of its seats, with the condition held."""
        self.failure: RunFailed | None = None
        self.left: set[Addr] = set()
        """Workers that have left cleanly: that their connections close is no failure."""
        self.called: Callable[[Addr], str] | None = None
        """What a seat is called in messages, where not by its number."""
        self.round = 0
        """The round that this worker is in, for messages."""
        self._suspects: dict[Addr, tuple[float, str]] = {}

    def fail(self, error: RunFailed) -> None:
        """The run cannot go on. The first reason counts."""
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()

    def gone(self, worker: Addr, why: str) -> None:
        """`worker` is gone for certain."""
        with self.changed:
            if self.over or worker in self.left or worker in self.dead:
                return
            site = self.site_of(worker)
            if not self.survives or self._me in site:
                self.fail(PeerLost(worker, self.round, why, self.name(worker)))
                return
            for seat in site:
                self.dead[seat] = why
                self._suspects.pop(seat, None)
            self.on_death(frozenset(site))
            self.changed.notify_all()

    def site_of(self, seat: Addr) -> tuple[Addr, ...]:
        """The seats that are there or gone together with this one."""
        return self.seats.site(seat) if self.seats else (seat,)

    def name(self, seat: Addr) -> str:
        """As messages have it."""
        if self.called is not None:
            return self.called(seat)
        return self.seats.name(seat) if self.seats else f"worker {seat}"

    def suspect(self, worker: Addr, why: str) -> None:
        """The data connection to `worker` broke."""
        with self.changed:
            if worker in self.dead:
                return
            self._suspects.setdefault(worker, (time.monotonic(), why))
            self.changed.notify_all()

    def check(self) -> None:
        """Raises the failure, if there is one.

        Raises:
            RunFailed: the run cannot go on; a PeerLost names the dead worker.
        """
        if self.failure is not None:
            raise self.failure
        for worker, (since_s, why) in sorted(self._suspects.items()):
            if time.monotonic() >= since_s + _VERDICT_S and worker not in self.left:
                self.gone(worker, why)
                self.check()

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until `until()` holds, which is asked with the condition held. False when `timeout_s` passed first.

        Raises:
            RunFailed: as `check`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while True:
                self.check()
                if until():
                    return True
                due = [since_s + _VERDICT_S for worker, (since_s, _) in self._suspects.items() if worker not in self.left]
                if deadline_s is not None:
                    if time.monotonic() >= deadline_s:
                        return False
                    due.append(deadline_s)
                self.changed.wait(max(0.0, min(due) - time.monotonic()) if due else None)


class Crew:
    """Daemon threads that wait for one operation each; idle ones are used again."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def do(self, job: Callable[[], None]) -> None:
        """Runs `job`, at once, in a thread of its own."""
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds is freed now, not at the next job
            self._idle.release()

    def dismiss(self, timeout_s: float) -> None:
        """Lets the threads end, and waits for them."""
        for _ in self._threads:
            self._jobs.put(None)
        join_all(self._threads, timeout_s)


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Waits for threads, for `timeout_s` together."""
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
