"""When the next session opens, with whom, and from which state: one answer for all. No clock, no IO.

Sites *propose* the next session: what state they have, whom they reach, whom they have lost. It opens, once and for all, when

- everybody who is in the latest session and there has proposed; or more than half of them, who have all lost the others (quorum
  "deadline": or once the deadline is over, counted from the first of these proposals);
- at least `Spec.min_sites` of those who propose all reach each other (pairs that do not know yet are waited for, as long as the deadline);
- one of these holds the state of the run. The session begins after the most rounds that one of them has completed in the latest session;
  whoever has completed as many (synchronous methods: with the same digest) is a donor;
- where sites stand in for the coordinator, more than half of those of the last session that was entered are among them, and of each later
  one that may have been entered: a site is bound to it, and no member says that it has not come and will not. The coordinator itself needs
  half; more than half, where its file is younger than the run. So of any two openings one member knows of both.

A run begins with its founders, all of them with equal states, or with one that was told to `bootstrap`. It begins again, from the best of
older states, when no process of the latest session is left, and all of its sites are back, or one that was told to, or more than half of
them, after the deadline, with a state no older than that session's. Who never held the state of the run counts for none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gossamer.wan.roster.ended import to_forget
from gossamer.wan.roster.membership import Membership, in_sync
from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.records import Have, Member, Propose, Session

_BOOT_DIGITS = 8


class Opening(NamedTuple):
    """A session that opens; or why none does."""

    session: Session | None
    why: str = ""
    held: frozenset[int] = frozenset()
    """Members that hold, or held, the state of the run."""
    diverged: frozenset[int] = frozenset()
    """Members whose state after as many rounds is another one: they heal."""
    late: frozenset[int] = frozenset()
    """Sites that are there and not in it: they did not ask in time, or do not reach all."""
    lost: bool = False
    """Sites know of sessions of which the file of this coordinator does not."""


class Book:
    """The open proposals of one run. It is not kept: after a restart the sites propose again."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[Propose, float]] = {}
        """By seat: the latest, and when the first came."""

    def add(self, state: Membership, member: Member, said: Propose, now_s: float) -> None:
        """A site proposes the next session. Its later word replaces its earlier one.

        Raises:
            Refused: conflict: it knows of sessions that are not known here.
        """
        last = state.session
        if last is not None and said.number > last.number + 1:
            raise Refused(
                "conflict", f"site {member.site} knows of session {said.number - 1}, the run is in session {last.number}: hand it in first"
            )
        old = self._said.get(member.seat)
        same = old is not None and old[0].caller == said.caller and old[0].number == said.number
        self._said[member.seat] = (said, old[1] if old is not None and same else now_s)

    def drop(self, seats: Iterable[int]) -> None:
        """What these have said does not count any more."""
        for seat in seats:
            self._said.pop(seat, None)

    def forget(self) -> None:
        """Nor what anybody has."""
        self._said.clear()

    def since_s(self, state: Membership) -> float | None:
        """When the first of those who are waited for has proposed."""
        said, inside = self._valid(state), state.inside
        return min((self._said[s][1] for s in said if s in inside or not inside), default=None)

    def waiting(self, state: Membership) -> tuple[int, ...]:
        """Who asks for the next session, and could be let in if all others of the latest one asked, too."""
        said, inside = self._valid(state), state.inside
        asking = {s for s, p in said.items() if s in inside or inside <= {s, *p.alive} - set(p.gone)}
        together = inside | asking
        if not inside or len(together) < state.spec.min_sites:
            return ()
        if state.spec.elects or state.lost:
            enough = all(_half(base, together, more=state.lost) for base in _bases(state, _maybe(state, said)))
            return tuple(sorted(asking)) if enough else ()
        return tuple(sorted(asking))

    def decide(self, state: Membership, *, over: bool, by: int | None = None) -> Opening:
        """The next session, if it can open; else what is missing.

        Args:
            over: the deadline is over.
            by: the site that decides in place of the coordinator.
        """
        if not (said := self._valid(state)):
            return Opening(None)
        opening = self._decide(state, said, over, by)
        if opening.session is None and (pair := _apart(state, said)) is not None:
            one, other = (state.names([s]) for s in pair)
            remedy = "give all sites --relay, or one of them --bind and --advertise"
            return Opening(None, f"sites {one} and {other} only dial out, so neither reaches the other: {remedy}")
        return opening

    def _decide(self, state: Membership, said: Mapping[int, Propose], over: bool, by: int | None) -> Opening:
        maybe, unknown = _maybe(state, said), False
        bases = _bases(state, maybe)
        if (newest := _newest(state, maybe)) is not None:  # what was made in it is where the run goes on, if anybody has it
            state, unknown = state.model_copy(update={"session": newest}), state.session is None
        last = state.session
        if by is not None and last is None:
            return Opening(None, "a run begins at the coordinator, which is away")
        if not over and (pair := _unknown(said)) is not None:
            return Opening(None, f"sites {state.names(pair)} are not connected yet")
        here = {m.seat: m for m in state.members if m.seat in said}
        claims = last is None or unknown or state.lost  # what a site says of its state has to do
        fresh = last is None or frozenset(last.members) <= said.keys()  # all who may have had another one are here
        haves = {
            s: h for s, p in said.items() if (h := p.have) is not None and (in_sync(here[s], h) or (claims and (fresh or h.session > 0)))
        }
        current = {s: h for s, h in haves.items() if last is not None and _of(last, s, h)}
        members = _reaching(said, state.inside, lambda s: (s in current, s in haves))
        if len(members) < state.spec.min_sites:
            if last is None and not any(here[s].bootstrap for s in members):
                return Opening(None, _founding(state, members & haves.keys(), members))
            ask = "1 site asks for a session" if len(members) == 1 else f"{len(members)} sites ask for a session and reach each other"
            return Opening(
                None, f"{ask} ({state.names(members)}), it needs {state.spec.min_sites} (wan.min_sites){_absent(state, members, said)}"
            )
        told = frozenset(s for s in members & haves.keys() if here[s].bootstrap)
        inside = state.inside
        absent = inside - said.keys() - _lost(said, inside)
        if absent and not (over and state.spec.quorum == "deadline"):
            return Opening(None, f"the session waits for {state.names(absent)}")
        begins = last is None or not (inside & members and current.keys() & members)
        if begins and absent | (inside - members):
            return Opening(None, f"the state of the run is with {state.names(absent | (inside - members))}: the session waits for them")
        young = state.lost or unknown  # others may have gone on without it, or with the one before
        if (state.spec.elects or young) and not (begins and told and by is None):
            more = by is not None or young
            for base in bases:
                if not _half(base, members, more=more):
                    return Opening(
                        None,
                        f"{len(members & base)} of the {len(base)} sites of the last session are here: too few to go on, without "
                        f"{state.names(base - members)}; whoever is lost for good is not waited for after "
                        f"{to_forget(state.spec.run, 'SITE')}, or where one of the others is started with --bootstrap",
                    )
        ready = {s: h for s, h in (haves if begins else current).items() if s in members}
        if begins and (why := self._too_early(state, members, ready, told, over)):
            return Opening(None, why)
        best = max((ready[s] for s in told or ready), key=lambda h: (h.session, h.round)) if begins else max(ready.values(), key=_rounds)
        opening = self._open(state, members, haves, ready, best, told, begins and last is not None, by)
        return opening._replace(late=(absent | said.keys()) - members, lost=unknown)

    def _open(
        self,
        state: Membership,
        members: frozenset[int],
        haves: Mapping[int, Have],
        ready: Mapping[int, Have],
        best: Have,
        told: frozenset[int],
        again: bool,
        by: int | None,
    ) -> Opening:
        last, spec = state.session, state.spec
        begins = again or last is None
        top = {s: h.digest for s, h in ready.items() if h.round == best.round and (not begins or h.session == best.session)}
        digest: str | None = None
        if spec.synchronous or (last is None and best.round == 0):
            digest = _agreed(top, told, majority=last is not None)
            if digest is None:
                who = {d: state.names(s for s in top if top[s] == d) for d in sorted(set(top.values()))}
                listed = "; ".join(f"{d[:12]}: {names}" for d, names in who.items())
                return Opening(
                    None, f"the sites hold different states after {best.round} rounds ({listed}): start one of them with --bootstrap"[:1000]
                )
        diverged = frozenset(s for s in top if digest not in (None, top[s]))
        donors = top.keys() - diverged
        if digest is not None:
            donors |= {s for s in members & haves.keys() if haves[s].round == best.round and haves[s].digest == digest}
        asked = [self._said[s][0] for s in members]
        before = last.number if last is not None else max(p.number for p in asked) - 1
        session = Session(
            number=max(before, *(p.opened for p in asked)) + 1,
            generation=state.generation + again,
            epoch=state.epoch,
            round=best.round,
            members=tuple(sorted(members)),
            donors=tuple(sorted(donors)),
            digest=digest if spec.synchronous else None,
            by=by,
            boots=tuple(self._said[s][0].caller.boot[:_BOOT_DIGITS] for s in sorted(members)),
        )
        held = frozenset(members & haves.keys()) if last is not None else frozenset(donors)
        return Opening(session, held=held, diverged=diverged)

    @staticmethod
    def _too_early(state: Membership, members: frozenset[int], ready: Mapping[int, Have], told: frozenset[int], over: bool) -> str:
        """Why the run does not begin (again) yet; empty: it does."""
        last = state.session
        if told:
            return ""
        if last is None:
            return "" if len(ready) >= state.spec.beginners else _founding(state, frozenset(ready), members)
        if not ready:
            return "nobody is here who held the state of the run"
        best = max(ready.values(), key=lambda h: (h.session, h.round))
        past = frozenset(last.members) - frozenset(state.vacant)
        most = 2 * len(past & ready.keys()) > len(past)
        if not (missing := past - members) or (over and most and (best.session == last.number or best.round >= last.round)):
            return ""
        return (
            f"no process of session {last.number} is left, and {state.names(missing)} may have the latest state: "
            "start them again, or one of the others with --bootstrap; what is lost for good is not waited for after "
            f"{to_forget(state.spec.run, 'SITE')}"
        )

    def _valid(self, state: Membership) -> dict[int, Propose]:
        """What was said by processes that are there."""
        boots, last = {m.seat: m.boot for m in state.living}, state.session.number if state.session is not None else 0
        return {s: p for s, (p, _) in sorted(self._said.items()) if boots.get(s) == p.caller.boot and p.number > last}


def _absent(state: Membership, members: frozenset[int], said: Mapping[int, Propose]) -> str:
    """Who else was, or could be, in a session: not there, there without a word yet, or not reached by all."""
    wanted = frozenset(m.seat for m in state.members) if state.session is None else frozenset(state.session.members)
    there = frozenset(m.seat for m in state.living)
    lacking = wanted - members
    gone, mute, apart = lacking - there, (lacking & there) - said.keys(), lacking & there & said.keys()
    text = f"; without {state.names(gone)}" if gone else ""
    text += f"; {state.names(mute)} {'has' if len(mute) == 1 else 'have'} not asked yet" if mute else ""
    return text + (f"; {state.names(apart)} {'asks' if len(apart) == 1 else 'ask'}, and not all reach each other" if apart else "")


def _founding(state: Membership, asking: frozenset[int], members: frozenset[int]) -> str:
    """What a run needs to begin, by the names of its settings."""
    spec, wanted = state.spec, state.spec.beginners
    founders = "not set" if spec.founders is None else f"= {spec.founders}"
    asks = f"{len(asking)} {'asks' if len(asking) == 1 else 'ask'}: {state.names(asking)}" if asking else "none asks"
    more = f"; without a state: {state.names(members - asking)}" if members - asking else ""
    return (
        f"it begins with {wanted} {'site' if wanted == 1 else 'sites'}, and {asks}{more} (fleet.workers: {spec.seats}; "
        f"wan.founders {founders}, wan.min_sites = {spec.min_sites}): start the others, or let fewer begin by wan.founders on all sites"
    )


def _rounds(have: Have) -> int:
    return have.round


def _of(last: Session, seat: int, have: Have) -> bool:
    """Whether a state is one of the latest session: made or got in it, or that from which it began."""
    if have.session == last.number:
        return seat in last.members and have.round >= last.round
    return seat in last.donors and have.round == last.round and last.digest in (None, have.digest)


def _maybe(state: Membership, said: Mapping[int, Propose]) -> list[Session]:
    """Sessions after the latest that is known to have been entered, which may have been entered, too."""
    found = {s.key: s for p in said.values() for s in p.bound if s.number > state.entered}
    if (last := state.session) is not None and last.number > state.entered:
        found[last.key] = last
    return [s for s in found.values() if not any(_never(s, seat, p) for seat, p in said.items())]


def _bases(state: Membership, maybe: Iterable[Session]) -> list[frozenset[int]]:
    """Of whom enough must be in the next session: the members of the latest one that is known to have been entered, and of each later one
    that may have been (`_maybe`)."""
    bases = [frozenset(s.members) for s in maybe]
    if base := state.base or (state.session.members if state.session is not None else ()):
        bases.append(frozenset(base))
    return [base - frozenset(state.left) - frozenset(state.vacant) for base in bases]


def _newest(state: Membership, maybe: Iterable[Session]) -> Session | None:
    """The latest that may have been entered (`_maybe`), where that is one which is not known here."""
    newest = max(maybe, key=lambda s: (s.number, s.key), default=None)
    last = state.session
    return newest if newest is not None and (last is None or newest.number > last.number) else None


def _never(session: Session, seat: int, said: Propose) -> bool:
    """Whether a member of a session has not come to it, and will not: then nobody has entered it."""
    return seat in session.members and said.number > session.number and session not in said.bound


def _half(base: frozenset[int], seats: frozenset[int], *, more: bool) -> bool:
    """Whether half of a base are among these; or more."""
    n = 2 * len(base & seats)
    return n > len(base) if more else n >= len(base)


def _lost(said: Mapping[int, Propose], inside: frozenset[int]) -> frozenset[int]:
    """Whom those of a session who have proposed have all lost, where they are more than half."""
    words = [frozenset(said[s].gone) for s in inside & said.keys()]
    return frozenset.intersection(*words) if 2 * len(words) > len(inside) else frozenset()


def _unknown(said: Mapping[int, Propose]) -> tuple[int, int] | None:
    """Two sites of which one does not know yet whether it reaches the other."""
    known = {s: {s, *p.alive, *p.gone} for s, p in said.items()}
    return next(((i, j) for i in said for j in said if i < j and not (j in known[i] and i in known[j])), None)


def _apart(state: Membership, said: Mapping[int, Propose]) -> tuple[int, int] | None:
    """Two sites that cannot be dialled, have not both a relay, and do not reach each other."""
    found = {m.seat: m.card for m in state.living if m.seat in said and m.card.address is None}
    pairs = ((i, j) for i in found for j in found if i < j and not (found[i].relayed and found[j].relayed))
    return next(((i, j) for i, j in pairs if j not in said[i].alive or i not in said[j].alive), None)


def _reaching(said: Mapping[int, Propose], inside: frozenset[int], worth: Callable[[int], tuple[bool, ...]]) -> frozenset[int]:
    """Sites that all reach each other. As long as some do not, one of these goes: one that is not inside, then the one that reaches the
    fewest, then the least worth, then the highest seat."""
    reached = {s: (frozenset(p.alive) - frozenset(p.gone)) & said.keys() - {s} for s, p in said.items()}
    links = {s: frozenset(j for j in reached[s] if s in reached[j]) for s in said}
    left = frozenset(said)
    while lacking := [s for s in left if len(links[s] & left) < len(left) - 1]:
        left -= {min(lacking, key=lambda s: (s in inside, len(links[s] & left), worth(s), -s))}
    return left


def _agreed(digests: Mapping[int, str], told: frozenset[int], *, majority: bool) -> str | None:
    """The state that is the run's: the only one, that of those who were told, or that of more than half."""
    for some in ({digests[s] for s in told & digests.keys()}, set(digests.values())):
        if len(some) == 1:
            return some.pop()
    (first, n), *_ = Counter(digests.values()).most_common()
    return first if majority and 2 * n > len(digests) else None
