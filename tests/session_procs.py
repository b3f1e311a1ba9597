"""One process of a site, with the real client and the real sessions, in the world of `session_world`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gossamer.core.errors import RunFailed
from gossamer.wan.roster.calls import Away
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.records import Admission, Card, Have, News, Session
from gossamer.wan.roster.sessions import Sessions

if TYPE_CHECKING:
    from session_world import World

SITES = "abcdefgh"


class Calls:
    """To the coordinator, as one process has it."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self.lost_s: float | None = None

    @property
    def away_s(self) -> float | None:
        return None if self.lost_s is None else self._proc.world.clock.now_s - self.lost_s

    def once(self, method: str, request: Any, kind: Any, timeout_s: float) -> Any:
        world, proc = self._proc.world, self._proc
        fate, proc.fate = proc.fate, "well"
        if not world.reaches_coordinator(proc.seat) or fate == "lost":
            self._away()
        if world.frozen or fate == "slow":
            world.letters.append((proc, method, request))
            self._away()
        try:
            answer = world.desk_does(method, request)
        except Refused:
            self.lost_s = None
            raise
        if fate == "unheard":
            self._away()
        self.lost_s = None
        return answer

    def request(self, method: str, request: Any, kind: Any, timeout_s: float, wait_s: float = 0.0) -> Any:
        return self.once(method, request, kind, timeout_s)

    def _away(self) -> None:
        if self.lost_s is None:
            self.lost_s = self._proc.world.clock.now_s
        raise Away("no answer")


class Proc:
    """One process of a site."""

    def __init__(self, world: World, seat: int) -> None:
        self.world, self.seat = world, seat
        self.name = SITES[seat]
        self.fate = "well"
        """Of its next call: well, lost, slow (it arrives later), unheard (the answer is lost)."""
        self.client = CoordinatorClient(lambda options: None, world.spec, self.name, Card(address=None))
        world.boots += 1
        self.client.caller = self.client.caller.model_copy(update={"boot": f"{world.boots:08x}{0:024x}"})
        self.client.seat = seat  # as its folder says
        self.client._calls = Calls(self)  # type: ignore[assignment]
        self.sessions = self._sessions()
        self.have: Have = world.disks[seat]
        self.asks = True
        """It is in no session, and asks for one."""
        self.session: Session | None = None
        """In which it is, or wants to meet the others."""
        self.bound = self.entered = self.healed = False
        self.patience = 0
        self.came: set[int] = set()
        """Members of whom it knows that they have come."""
        self.said: dict[int, set[int]] = {}
        """By round: whose part of it has come here."""
        self.lost: set[int] = set()
        """Whom gossip has gone on without, in this session."""
        self.patience = 0

    def _sessions(self) -> Sessions:
        world = self.world
        found = Sessions(self.client, alive=self.alive, gone=self.gone, ask=self.ask)
        found.remember(world.files[self.seat], world.keeps(self.seat))
        return found

    # ---- lines

    def alive(self) -> set[int]:
        members = {m.seat: m.boot for m in self.client.roster.living}
        near = {j: p for j, p in self.world.procs.items() if self.world.linked(self.seat, j)}
        return {j for j, p in near.items() if members.get(j) == p.client.caller.boot}

    def gone(self) -> set[int]:
        return {m.seat for m in self.client.roster.members} - self.alive() - {self.seat} - self.world.unsure

    def ask(self, seat: int, data: bytes) -> bytes:
        fate, self.fate = self.fate, "well"
        other = self.world.procs.get(seat)
        if other is None or not self.world.linked(self.seat, seat) or fate == "lost":
            raise RunFailed("no answer")
        if fate == "slow":
            self.world.questions.append((other, data))
            raise RunFailed("no answer")
        answer = other.sessions.serve(data)
        if fate == "unheard":
            raise RunFailed("no answer")
        return answer

    # ---- what it does

    def joined(self) -> bool:
        """Whether it is in the roster; it joins if it was not."""
        if self.client._news is not None:
            return True
        try:
            self.client._admitted(self.client._calls.request("Join", self.client._join_request(), Admission, 1.0))
        except (Away, Refused):
            return False
        return True

    def beat(self) -> None:
        if not self.joined():
            return
        seen = self.client._admissions
        try:
            self.client._heard(self.client._calls.once("Beat", self.client._beat(), News, 1.0))
            self.client.hand_in(1.0)
        except Away:
            return
        except Refused as error:
            self.client._refused(error, seen)

    def step(self) -> None:
        """Asks once for the next session."""
        if not self.joined():
            return
        self.leave()
        try:
            session, _ = self.sessions._step(self.have, 1.0)
        except Refused as error:
            if error.refusal.retry_s is None and error.code != "superseded":
                raise
            return
        if session is not None:
            self.world.opened(self, session)
            self.asks, self.session = False, session
            self.bound = self.entered = self.healed = False
            self.came, self.said, self.lost = set(), {}, set()

    def leave(self) -> None:
        """It is in no session any more."""
        self.session, self.asks = None, True
        self.bound = self.entered = self.healed = False

    def mates(self) -> Iterator[Proc]:
        """The other members of its session who are in it, and in reach."""
        assert self.session is not None
        for j in self.session.members:
            other = self.world.procs.get(j)
            if j != self.seat and other is not None and other.session == self.session and self.world.linked(self.seat, j):
                yield other

    def meets(self) -> bool:
        return self.session is not None and len(list(self.mates())) == len(self.session.members) - 1

    def bind(self) -> None:
        """All members are connected: it says that it has come."""
        if self.session is None or self.bound or not self.meets():
            return
        try:
            self.sessions.bind(self.session)
        except RunFailed:
            self.leave()
            return
        self.bound = True
        for other in (self, *self.mates()):
            other.came.add(self.seat)

    def enter(self) -> None:
        """All have said so."""
        if self.session is None or self.entered or not self.bound:
            return
        for other in self.mates():
            if other.bound:
                self.came.add(other.seat)
        if self.came < set(self.session.members):
            return
        self.entered = True
        self.world.enters(self, self.session)
        self.sessions.entered(self.session)
        if self.seat in self.session.donors:
            self.healed = True
            self.have = self.have.model_copy(update={"session": self.session.number})

    def heal(self) -> None:
        """It takes the state of a donor."""
        if self.session is None or not self.entered or self.healed:
            return
        for other in self.mates():
            if other.seat in self.session.donors and other.healed:
                self.healed, s = True, self.session
                assert other.have.session == s.number
                self.have = Have(round=s.round, digest=s.digest or self.have.digest, session=s.number)
                return

    def work(self) -> None:
        """It says its part of the round."""
        if self.session is not None and self.healed:
            for other in (self, *self.mates()):
                other.said.setdefault(self.have.round, set()).add(self.seat)

    def complete(self) -> None:
        """It has everybody's part."""
        if self.session is None or not self.healed:
            return
        if not self.world.spec.synchronous:
            if not self.lacks():
                self.have = Have(round=self.have.round + 1, digest=f"{self.seat:x}{self.have.round:06x}", session=self.session.number)
        elif self.said.get(self.have.round, set()) >= set(self.session.members):
            self.have = self.world.completed(self, self.session)

    def lacks(self) -> bool:
        """It cannot go on in its session: somebody is gone; in gossip too many, or one that is there again."""
        if self.session is None:
            return False
        if self.world.spec.synchronous or not self.healed:
            return not self.meets()
        self.lost |= set(self.session.members) - {self.seat} - {other.seat for other in self.mates()}
        return len(self.session.members) - len(self.lost) < self.world.spec.min_sites or bool(self.lost & self.alive())
