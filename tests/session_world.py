"""Sites, a coordinator and the lines between them, on one clock of our own, step by step: the real coordinator, the real stand-in and what
a site really does to be in a session, over a network that loses, delays, cuts and divides, with processes that die and come back.

What the sites do in a session is a model: it is entered by whoever knows that all of its members have come; a round of a synchronous method
is completed by whoever has what all members have said of it, and one of gossip by each alone, as long as enough are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_toys import Clock, Desk, spec
from session_procs import Proc

from gossamer.wan.roster import sessions as sessions_module
from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.records import Have, Session

X0 = "00"


class World:
    """All of it. What must be true is checked where it happens."""

    def __init__(self, path: Path, n: int, **changes: Any) -> None:
        self.n, self.path = n, path
        self.spec = spec(seats=n, **{"without": "elect" if changes.get("synchronous", True) else "go_on", "founders": n, **changes})
        self.clock = Clock()
        self.desk = Desk(path, self.clock)
        self.up, self.frozen = True, False
        self.file_lost = False
        self.dark: set[int] = set()
        """Who does not reach the coordinator."""
        self.cut: set[frozenset[int]] = set()
        """Pairs that do not reach each other."""
        self.unsure: set[int] = set()
        """Whom nobody is sure to have lost."""
        self.letters: list[tuple[Proc, str, Any]] = []
        self.questions: list[tuple[Proc, bytes]] = []
        self.boots = 0
        self.disks = [Have(round=0, digest=X0) for _ in range(n)]
        self.files: list[tuple[Session, ...]] = [() for _ in range(n)]
        """Sessions that a site has said to come to, as its disk has them."""
        self.procs: dict[int, Proc] = {}
        self.history: list[Session] = []
        """Sessions that somebody has entered, in that order."""
        self.past: dict[str, tuple[str, ...]] = {X0: (X0,)}
        """Each state, with all that it came from."""
        self.made: dict[tuple[str, str], str] = {}
        self.holders: dict[str, set[str]] = {}
        """Who has completed a round, by the state after it: boots."""
        self.of: dict[str, Session] = {}

    # ---- the network

    def reaches_coordinator(self, seat: int) -> bool:
        return self.up and seat not in self.dark

    def linked(self, a: int, b: int) -> bool:
        return a != b and a in self.procs and b in self.procs and frozenset((a, b)) not in self.cut

    def desk_does(self, method: str, request: Any) -> Any:
        c = self.desk.coordinator
        does: dict[str, Callable[[Any], Any]] = {
            "Join": c.join, "Beat": c.beat, "Propose": c.propose, "HandIn": c.hand_in, "Leave": c.leave,
        }  # fmt: skip
        return does[method](request)

    def deliver(self) -> None:
        """What was slow arrives."""
        letters, self.letters = self.letters, []
        for proc, method, request in letters if self.up and not self.frozen else []:
            if method == "Join" and self.procs.get(proc.seat) is not proc:
                continue  # it would put the process out that has come since: a site that is one twice, which is another matter
            with suppress(Refused):
                self.desk_does(method, request)
        questions, self.questions = self.questions, []
        for other, data in questions:
            if self.procs.get(other.seat) is other:
                with suppress(Refused):
                    other.sessions.serve(data)

    # ---- processes

    def keeps(self, seat: int) -> Callable[[tuple[Session, ...]], None]:
        def keep(bound: tuple[Session, ...]) -> None:
            self.files[seat] = bound

        return keep

    def start(self, seat: int) -> None:
        if seat not in self.procs:
            self.procs[seat] = Proc(self, seat)
            self.procs[seat].joined()

    def kill(self, seat: int) -> None:
        proc = self.procs.pop(seat, None)
        if proc is not None and self.reaches_coordinator(seat) and not self.frozen:
            self.desk.coordinator.doubt(proc.client.caller)

    def depart(self, seat: int) -> None:
        """A clean leave."""
        proc = self.procs.get(seat)
        if proc is not None and self.reaches_coordinator(seat) and not self.frozen and proc.client._news is not None:
            self.disks[seat] = proc.have
            self.desk.coordinator.leave(proc.client.caller)
            del self.procs[seat]

    def coordinator_dies(self) -> None:
        self.up = self.frozen = False

    def coordinator_returns(self, *, without_file: bool) -> None:
        if self.up:
            self.frozen = False
            return
        now_s = self.clock.now_s
        if without_file:
            self.desk.close()
            self.file_lost = True
            for file in self.path.parent.glob(self.path.name + "*"):
                file.unlink()
            self.desk.open()
        else:
            self.desk.restart()
        self.clock.now_s = now_s
        self.up = True

    def pass_time(self, seconds: float) -> None:
        """In small steps, with the beats of all."""
        for _ in range(max(1, round(seconds / 2.0))):
            self.clock.now_s += min(seconds, 2.0)
            for proc in list(self.procs.values()):
                proc.beat()
            if self.up and not self.frozen:
                self.desk.coordinator.tick()

    # ---- what must be true

    def opened(self, proc: Proc, session: Session) -> None:
        assert proc.seat in session.members
        assert set(session.donors) <= set(session.members) and len(session.members) >= self.spec.min_sites

    def enters(self, proc: Proc, session: Session) -> None:
        """A process enters a session."""
        same = [s for s in self.history if s.number == session.number]
        assert all(s == session for s in same), f"two sessions of one number are entered: {same[0]} and {session}"
        if proc.seat in session.donors:
            assert session.digest in (None, proc.have.digest) and (session.digest is None or proc.have.round == session.round), (
                f"{proc.name} is to give a state that it has not: {proc.have}, {session}"
            )
        if same:
            return
        if session.digest is not None:
            self.begins(session)
        self.history.append(session)

    def begins(self, session: Session) -> None:
        """The first process enters a session: from which state?"""
        assert session.digest is not None
        past = self.past[session.digest]
        alive = {p.client.caller.boot for p in self.procs.values()}
        for older in self.history:
            if older.generation != session.generation or older.number > session.number:
                continue
            left = sum(any(boot.startswith(b) for boot in alive) for b in older.boots)
            if not self.file_lost or 2 * left > len(older.members):  # who has lost the file, too, cannot tell that it begins again
                assert older.digest in past, f"{session} does not go on from {older}"
        for digest, boots in self.holders.items():
            of = self.of[digest]
            if of.number < session.number and 2 * len(boots & alive) > len(of.members):
                assert digest in past, f"{session} has lost {digest} of {of}, which {len(boots & alive)} processes hold"

    def completed(self, proc: Proc, session: Session) -> Have:
        """A process has completed a round. The state after it."""
        before = proc.have
        key = (before.digest, session.key)
        if key not in self.made:
            digest = self.made[key] = f"{len(self.past):x}"
            self.past[digest] = (*self.past[before.digest], digest)
            self.of[digest], self.holders[digest] = session, set()
        digest = self.made[key]
        self.holders[digest].add(proc.client.caller.boot)
        alive = {p.client.caller.boot for p in self.procs.values()}
        if 2 * len(self.holders[digest]) > len(session.members):
            for other, boots in self.holders.items():
                of = self.of[other]
                if 2 * len(boots & alive) > len(of.members) and of.generation == session.generation:
                    assert other in self.past[digest] or digest in self.past[other], f"{digest} of {session} and {other} of {of}: two runs"
        return Have(round=before.round + 1, digest=digest, session=session.number)

    @property
    def running(self) -> list[Session]:
        """Sessions in which all of the members are."""
        found = []
        for s in {p.session.key: p.session for p in self.procs.values() if p.session is not None}.values():
            if all(m in self.procs and self.procs[m].session == s and self.procs[m].entered for m in s.members):
                found.append(s)
        return found

    # ---- all together

    def everybody(self, *names: str) -> None:
        for name in names:
            for proc in list(self.procs.values()):
                getattr(proc, name)()

    def settle(self) -> None:
        """Whoever has nobody to be with asks for a session; all meet, and go on."""
        for proc in list(self.procs.values()):
            proc.patience = 0 if proc.meets() else proc.patience + 1
            if proc.client._news is None:
                proc.joined()
                continue
            stops = proc.entered and (proc.sessions.waiting or proc.client.astray is not None)
            if proc.asks or stops or (proc.lacks() and (proc.entered or proc.patience > 3)):
                proc.step()
        self.everybody("bind", "enter", "heal", "work", "complete")

    def heals(self, cycles: int = 40) -> bool:
        """Everything is well again: whether all come together in that time, and go on."""
        self.coordinator_returns(without_file=False)
        self.dark, self.cut, self.unsure = set(), set(), set()
        self.letters.clear()
        self.questions.clear()
        for seat in range(self.n):
            self.start(seat)
        for _ in range(cycles):
            self.pass_time(2.0)
            self.settle()
            if len(self.running) == 1 and len(self.running[0].members) == self.n:
                return True
        return False

    def close(self) -> None:
        self.desk.close()


@contextmanager
def world(path: Path, n: int, **changes: Any) -> Iterator[World]:
    """A world, and its clock for the sessions."""
    made = World(path, n, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions_module, "time", SimpleNamespace(monotonic=made.clock, sleep=lambda seconds: None))
        try:
            yield made
        finally:
            made.close()
