"""A site that stands in for the coordinator while that is away: whom a site asks for a session, and what the one that is asked decides. No
clock, no IO.

All know who is to stand in, so nobody is asked to vote: the lowest member of the latest session that a site reaches, itself included, once
the coordinator has been away for `Timeouts.elect`. It decides by the rules of the coordinator (`gossamer.wan.roster.opening`), with more
than half of those of the last session that was entered.

A site asks one at a time, and what it has asked counts with one at a time. The coordinator lets go of what a site has proposed when its
lease is over, which is before a site turns to another (a coordinator that was stopped lets go of all). One that stands in lets go of what
is not said again within half a lease, and who has lost it asks nobody else for a whole one. Where parts of a run meet again, each with one
that stands in, they let go of theirs after a lease, and turn to the lowest. So two seldom open a session with the word of one site. Where
they do (a message that was late, one who decided and was lost before it could tell all), at most one of the two is entered, since a site
comes to one of a number only (see `gossamer.wan.roster.membership`); the other one costs a new opening.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from gossamer.wan.deadlines import Deadline, Timeouts
from gossamer.wan.roster.membership import Membership
from gossamer.wan.roster.opening import Book
from gossamer.wan.roster.records import Elect, Known, Member, Roster, Session, Spec, Verdict

Whom: TypeAlias = int | Literal["coordinator", "nobody"]


class StandIn:
    """What one site knows of the sessions, and decides. One thread calls it."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._timeouts = spec, Timeouts.of(spec.floor_s, lease_s=spec.lease_s)
        self._book, self._deadline = Book(), Deadline(spec.floor_s, spec.spread)
        self._heard_s: dict[int, float] = {}
        self._asked: tuple[int, int, float, float] | None = None
        """The session about which this site has asked another one, which, and when first and last."""
        self.known = Known()
        self._waiting: tuple[tuple[int, ...], float] = ((), 0.0)

    # ---- what is known

    def learn(self, known: Known) -> None:
        """What another site knows, or this one has entered. Of two sessions of one number the one that was entered counts."""
        for session in (known.latest, known.entered):
            mine = self.known.latest
            if session is not None and (mine is None or session.number > mine.number):
                self._know(latest=session)
        if (theirs := known.entered) is not None and (self.known.entered is None or theirs.number > self.known.entered.number):
            self._know(entered=theirs)
            if self.known.latest is not None and self.known.latest.number == theirs.number:
                self._know(latest=theirs)

    def hear(self, roster: Roster) -> None:
        """What the coordinator says: of two sessions of one number its own counts, unless the other one was entered."""
        mine, theirs = self.known.latest, roster.session
        if theirs is not None and (mine is None or theirs.number >= mine.number) and mine != self.known.entered:
            self._know(latest=theirs)
        elif theirs is not None:
            self.learn(Known(latest=theirs))

    def give_in(self, roster: Roster, *, entered: bool) -> None:
        """What the coordinator does not know does not count: all of it, or what was not entered."""
        latest = roster.session
        if entered or self.known.entered is None:
            self.known = Known(latest=latest)
        elif latest is None or latest.number < self.known.entered.number:
            self._know(latest=self.known.entered)
        else:
            self._know(latest=latest)
        self._asked = None

    def _know(self, **changes: Session | None) -> None:
        self.known = self.known.model_copy(update=changes)

    # ---- asking

    def whom(self, me: int, alive: Iterable[int], number: int, away_s: float | None, now_s: float) -> Whom:
        """Whom this site asks for a session."""
        there, latest = {me, *alive}, self.known.latest
        lowest = min(there & set(latest.members if latest is not None else ()), default=None)
        if self._asked is not None and self._asked[0] == number:
            _, leader, since_s, asked_s = self._asked
            vain = lowest is not None and lowest < leader and now_s - since_s > self._timeouts.lease  # two parts have met again
            if leader in there and not vain:
                return leader
            if now_s - asked_s < self._timeouts.lease:
                return "nobody"
        if not self._spec.elects or latest is None or away_s is None or away_s < self._timeouts.elect:
            return "coordinator"
        return "coordinator" if lowest is None else lowest

    def asking(self, number: int, leader: int, now_s: float) -> None:
        """This site asks another one."""
        again = self._asked is not None and self._asked[:2] == (number, leader)
        self._asked = (number, leader, self._asked[2] if again and self._asked else now_s, now_s)

    def told(self, verdict: Verdict) -> None:
        """The answer."""
        if verdict.session is not None:
            self.learn(Known(latest=verdict.session))
        if verdict.ask_coordinator:
            self._asked = None

    # ---- being asked

    def decide(
        self, me: int, roster: Roster, asker: Member, request: Elect, alive: Iterable[int], away_s: float | None, now_s: float
    ) -> Verdict:
        """The answer to a site, or to itself."""
        self.learn(request.known)
        said, latest = request.propose, self.known.latest
        if latest is not None and said.number <= latest.number:
            return Verdict(session=latest, late=not latest.has(asker.seat, asker.boot))
        if away_s is None:
            self._book.forget()
            return Verdict(session=None, why="the coordinator is there: ask it", ask_coordinator=True)
        if (leader := self.whom(me, alive, said.number, away_s, now_s)) != me:
            who = f"seat {leader} does" if isinstance(leader, int) else "nobody does yet"
            return Verdict(session=None, why=f"seat {me} does not stand in for the coordinator: {who}")
        state = self._state(me, roster, set(alive))
        self._heard_s[asker.seat] = now_s
        self._book.drop([seat for seat, heard_s in self._heard_s.items() if now_s - heard_s > self._timeouts.lease / 2])
        self._book.add(state, asker, said, now_s)
        since_s = self._book.since_s(state)
        opening = self._book.decide(state, over=since_s is not None and now_s - since_s >= self._deadline.seconds, by=me)
        if opening.session is None:
            self._waiting = (self._book.waiting(state), now_s)
            return Verdict(session=None, why=opening.why)
        self._book.forget()
        self._waiting = ((), now_s)
        self.learn(Known(latest=opening.session))
        return Verdict(session=opening.session, late=asker.seat not in opening.session.members)

    def waiting(self, now_s: float) -> tuple[int, ...]:
        """Who has asked this site of late, in place of the coordinator, and could be let in."""
        seats, said_s = self._waiting
        return seats if now_s - said_s < self._timeouts.lease / 2 else ()

    def _state(self, me: int, roster: Roster, alive: set[int]) -> Membership:
        """The run as this site knows it: the last roster and the latest session, of which those are there whom it reaches."""
        latest, counts = self.known.latest, self.known.entered or self.known.latest
        members = []
        for m in roster.members:
            of = latest is not None and m.seat in latest.members
            inside = m.inside if latest == roster.session else latest is not None and latest.has(m.seat, m.boot)
            there = (m.seat in alive or m.seat == me) and (m.there or inside)
            changes: dict[str, object] = {"there": there, "inside": inside}
            if latest is not None and of:
                changes |= {"session": latest.number, "ever": m.ever or m.seat in latest.donors}
            members.append(m.model_copy(update=changes))
        return Membership(
            spec=self._spec,
            seed=0,
            epoch=roster.epoch,
            generation=latest.generation if latest is not None else roster.generation,
            members=tuple(members),
            session=latest,
            entered=self.known.entered.number if self.known.entered is not None else 0,
            base=counts.members if counts is not None else (),
        )
