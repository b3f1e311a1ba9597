"""Who is in a run: the rules, as functions from one frozen state to the next. No clock, no IO; leases are in
`gossamer.wan.roster.leases`, and when a session opens is in `gossamer.wan.roster.opening`.

A site that comes has a seat for good, and waits to be let into a session. It *has held the state of the run* (`ever`) once it was a donor
of a session, or says of its state that it got it in the session that it was let into. Before that it gives state to nobody and counts for
no majority, however long nobody else is there.

`base` are the members of the latest session that was *entered*: one to which all of its members have come, as one of them knows.
Majorities are of these. Whoever comes is *bound* first, on disk: it tells of that session with each further proposal, as one that may have
been entered. A session to which a member has not come is nobody's past: another one may take its place. Each site comes to at most one
session of a number, so of two that share a member at most one was entered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import Field

from gossamer.core.errors import BadInput
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.roster.differing import differences
from gossamer.wan.roster.ended import Ended, is_over, to_forget
from gossamer.wan.roster.leases import Holder
from gossamer.wan.roster.messages import Record, Refused
from gossamer.wan.roster.records import Caller, Card, Count, Have, Join, Member, Number, Roster, Seats, Seed, Session, Spec
from gossamer.wan.trust.terms import host_of


class Membership(Record):
    """What is known of the members of one run. This is what is kept on disk."""

    spec: Spec
    seed: Seed
    revision: Count = 0
    epoch: Count = 0
    generation: Count = 0
    members: tuple[Member, ...] = ()
    """In order of seats. Who has left keeps the seat."""
    session: Session | None = None
    """The latest."""
    entered: Number = 0
    """The latest that was entered, as far as known."""
    base: Seats = ()
    """Its members."""
    left: Seats = ()
    """Who of these has left since, of its own will."""
    vacant: Seats = ()
    """Seats whose sites were forgotten since: what these had is lost for good, and nobody waits for it."""
    ended: Ended | None = None
    """The run has come to its end."""
    lost: bool = False
    """This file is younger than the run, and has opened no session that was entered: it does not know all that others did."""
    counts: dict[str, Count] = Field(default_factory=dict)

    @property
    def living(self) -> tuple[Member, ...]:
        """Members that are there."""
        return tuple(m for m in self.members if m.there)

    @property
    def inside(self) -> frozenset[int]:
        """Seats of those who are there, and in the latest session."""
        return frozenset(m.seat for m in self.members if m.standing == "in")

    def roster(self) -> Roster:
        """For the sites."""
        return Roster(
            run=self.spec.run,
            revision=self.revision,
            epoch=self.epoch,
            generation=self.generation,
            members=self.members,
            session=self.session,
        )

    def revised(self) -> Membership:
        """The same, as the next revision."""
        return _with(self, revision=self.revision + 1)

    def find(self, site: str) -> Member | None:
        """The member of that name."""
        return next((m for m in self.members if m.site == site), None)

    def names(self, seats: Iterable[int]) -> str:
        """Of the sites of these seats, for people."""
        known = {m.seat: m.site for m in self.members}
        listed = [known.get(s, f"seat {s}") for s in sorted(seats)]
        return ", ".join(listed[:8]) + (" ..." if len(listed) > 8 else "")

    def counting(self, what: str, by: int = 1) -> Membership:
        """The same with a counter raised."""
        return _with(self, counts={**self.counts, what: self.counts.get(what, 0) + by})


def check_spec(spec: Spec) -> None:
    """Refuses a run that cannot work, before anybody joins it.

    Raises:
        BadInput: settings that contradict each other.
    """
    Timeouts.of(spec.floor_s, lease_s=spec.lease_s)
    if spec.min_sites > spec.seats:
        raise BadInput(f"wan.min_sites is {spec.min_sites}, of a fleet of {spec.seats} workers: expected at most {spec.seats}")
    if spec.min_sites == 1 < spec.seats and not spec.alone:
        raise BadInput(
            "wan.min_sites is 1: a site that loses sight of the others would silently go its own way; "
            "expected at least 2, or wan.alone = true if that is what you want"
        )
    if spec.founders is not None and not spec.min_sites <= spec.founders <= spec.seats:
        raise BadInput(
            f"wan.founders is {spec.founders}: expected from wan.min_sites ({spec.min_sites}) to {spec.seats}, the fleet's workers"
        )
    if spec.sites and (len(spec.sites) != spec.seats or len(set(spec.sites)) != spec.seats):
        raise BadInput(
            f"wan.sites names {len(set(spec.sites))} sites for {spec.seats} workers of the fleet: expected a name for each, or none at all"
        )
    if spec.synchronous and spec.without == "go_on":
        raise BadInput(
            "wan.without = 'go_on' is for gossip: a synchronous method does not go on after a death without a new session; "
            "expected 'elect' or 'wait'"
        )
    if not spec.synchronous and spec.without == "elect":
        raise BadInput("wan.without = 'elect' is for synchronous methods: in gossip it is called 'go_on'; expected 'go_on' or 'wait'")


def in_sync(member: Member, have: Have | None) -> bool:
    """Whether what a site says it has is a state of the run, as far as can be known."""
    return have is not None and (member.ever or 0 < have.session == member.session)


def join(state: Membership, request: Join) -> Membership:
    """A site comes, comes back, or asks again.

    Raises:
        Refused: foreign (another configuration, layout, release: named), full, over, or an address that the others cannot use.
    """
    who = request.caller
    if different := differences(state.spec, request.spec):
        raise Refused(
            "foreign",
            f"site {who.site} differs from run {state.spec.run} ({_standing(state)}): {different}. Start it again as the run is: all "
            f"its sites need one configuration, text and release; for another run give it its own id: --set wan.run=NAME"
            f"{_or_forget(state)}",
        )
    old = state.find(who.site)
    if old is not None and old.boot == who.boot and old.there:
        return state  # the answer to the first request was lost
    if state.ended is not None and (old is None or old.boot != who.boot):  # whoever is in it at its end may still have things to do
        raise Refused("full", is_over(state.spec.run, state.ended.site))
    seat = old.seat if old is not None else _free_seat(state, who.site, request.seat)
    _check_address(state, who.site, request.card)
    if old is not None and old.boot == who.boot:
        new = _as(old, there=True, card=request.card, left=False, fault="")
    else:
        before = {"ever": old.ever, "session": old.session} if old is not None else {}
        new = _as(Member(site=who.site, seat=seat, boot=who.boot, card=request.card, bootstrap=request.bootstrap), **before)
    state = _with(state, left=tuple(s for s in state.left if s != seat))
    return _changed(_put(state, new)).counting("joins")


def check_place(old: Member, who: Caller, holder: Holder, beat_s: float) -> None:
    """Another process of a site that is there asks to be let in.

    Raises:
        Refused: (taken) the first one answers; or, to be asked again, that is not known yet.
    """
    if holder.state == "gone":
        return
    at = f" at {old.card.address}" if old.card.address is not None else ""
    since = f", there for {holder.since_s:.0f} s" if holder.since_s is not None else ""
    one = f"another process of site {who.site}{at} is in run {who.run}{since}"
    left_s = math.ceil(holder.left_s)
    if holder.state == "silent":
        heard = f"not heard of for {holder.heard_s:.1f} s" if holder.heard_s is not None else "not heard of yet"
        raise Refused("taken", f"{one}, {heard}: its lease is over in {left_s} s", min(beat_s / 2, holder.left_s))
    raise Refused(
        "taken",
        f"{one}, and answers: two processes cannot be one site. Stop the other one and start this again; if it is cut off by then, wait "
        f"{left_s} s, until its lease is over; or give --take-over: it stops with its state saved, and this one takes its place",
    )


def caller(state: Membership, who: Caller) -> Member:
    """The member that asks.

    Raises:
        Refused: it is not in the run (any more), or another process of that site is.
    """
    member = state.find(who.site)
    if member is None:
        raise Refused("unknown", f"site {who.site} has not joined run {who.run}")
    if member.boot != who.boot:
        raise Refused("superseded", f"another process of site {who.site} has joined run {who.run} since: two cannot be one site")
    if not member.there:
        raise Refused("expired", f"site {who.site} is out of run {who.run}: it was not heard of for the length of its lease, or has left")
    return member


def leave(state: Membership, who: Caller) -> Membership:
    """A site goes, of its own will. It may ask twice."""
    member = state.find(who.site)
    if member is None or member.boot != who.boot or not member.there:
        return state
    gone = _put(state, _as(member, there=False, inside=False, left=True))
    gone = _changed(_with(gone, left=(*state.left, member.seat)))
    return gone if state.ended is not None else gone.counting("leaves")


def forget(state: Membership, site: str) -> Membership:
    """A site that is out for good: its seat is free, and nobody waits for what it had.

    Raises:
        Refused: it is there, or is none of the run.
    """
    member, run = state.find(site), state.spec.run
    if member is None:
        known = ", ".join(m.site for m in state.members)
        raise Refused("unknown", f"run {run} has no site {site}; its sites are {known[:600] or 'none yet'}")
    if member.there:
        raise Refused("conflict", f"site {site} is there in run {run}: stop it first; without a word from it, it is out after its lease")
    state = _with(state, members=tuple(m for m in state.members if m.seat != member.seat), vacant=tuple({*state.vacant, member.seat}))
    return _changed(state).counting("forgotten")


def expire(state: Membership, sites: Iterable[str], fault: str = "") -> Membership:
    """The leases of these are over, or their certificates not good any more (`fault`). Their processes may be alive, and in the session."""
    found = [m for site in sites if (m := state.find(site)) is not None and m.there]
    for member in found:
        state = _put(state, _as(member, there=False, fault=fault))
    return _changed(state).counting("expiries", len(found)) if found else state


def opened(state: Membership, session: Session, held: Iterable[int] = ()) -> Membership:
    """A session opens. `held`: seats that hold, or held, the state of the run, as they say and as can be."""
    known, again = frozenset(session.donors) | frozenset(held), session.generation > state.generation
    for member in state.members:
        if session.has(member.seat, member.boot):
            member = _as(member, inside=True, session=session.number, ever=member.ever or member.seat in known, bootstrap=False)
        else:
            member = _as(member, inside=False)
        state = _put(state, member)
    state = _with(state, session=session, generation=session.generation).counting("sessions")
    if healing := len(session.members) - len(session.donors):
        state = state.counting("healed", healing)
    return state.counting("begun") if again else state


def entered(state: Membership, member: Member, key: str | None) -> Membership:
    """A site has entered a session. Of one that is not the latest here this says nothing."""
    last = state.session
    if last is None or key != last.key or not last.has(member.seat, member.boot):
        return state
    if not member.inside:  # the coordinator had forgotten, or had not known
        state = _put(state, _as(member, inside=True, session=last.number))
    if state.entered == last.number:
        return state
    taken = {m.seat for m in state.members}
    vacant = tuple(s for s in state.vacant if s not in taken)
    return _with(state, entered=last.number, base=last.members, left=(), vacant=vacant, lost=False)


def handed_in(state: Membership, member: Member, session: Session) -> Membership:
    """A session that sites opened without the coordinator, from one that has entered it. It counts, unless the run has gone another way.

    Raises:
        Refused: conflict.
    """
    last, spec = state.session, state.spec
    text = f"session {session.number}, as site {member.site} has it (sites {state.names(session.members)})"
    if not session.has(member.seat, member.boot) or not set(session.donors) <= set(session.members):
        raise Refused("garbage", f"{text}: expected one that the site itself is in")
    if last is not None and session == last:
        return entered(state, member, session.key)
    if last is not None:
        if not spec.elects and not state.lost:
            raise Refused(
                "conflict",
                f"{text}: run {spec.run} waits for its coordinator (wan.without = {spec.without!r}), nobody else opens its sessions",
            )
        if (state.entered, state.base) == (session.number, session.members):
            return state
        if state.entered >= session.number or (state.entered == last.number and session.generation < state.generation):
            raise Refused(
                "conflict",
                f"{text} is not what the run did: it is in session {last.number} (sites {state.names(last.members)}); "
                f"site {member.site} needs the state of a donor"[:1000],
            )
    if last is not None and session.number < last.number:  # from which others went on here, and have not entered theirs
        return _with(state, entered=session.number, base=session.members, left=())
    lost = state.lost or last is None
    replaces = last is not None and session.number == last.number
    state = opened(state, session)
    state = _with(entered(state, next(m for m in state.members if m.seat == member.seat), session.key), lost=lost)
    return state.counting("replaced" if replaces else "handed_in")


def _standing(state: Membership) -> str:
    """Of a run, in a few words."""
    there = ", ".join(m.site for m in state.living)
    if state.ended is not None:
        return "which is over"
    return f"there: {there[:100]}" if there else "nobody is there" if state.members else "new"


def _or_forget(state: Membership) -> str:
    return "" if state.living else f", or forget the old one: {to_forget(state.spec.run)}"


def _changed(state: Membership) -> Membership:
    return _with(state, epoch=state.epoch + 1)


def _free_seat(state: Membership, site: str, wish: int | None) -> int:
    if state.spec.sites:
        if site not in state.spec.sites:
            names = ", ".join(state.spec.sites)
            raise Refused(
                "full",
                f"site {site} is not one of run {state.spec.run}: wan.sites names {names[:600]}. Another machine may take the place of "
                "a lost one under its name: gossamer wan ca issue, with the lost one's id",
            )
        return state.spec.sites.index(site)
    taken = {m.seat for m in state.members}
    if wish is not None and wish < state.spec.seats and wish not in taken:
        return wish
    free = next((s for s in range(state.spec.seats) if s not in taken), None)
    if free is None:
        spec, names = state.spec, ", ".join(f"{m.site} {'there' if m.there else 'out'}" for m in state.members)
        raise Refused(
            "full",
            f"all {spec.seats} seats of run {spec.run} belong to other sites ({names[:600]}): the seat of one that is out for good is "
            f"free after {to_forget(spec.run, 'SITE')}",
        )
    return free


def _check_address(state: Membership, site: str, card: Card) -> None:
    """A loopback address is one only for sites of the same machine."""
    for other in state.living:
        pair = (card.address, other.card.address)
        if other.site != site and None not in pair and len({is_loopback(a) for a in pair if a}) == 2:
            local, remote = (site, other.site) if is_loopback(card.address or "") else (other.site, site)
            raise Refused(
                "foreign",
                f"site {local} advertises a loopback address, which site {remote} cannot reach: give it --bind and --advertise HOST:PORT",
            )


def is_loopback(address: str) -> bool:
    """Whether host:port names this machine to itself."""
    host = host_of(address).lower()
    return host in ("localhost", "::1", "") or host.endswith(".localhost") or host.startswith(("127.", "::ffff:127."))


def _put(state: Membership, member: Member) -> Membership:
    others = [m for m in state.members if m.seat != member.seat]
    return _with(state, members=tuple(sorted([*others, member], key=lambda m: m.seat)))


def _with(state: Membership, **changes: object) -> Membership:
    return state.model_copy(update=changes)


def _as(member: Member, **changes: object) -> Member:
    return member.model_copy(update=changes)
