"""Who is in a run: the rules, as functions from one frozen state to the next. No clock, no IO; leases are in `gossamer.wan.leases`.

A run begins (is *founded*) when its founders are there, all of them and with equal states, or one that was told to `bootstrap`. From then
on a site that comes is *healing* until it has the state of a donor that is in sync; before that it gives state to nobody, counts for no
quorum, and a fleet of such sites is no fleet, however long nobody else is there. When nobody in sync is left, the run waits until all have
come back who were in sync when a quorum last was (so that no better state can be anywhere), or enough with all that was committed, or one
of them that is told to bootstrap; the best state that they kept is where it begins again, in a new *generation*.

Turns. In gossip nobody waits for all, so the sites must agree on the first round with other members. After a change all who are in sync,
and were in the turn before, promise to enter no round from `first` on without knowing more; the turn begins at the highest `first`. Nobody
can have entered that round: a site that lives stands still before it, and of one that has died nobody can have had anything after it. A
further change while promises are awaited makes them void: they are given again, for the later epoch. In synchronous methods the commit of a
round names who takes part in the next, which is the same without promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import Field

from gossamer.core.errors import BadInput
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.messages import Record, Refused, Text
from gossamer.wan.records import Caller, Card, Commit, Count, Have, Join, Member, Promise, Roster, Round, Seats, Seed, Spec, Synced, Turn


class Membership(Record):
    """What is known of the members of one run. This is what is kept on disk."""

    spec: Spec
    seed: Seed
    revision: Count = 0
    epoch: Count = 0
    generation: Count = 0
    founded: Round | None = None
    members: tuple[Member, ...] = ()
    """In order of seats. Who has left keeps the seat."""
    turn: Turn | None = None
    pending: Count | None = None
    """Epoch since which promises are awaited."""
    promises: dict[int, Round] = Field(default_factory=dict)
    """By seat, for the pending epoch."""
    base: Seats = ()
    """Who was in sync at the last commit (gossip: when so many last were that they are a quorum)."""
    left: Seats = ()
    """Who of these has left since, of its own will."""
    newest: Round | None = None
    """The newest committed round of this generation."""
    why: Text = ""
    counts: dict[str, Count] = Field(default_factory=dict)

    @property
    def living(self) -> tuple[Member, ...]:
        """Members that are there."""
        return tuple(m for m in self.members if m.standing != "out")

    @property
    def synced(self) -> frozenset[int]:
        """Seats that are there and in sync."""
        return frozenset(m.seat for m in self.members if m.standing == "synced")

    @property
    def next_round(self) -> int:
        """The round that a synchronous method commits next."""
        return (self.founded or 0) if self.newest is None else self.newest + 1

    def roster(self) -> Roster:
        """For the sites."""
        return Roster(
            run=self.spec.run,
            revision=self.revision,
            epoch=self.epoch,
            generation=self.generation,
            founded=self.founded,
            members=self.members,
            turn=self.turn,
            pending=self.pending,
            why=self.why,
        )

    def revised(self) -> Membership:
        """The same, as the next revision."""
        return _with(self, revision=self.revision + 1)

    def find(self, site: str) -> Member | None:
        """The member of that name."""
        return next((m for m in self.members if m.site == site), None)

    def at(self, seat: int) -> Member:
        """The member of that seat."""
        return next(m for m in self.members if m.seat == seat)

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
        raise BadInput(f"min_sites is {spec.min_sites}, of a run of {spec.seats} seats: expected at most {spec.seats}")
    if spec.min_sites == 1 < spec.seats and not spec.alone:
        raise BadInput(
            "min_sites is 1: a site that loses sight of the others would silently go its own way; "
            "expected at least 2, or alone = true if that is what you want"
        )
    if spec.founders is not None and not spec.min_sites <= spec.founders <= spec.seats:
        raise BadInput(f"founders is {spec.founders}: expected at least min_sites ({spec.min_sites}) and at most seats ({spec.seats})")
    if spec.sites and (len(spec.sites) != spec.seats or len(set(spec.sites)) != spec.seats):
        raise BadInput(f"sites names {len(set(spec.sites))} sites for {spec.seats} seats: expected one name for each seat, or none at all")
    if spec.synchronous and spec.without == "go_on":
        raise BadInput(
            "without = 'go_on' is for gossip: in a synchronous method somebody must say who took part; expected 'elect' or 'wait'"
        )
    if not spec.synchronous and spec.without == "elect":
        raise BadInput("without = 'elect' is for synchronous methods: gossip has nothing to elect for; expected 'go_on' or 'wait'")


def differences(mine: Spec, theirs: Spec) -> str:
    """In what two descriptions of one run differ, in words; empty when in nothing."""
    found = []
    for name in Spec.model_fields:
        a, b = getattr(mine, name), getattr(theirs, name)
        if name == "versions":
            found += [f"{k} {b.get(k, 'none')} (expected {a.get(k, 'none')})" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
        elif a != b:
            found.append(f"{name} {b} (expected {a})")
    return ", ".join(found)


def join(state: Membership, request: Join) -> Membership:
    """A site comes, comes back, or asks again.

    Raises:
        Refused: foreign (another configuration, layout, release: named), full, or an address that the others cannot use.
    """
    if different := differences(state.spec, request.spec):
        raise Refused(
            "foreign", f"site {request.caller.site} has another {different}: all sites of a run need one configuration and release"[:1000]
        )
    old = state.find(request.caller.site)
    if old is not None and old.boot == request.caller.boot and old.standing != "out":
        return state  # the answer to the first request was lost
    seat = old.seat if old is not None else _free_seat(state, request.caller.site)
    _check_address(state, request.caller.site, request.card)
    new = Member(
        site=request.caller.site,
        seat=seat,
        boot=request.caller.boot,
        card=request.card,
        standing="waiting" if state.founded is None or not state.synced else "healing",
        ever=old is not None and old.ever,
        have=request.have,
        bootstrap=request.bootstrap,
    )
    return _changed(_put(state, new)).counting("joins")


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
    if member.standing == "out":
        raise Refused("expired", f"site {who.site} is out of run {who.run}: it was not heard of for the length of its lease, or has left")
    return member


def leave(state: Membership, who: Caller) -> Membership:
    """A site goes, of its own will. It may ask twice."""
    member = state.find(who.site)
    if member is None or member.boot != who.boot or member.standing == "out":
        return state
    gone = _put(state, _as(member, standing="out"))
    return _changed(_with(gone, left=(*state.left, member.seat))).counting("leaves")


def expire(state: Membership, sites: Iterable[str]) -> Membership:
    """The leases of these are over."""
    found = [m for site in sites if (m := state.find(site)) is not None and m.standing != "out"]
    for member in found:
        state = _put(state, _as(member, standing="out"))
    return _changed(state).counting("expiries", len(found)) if found else state


def found(state: Membership) -> Membership:
    """Begins the run, or begins it again, if that can be; `why` says what is missing."""
    if state.synced:
        return state if not state.why else _with(state, why="")
    first, spec = state.founded is None, state.spec
    ready = [m for m in state.living if m.have is not None and (first or m.ever)]
    told = [m for m in ready if m.bootstrap]
    if not told:
        wanted = spec.seats if spec.founders is None else spec.founders
        if first:
            enough = len(ready) >= wanted
            missing = f"{len(ready)} of {wanted} sites with a state are there ({len(state.living)} in all)"
        else:
            absent = [m.site for m in state.members if m.seat in state.base and m not in ready]
            current = [m for m in ready if spec.synchronous and m.have and m.have.round == state.next_round]
            enough = not absent or len(current) >= spec.min_sites
            missing = (
                f"nobody is left who is in sync, and {', '.join(absent)} had the latest state: start them again, or one with bootstrap"
            )
        if not enough:
            return _with(state, why=f"the run waits: {missing}"[:1000])
    best = max((m.have for m in told or ready if m.have), key=lambda h: h.round, default=None)
    if best is None:
        return _with(state, why="the run waits for a site with a state")
    alike = [m for m in ready if m.have and _alike(spec, m.have, best)]
    same = [m for m in ready if m.have and m.have.round == best.round]
    if len(same) > len(alike) and not told:
        states = Counter(m.have.digest[:12] for m in same if m.have)
        listed = ", ".join(f"{n} x {digest}" for digest, n in sorted(states.items())[:8])
        return _with(state, why=f"the sites hold different states after {best.round} rounds ({listed}): start one of them with bootstrap")
    return _begin(state, alike)


def synced(state: Membership, request: Synced) -> Membership:
    """A site has got the state of the run.

    Raises:
        Refused: not_in_sync: its donor is not, or it has none and needs one; stale: the fleet has gone on since.
    """
    member = caller(state, request.caller)
    if member.standing == "synced":
        return state
    if state.founded is None or not state.synced:
        raise Refused(
            "not_in_sync", "nobody is in sync yet: the run begins when its founders are there" + (f" ({state.why})" if state.why else "")
        )
    if request.donor is None and (state.spec.synchronous or not member.ever):
        raise Refused("not_in_sync", f"site {member.site} was never in sync with this run: it needs the state of a donor that is")
    if request.donor is not None:
        donor = state.find(request.donor)
        if donor is None or donor.standing != "synced":
            raise Refused("not_in_sync", f"site {request.donor} is not in sync (any more): take the state of another one")
    if state.spec.synchronous and request.have.round != state.next_round:
        raise Refused(
            "stale", f"the state after {request.have.round} rounds is not the present one: the fleet is in round {state.next_round}", 0.0
        )
    return _changed(_put(state, _as(member, standing="synced", ever=True, have=request.have))).counting("healed")


def promise(state: Membership, member: Member, said: Promise) -> Membership:
    """A site in sync says which round it will not enter before it knows more. One for another epoch than the pending one says nothing."""
    if state.pending is None or said.epoch != state.pending or member.seat not in _asked(state) or member.seat in state.promises:
        return state
    return _settle(_with(state, promises={**state.promises, member.seat: said.first}))


def committed(state: Membership, commit: Commit) -> Membership:
    """A round is committed: who is present then decides on the next."""
    newest = commit.round if state.newest is None else max(state.newest, commit.round)
    state = _with(state, newest=newest)
    if len(commit.present) >= state.spec.min_sites:
        state = _with(state, base=commit.present, left=())
    return state if commit.took else state.counting("skipped")


def taken_over(state: Membership, commit: Commit, seat: int) -> Membership:
    """A round was committed without the coordinator, as `seat` says, which was there: who was not has missed it, and heals."""
    before = state
    for member in state.living:
        if member.standing == "synced" and member.seat not in commit.present:
            state = _put(state, _as(member, standing="healing"))
        elif member.seat == seat and member.standing != "synced":
            state = _put(state, _as(member, standing="synced", ever=True))
    return state if state is before else _changed(state)


def _begin(state: Membership, founders: Iterable[Member]) -> Membership:
    again, rounds = state.founded is not None, []
    for member in founders:
        state = _put(state, _as(member, standing="synced", ever=True))
        rounds += [member.have.round] if member.have else []
    for member in state.living:
        if member.standing == "waiting":
            state = _put(state, _as(member, standing="healing"))
    present = tuple(sorted(state.synced))
    turn = Turn(epoch=state.epoch + 1, since=min(rounds), present=present)
    state = _with(
        state, founded=turn.since, generation=state.generation + again, epoch=turn.epoch, newest=None, turn=turn, base=present, left=()
    )
    return _with(state, why="", pending=None, promises={}).counting("begun")


def _changed(state: Membership) -> Membership:
    """A new epoch. In gossip, promises are asked for where other sites are in sync than the turn says."""
    state = _with(state, epoch=state.epoch + 1)
    present, turn = tuple(sorted(state.synced)), state.turn
    if state.spec.synchronous or turn is None or not present:
        return _with(state, pending=None, promises={})
    if len(present) >= state.spec.min_sites:
        state = _with(state, base=present, left=())
    if state.pending is None and present == turn.present:
        return state
    return _settle(_with(state, pending=state.epoch, promises={}))


def _asked(state: Membership) -> frozenset[int]:
    """Who must promise: who is in sync and may have entered rounds."""
    return state.synced & frozenset(() if state.turn is None else state.turn.present)


def _settle(state: Membership) -> Membership:
    """The turn, when all have promised."""
    old = state.turn
    if old is None or state.pending is None or not _asked(state) <= state.promises.keys():
        return state
    comers = [m.have.round for m in state.members if m.standing == "synced" and m.have and m.seat not in old.present]
    since = max([old.since, *state.promises.values(), *comers])
    turn = Turn(epoch=state.pending, since=since, present=tuple(sorted(state.synced)))
    return _with(state, turn=turn, pending=None, promises={})


def _alike(spec: Spec, a: Have, b: Have) -> bool:
    """Whether two sites can begin together. In gossip each has parameters, and a round, of its own; at the start all are equal."""
    if spec.synchronous or 0 in (a.round, b.round):
        return a == b
    return True


def _free_seat(state: Membership, site: str) -> int:
    if state.spec.sites:
        if site not in state.spec.sites:
            raise Refused("full", f"site {site} is not one of this run: expected one of {', '.join(state.spec.sites)}"[:1000])
        return state.spec.sites.index(site)
    taken = {m.seat for m in state.members}
    free = next((s for s in range(state.spec.seats) if s not in taken), None)
    if free is None:
        names = ", ".join(m.site for m in state.members)
        raise Refused("full", f"all {state.spec.seats} seats of run {state.spec.run} belong to other sites ({names})"[:1000])
    return free


def _check_address(state: Membership, site: str, card: Card) -> None:
    """A loopback address is one only for sites of the same machine."""
    for other in state.living:
        pair = (card.address, other.card.address)
        if other.site != site and None not in pair and len({is_loopback(a) for a in pair if a}) == 2:
            local, remote = (site, other.site) if is_loopback(card.address or "") else (other.site, site)
            raise Refused(
                "foreign", f"site {local} advertises a loopback address, which site {remote} cannot reach: set its address to advertise"
            )


def is_loopback(address: str) -> bool:
    """Whether host:port names this machine to itself."""
    host = address.rpartition(":")[0].strip("[]").lower()
    return host in ("localhost", "::1", "") or host.endswith(".localhost") or host.startswith(("127.", "::ffff:127."))


def _put(state: Membership, member: Member) -> Membership:
    others = [m for m in state.members if m.seat != member.seat]
    return _with(state, members=tuple(sorted([*others, member], key=lambda m: m.seat)))


def _with(state: Membership, **changes: object) -> Membership:
    return state.model_copy(update=changes)


def _as(member: Member, **changes: object) -> Member:
    return member.model_copy(update=changes)
