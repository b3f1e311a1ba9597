"""What sites and the coordinator say to each other: JSON, checked against frozen models before anything looks at it.

Every length and number has a bound, unknown keys are refused, and nothing is converted (a number in quotes is no number). A message that is
not exactly one of these is refused as a whole. Seconds in them are durations: no clock of one host is ever compared with another's.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from gossamer.wan.roster.differing import Settings
from gossamer.wan.roster.ended import Ended
from gossamer.wan.roster.messages import Hash, Name, Record, Round, Seconds, Text, pack

PROTOCOL = 1
"""Version of these messages. Another one is another service, which the caller is told."""

MAX_VALUE_CHARS, MAX_SEATS, MAX_BOUND = 1 << 20, 4096, 32

Boot: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Which process of a site: 128 random bits, drawn at its start."""
Address: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^\s/]{1,253}:[0-9]{1,5}$")]
Value: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_VALUE_CHARS)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**28)]
"""Of a session, from 1; 0: none."""
Seat: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_SEATS)]
Seats: TypeAlias = Annotated[tuple[Seat, ...], Field(max_length=MAX_SEATS)]


# ---- runs and sites


class Spec(Record):
    """What all sites of a run have in common. The first site that joins brings it, every later one must bring the same."""

    run: Name
    configuration: Hash
    settings: Settings = Field(default_factory=dict)
    """What the configuration says, to name differences. Not compared: `configuration` is its hash."""
    layout: Hash
    versions: Annotated[dict[Name, Text], Field(max_length=32)]
    """Of Gossamer, torch, ...: equal on all sites."""
    seats: Annotated[int, Field(ge=1, le=MAX_SEATS)]
    """Workers of the fleet."""
    sites: Annotated[tuple[Name, ...], Field(max_length=MAX_SEATS)] = ()
    """Who may take part, in the order of seats; empty: whoever has a certificate, seats in the order of joining."""
    synchronous: bool
    min_sites: Annotated[int, Field(ge=1, le=MAX_SEATS)]
    """With fewer no session opens: the run waits."""
    founders: Annotated[int, Field(ge=1, le=MAX_SEATS)] | None = None
    """So many sites begin the run; None: all seats."""
    alone: bool = False
    """A quorum of one site is meant."""
    quorum: Literal["all", "deadline"] = "all"
    """A session opens when all who were in the one before, and are there, have proposed it; or once the deadline is over."""
    late: Literal["keep", "drop"] = "drop"
    """What a site does with work that no round has: adds it to its next contribution, or lets it go."""
    without: Literal["go_on", "elect", "wait"] = "wait"
    """A session that is needed while the coordinator is away: a site opens it (elect; in gossip go_on: deaths need none), or all wait."""
    floor_s: Annotated[float, Field(gt=0.0, le=1e6)]
    """The least deadline of a round. All other time-outs derive from it (`gossamer.wan.deadlines`)."""
    lease_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """None: derived."""
    spread: Annotated[float, Field(ge=0.0, le=1e3)] = 6.0
    """k of the deadline."""
    seed: Seed | None = None
    """Of the pairing; None: the coordinator draws one."""

    @property
    def beginners(self) -> int:
        """So many sites begin the run."""
        return self.seats if self.founders is None else self.founders

    @property
    def elects(self) -> bool:
        """Whether a site may stand in for the coordinator."""
        return self.without != "wait"


RELAY = "relay"
"""One of a site's capabilities: it stands at a relay."""


class Card(Record):
    """What a site says of itself."""

    address: Address | None
    """Where the others reach it; None: it can only dial out."""
    ranks: Annotated[tuple[Address, ...], Field(max_length=MAX_SEATS)] = ()
    """Of a site of several ranks that can be dialled: where the others reach those after the first."""
    capabilities: Annotated[tuple[Name, ...], Field(max_length=64)] = ()

    @property
    def relayed(self) -> bool:
        """Whether the site was given a relay."""
        return RELAY in self.capabilities


class Have(Record):
    """A state that a site holds: after `round` rounds."""

    round: Round
    digest: Hash
    """Of the state that all share (synchronous methods), or of the site's own (gossip: compared at the founding only)."""
    session: Number = 0
    """The last session in which this site held the state of the run: made it, brought it along, or got it. 0: none, a fresh state."""


class Session(Record):
    """A stretch of a run with fixed members."""

    number: Annotated[Number, Field(ge=1)]
    generation: Count
    """How often the run has begun again from older states, when no process of its latest session was left."""
    epoch: Count
    """Of the roster that it was opened from."""
    round: Round
    """Rounds completed when it begins."""
    members: Annotated[Seats, Field(min_length=1)]
    """Rising."""
    donors: Annotated[Seats, Field(min_length=1)]
    """Those of the members who hold the state after `round` rounds. The others take it from one of them before the first round."""
    digest: Hash | None
    """Of that state; None in gossip, where each has one of its own."""
    by: Seat | None
    """Which site opened it while the coordinator was away; None: the coordinator did."""
    boots: Annotated[tuple[Hash, ...], Field(max_length=MAX_SEATS)] = ()
    """Which process of each member asked for it (the first digits): no other one is in it."""

    def has(self, seat: int, boot: str) -> bool:
        """Whether this process is in it."""
        if seat not in self.members:
            return False
        return not self.boots or boot.startswith(self.boots[self.members.index(seat)])

    @property
    def key(self) -> str:
        """16 hex digits of all of this: what belongs to one session never meets what belongs to another."""
        return hashlib.sha256(pack(self)).hexdigest()[:16]


class Member(Record):
    """A site of a run, there or not. `left`: of its own will. `fault`: what is wrong with its certificate, where that has put it out."""

    site: Name
    seat: Seat
    boot: Boot
    card: Card
    there: bool = True
    inside: bool = False
    """This process is in the latest session."""
    ever: bool = False
    """It has held the state of the run."""
    session: Number = 0
    """The latest that it was let into."""
    bootstrap: bool = False
    """It was told to begin from its state."""
    left: bool = False
    fault: Text = ""

    @property
    def standing(self) -> Literal["out", "waiting", "in"]:
        """In a word."""
        return "out" if not self.there else "in" if self.inside else "waiting"


class Roster(Record):
    """Who is in. `epoch` rises with every change of the members, `revision` with any change at all."""

    run: Name
    revision: Count
    epoch: Count
    generation: Count
    members: Annotated[tuple[Member, ...], Field(max_length=MAX_SEATS)]
    session: Session | None
    """The latest."""

    @property
    def living(self) -> tuple[Member, ...]:
        """Members that are there, in order of seats."""
        return tuple(m for m in self.members if m.there)

    @property
    def inside(self) -> tuple[int, ...]:
        """Seats of those who are there, and in the latest session."""
        return tuple(m.seat for m in self.members if m.standing == "in")

    def at(self, seat: int) -> Member | None:
        """The member of that seat."""
        return next((m for m in self.members if m.seat == seat), None)


class Caller(Record):
    """Who asks."""

    run: Name
    site: Name
    boot: Boot


class Join(Record):
    """A site comes, or comes back."""

    protocol: int
    spec: Spec
    caller: Caller
    card: Card
    seat: Seat | None = None
    """The one that it had, should the coordinator have lost its file."""
    bootstrap: bool = False
    """Begin from this site's state, whoever else is missing."""
    take_over: bool = False
    """In place of another process of this site, though that one is there."""


class Admission(Record):
    """The answer to Join."""

    seat: Seat
    seed: Seed
    lease_s: Seconds
    roster: Roster


class Report(Record):
    """What a site tells of itself, for those who watch the run."""

    round: Round = 0
    """Rounds completed."""
    loss: float | None = None
    bytes_sent: Count = 0
    bytes_received: Count = 0
    exchange_s: Seconds | None = None
    """Since its last exchange."""


class Beat(Record):
    """Renews a lease."""

    caller: Caller
    report: Report = Report()
    entered: Hash | None = None
    """Key of the latest session that this site has entered: all of its members have met."""


class News(Record):
    """Answer to Beat, and what the standing stream brings at every change."""

    roster: Roster
    plan: Count
    """Version of the latest plan; 0: none."""
    waiting: Seats
    """Who asks for the next session, and could be let in."""
    why: Text
    """What the next session waits for, where somebody has asked for it."""


# ---- sessions and plans


class Propose(Record):
    """A site asks for the next session."""

    caller: Caller
    number: Annotated[Number, Field(ge=1)]
    """One more than the latest that this site knows of."""
    entered: Hash | None = None
    """Key of the latest that it has entered."""
    opened: Number = 0
    """The latest that it was in, or tried to be. It is in no other one of that number, nor of a lower one."""
    bound: Annotated[tuple[Session, ...], Field(max_length=MAX_BOUND)] = ()
    """Sessions that it has told the others to have come to, in this process or an earlier one, since the latest of which it knows that
    somebody has entered it (included): one of them may have been entered."""
    have: Have | None
    """None: no state; it takes a donor's."""
    alive: Seats
    """Whom this site reaches, and wants in it."""
    gone: Seats = ()
    """Whom it has lost, or does not wait for. Who is in neither is not known yet."""
    wait_s: Seconds = 0.0
    """The answer may take so long."""


class Verdict(Record):
    """Answer to Propose."""

    session: Session | None
    """The one that was asked for; or a later one, if that one is over."""
    late: bool = False
    """The site that asks is not in it: it asks for the next one."""
    why: Text = ""
    """Without a session: what is missing."""
    ask_coordinator: bool = False
    """The coordinator is there, as the site that would stand in for it knows."""


class Known(Record):
    """The sessions that a site knows of."""

    latest: Session | None = None
    entered: Session | None = None
    """The latest that a site has entered."""


class Elect(Record):
    """A proposal to the site that stands in for the coordinator."""

    propose: Propose
    known: Known


class HandIn(Record):
    """A session that was opened without the coordinator, by a site that has entered it."""

    caller: Caller
    session: Session


class Plan(Record):
    """A plan that all sites follow from a round on. Versions count from 1, each is published once."""

    version: Count
    since: Round
    body: Value


class Publish(Record):
    """Publishes the next plan."""

    caller: Caller
    plan: Plan


class Ask(Record):
    """Asks for the status of one run, or of all."""

    run: Name | None = None


class Forget(Record):
    """Asks the coordinator to forget a run that has nobody, or a site of a run that is not there."""

    run: Name
    site: Name | None = None


class PlanReply(Record):
    """Answer to Publish, and to a request for the latest plan."""

    plan: Plan | None


class SiteStatus(Record):
    """One line of `gossamer wan status`."""

    site: Name
    seat: Seat
    standing: str
    """out, waiting (to be let in), healing (let in, without the state yet), in, or finished (it was in at the end of the run)."""
    address: str | None
    lease_s: float | None
    """Left of its lease."""
    lag: int | None
    """Rounds behind the first."""
    report: Report | None


class RunStatus(Record):
    """A run, for people."""

    run: Name
    epoch: Count
    generation: Count
    newest: Round | None
    """Rounds completed, by the first."""
    sessions: tuple[Session, ...]
    """The last ones, newest first."""
    why: str
    sites: tuple[SiteStatus, ...]
    seats: Annotated[int, Field(ge=0, le=MAX_SEATS)] = 0
    """Workers of the fleet."""
    ended: Ended | None = None
    """None: it goes on."""
    counts: dict[str, int]
    """joins, leaves, expiries, forgotten, sessions, late, healed, diverged, begun (again), handed_in, replaced."""


class Status(Record):
    """Answer to Ask."""

    runs: tuple[RunStatus, ...]


class Done(Record):
    """Nothing more to say."""
