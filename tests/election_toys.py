"""Sites that ask for sessions step by step, a coordinator that dies, and the lines between them, on one clock of our own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from coordinator_toys import Clock, Desk, caller, spec

from gossamer.wan.deadlines import Timeouts
from gossamer.wan.messages import Refused
from gossamer.wan.records import Elect, HandIn, Have, Known, Propose, Roster, Session, Verdict
from gossamer.wan.standin import StandIn

SITES = ("a", "b", "c", "d", "e")
T = Timeouts.of(30.0)


class Site:
    """What one process of a site does, as `gossamer.wan.sessions` does it, step by step."""

    def __init__(self, seat: int, boot: int, fleet: Fleet) -> None:
        self.seat, self.boot, self.fleet = seat, boot, fleet
        self.name = SITES[seat]
        self.have: Have | None = fleet.disks[seat]
        self.roster: Roster | None = None
        self.standin = StandIn(fleet.spec)
        self.opened: Session | None = None
        self.entered: Session | None = None
        self.astray = False
        self.asked_for = 0
        self.lost_s: float | None = None
        self.asks = False
        """It has left its session, and asks for the next one."""

    @property
    def away_s(self) -> float | None:
        return None if self.lost_s is None else self.fleet.clock.now_s - self.lost_s

    def reaches_coordinator(self) -> bool:
        up = self.fleet.up and self.seat not in self.fleet.dark
        self.lost_s = None if up else self.fleet.clock.now_s if self.lost_s is None else self.lost_s
        return up

    def call(self, what: Any) -> Any:
        """One call to the coordinator, made again after joining where the site is out. None: it joins too often."""
        try:
            return what()
        except Refused as refused:
            if refused.code not in ("unknown", "expired"):
                raise
        return what() if self.fleet.join(self) else None

    def beat(self) -> None:
        if not self.reaches_coordinator() or (self.roster is None and not self.fleet.join(self)):
            return
        entered = self.entered.number if self.entered is not None and not self.astray else 0
        news = self.call(lambda: self.fleet.desk.beat(self.name, self.boot, entered=entered))
        if news is None:
            return
        self.roster = news.roster
        self.hand_in()
        self.look()

    def hand_in(self) -> None:
        mine, theirs = self.entered, self.roster.session if self.roster is not None else None
        if mine is None or self.astray or (theirs is not None and (theirs == mine or theirs.number > mine.number)):
            return
        try:
            self.call(lambda: self.fleet.desk.coordinator.hand_in(HandIn(caller=caller(self.name, self.boot), session=mine)))
        except Refused as refused:
            if refused.code != "conflict":
                raise
            self.astray = True

    def look(self) -> None:
        assert self.roster is not None
        if self.astray and self.standin.known.entered is not None:
            self.standin.give_in(self.roster, entered=True)
        self.standin.hear(self.roster)

    def propose(self, lost: bool) -> None:
        """One step of `Sessions.open`; its answer may get lost."""
        if self.roster is None:
            return
        self.look()
        self.asks = True
        latest = self.standin.known.latest
        if latest is not None and latest != self.opened and latest.number <= self.asked_for and self.seat in latest.members:
            self.opened = latest
            return
        alive = tuple(s for s in self.fleet.sites if self.fleet.linked(self.seat, s))
        before = latest.number if latest is not None else self.have.session if self.have is not None else 0
        request = Propose(
            caller=caller(self.name, self.boot),
            number=before + 1,
            entered=self.entered.number if self.entered is not None and self.entered == self.standin.known.entered else 0,
            have=None if self.astray else self.have,
            alive=alive,
            gone=tuple(s for s in range(len(SITES)) if s not in alive),
        )
        self.asked_for, now_s = request.number, self.fleet.clock.now_s
        self.reaches_coordinator()
        whom = self.standin.whom(self.seat, alive, request.number, self.away_s, now_s)
        if whom == "nobody":
            return
        if isinstance(whom, int):
            self.standin.asking(request.number, whom, now_s)
            question = Elect(propose=request, known=self.standin.known)
            verdict = self.fleet.sites[whom].serve(question) if whom in (self.seat, *alive) else None
        else:
            verdict = self.ask_coordinator(request)
        if verdict is None or lost:
            return
        self.standin.told(verdict)
        if verdict.session is not None:
            self.fleet.answered(self, verdict)
            if not verdict.late and verdict.session != self.opened:
                self.opened = verdict.session

    def ask_coordinator(self, request: Propose) -> Verdict | None:
        if not self.reaches_coordinator():
            return None
        self.hand_in()
        try:
            return self.call(lambda: self.fleet.desk.coordinator.propose(request))  # type: ignore[no-any-return]
        except Refused as refused:
            if refused.code != "conflict" or self.roster is None:
                raise
            self.standin.give_in(self.roster, entered=False)
            return None

    def serve(self, request: Elect) -> Verdict | None:
        self.reaches_coordinator()
        if self.roster is None:
            return None
        asker = next((m for m in self.roster.members if m.site == request.propose.caller.site), None)
        if asker is None or asker.boot != request.propose.caller.boot:
            return None
        self.look()
        alive = [s for s in self.fleet.sites if self.fleet.linked(self.seat, s)]
        return self.standin.decide(self.seat, self.roster, asker, request, alive, self.away_s, self.fleet.clock.now_s)


class Fleet:
    def __init__(self, path: Path, **changes: Any) -> None:
        self.spec = spec(seats=len(SITES), **{"without": "elect", **changes})
        self.clock = Clock()
        self.desk = Desk(path, self.clock)
        self.up = True
        self.dark: set[int] = set()
        """Who does not reach the coordinator."""
        self.side = dict.fromkeys(range(len(SITES)), 0)
        """Sites of one side reach each other."""
        self.disks: list[Have | None] = [Have(round=0, digest="00") for _ in SITES]
        self.boots = [0] * len(SITES)
        self.sites: dict[int, Site] = {}
        self.ran: list[Session] = []
        """Sessions that all of their members have entered, in order."""
        self.told: dict[tuple[int, bool], dict[int, Session]] = {}
        self.ever: set[int] = set()
        self.healing: dict[int, Session] = {}
        for seat in range(len(SITES)):
            self.start(seat)

    def start(self, seat: int) -> None:
        self.sites[seat] = Site(seat, self.boots[seat], self)
        if self.up and seat not in self.dark:
            self.join(self.sites[seat])

    def join(self, site: Site) -> bool:
        try:
            site.roster = self.desk.join(site.name, site.boot, of=self.spec).roster
        except Refused as refused:
            if refused.code not in ("flapping", "taken"):
                raise
            return False
        return True

    def linked(self, a: int, b: int) -> bool:
        return a != b and a in self.sites and b in self.sites and self.side[a] == self.side[b]

    def pass_time(self, seconds: float) -> None:
        """In small steps, with the beats of all who reach the coordinator."""
        for _ in range(max(1, round(seconds / 2.0))):
            self.clock.now_s += min(seconds, 2.0)
            for site in self.sites.values():
                site.beat()
            if self.up:
                self.desk.coordinator.tick()

    def answered(self, site: Site, verdict: Verdict) -> None:
        """Whoever decided, it gives one answer."""
        session = verdict.session
        assert session is not None
        assert verdict.late or site.seat in session.members
        assert set(session.donors) <= set(session.members) and len(session.members) >= self.spec.min_sites
        by_coordinator = session.by is None
        assert self.told.setdefault((session.number, by_coordinator), {}).setdefault(session.by or 0, session) == session

    def meet(self, session: Session) -> None:
        """The members of a session enter it, if all of them are in reach and were told of it."""
        members = [self.sites.get(s) for s in session.members]
        if any(m is None or m.opened != session or m.entered == session for m in members):
            return
        if any(not self.linked(i, j) for i, j in pairwise(session.members)):
            return
        for m in members:
            assert m is not None
            m.entered, m.astray, m.asks = session, False, False
            m.standin.learn(Known(latest=session, entered=session))
            if m.seat in session.donors:
                assert m.have is not None, "a donor without a state"
                assert session.number == 1 or m.seat in self.ever, "a donor that never held the state of the run"
                assert m.have.round == session.round and session.digest in (None, m.have.digest)
        self.ran.append(session)
        for m in members:
            assert m is not None
            m.have = Have(round=session.round, digest=f"{session.round:x}{session.number:04x}", session=session.number)
            if session.digest is not None and session.round == 0:
                m.have = m.have.model_copy(update={"digest": "00"})
            elif session.digest is not None:
                m.have = m.have.model_copy(update={"digest": session.digest})
        self.ever |= set(session.members)

    @property
    def running(self) -> list[Session]:
        """Sessions in which all of the members are."""
        return [s for s in self.ran if all(m in self.sites and self.sites[m].entered == s and not self.sites[m].asks for m in s.members)]

    def close(self) -> None:
        self.desk.close()
