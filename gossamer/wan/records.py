"""What sites and the coordinator say to each other: JSON, checked against frozen models before anything looks at it.

Every length and number has a bound, unknown keys are refused, and nothing is converted (a number in quotes is no number). A message that is
not exactly one of these is refused as a whole. Seconds in them are durations: no clock of one host is ever compared with another's.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from gossamer.wan.messages import Record, Seconds, Text

PROTOCOL = 1
"""Version of these messages. Another one is another service, which the caller is told."""

MAX_VALUE_CHARS = 1 << 20
MAX_SEATS = 4096

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Hash: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,64}$")]
Boot: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Which process of a site: 128 random bits, drawn at its start."""
Address: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^\s/]{1,253}:[0-9]{1,5}$")]
Key: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Value: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_VALUE_CHARS)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Round: TypeAlias = Annotated[int, Field(ge=0, lt=2**28)]
Seat: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_SEATS)]
Seats: TypeAlias = Annotated[tuple[Seat, ...], Field(max_length=MAX_SEATS)]
Keys: TypeAlias = Annotated[tuple[Key, ...], Field(max_length=MAX_SEATS)]


# ---- runs and sites


class Spec(Record):
    """What all sites of a run have in common. The first site that joins brings it, every later one must bring the same."""

    run: Name
    configuration: Hash
    layout: Hash
    versions: Annotated[dict[Name, Text], Field(max_length=32)]
    """Of Gossamer, torch, ...: equal on all sites."""
    seats: Annotated[int, Field(ge=1, le=MAX_SEATS)]
    """Workers of the fleet."""
    sites: Annotated[tuple[Name, ...], Field(max_length=MAX_SEATS)] = ()
    """Who may take part, in the order of seats; empty: whoever has a certificate, seats in the order of joining."""
    synchronous: bool
    min_sites: Annotated[int, Field(ge=1, le=MAX_SEATS)]
    """A round with fewer is none: see `below_min`."""
    founders: Annotated[int, Field(ge=1, le=MAX_SEATS)] | None = None
    """So many sites begin the run; None: all seats."""
    alone: bool = False
    """A quorum of one site is meant."""
    below_min: Literal["wait", "skip"] = "wait"
    quorum: Literal["all", "deadline"] = "all"
    """A round of a synchronous method is complete with all living sites, or with `min_sites` once the deadline is over."""
    late: Literal["keep", "drop"] = "drop"
    """What a site does with a contribution that no round has: adds it to its next one, or lets it go."""
    without: Literal["go_on", "elect", "wait"] = "wait"
    """While the coordinator is away. go_on is for gossip."""
    floor_s: Annotated[float, Field(gt=0.0, le=1e6)]
    """The least deadline of a round. All other time-outs derive from it (`gossamer.wan.deadlines`)."""
    lease_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """None: derived."""
    spread: Annotated[float, Field(ge=0.0, le=1e3)] = 6.0
    """k of the deadline."""
    seed: Seed | None = None
    """Of the pairing; None: the coordinator draws one."""


class Card(Record):
    """What a site says of itself."""

    address: Address | None
    """Where the others reach it; None: it can only dial out."""
    capabilities: Annotated[tuple[Name, ...], Field(max_length=64)] = ()


class Have(Record):
    """A state that a site holds: after `round` rounds."""

    round: Round
    digest: Hash


class Member(Record):
    """A site of a run, there or not."""

    site: Name
    seat: Seat
    boot: Boot
    card: Card
    standing: Literal["out", "waiting", "healing", "synced"]
    """Gone; before the run has begun; without the run's state; with it."""
    ever: bool = False
    """It has been in sync with this run before."""
    have: Have | None = None
    bootstrap: bool = False


class Turn(Record):
    """From round `since` on, which nobody had entered when it was settled, `present` take part."""

    epoch: Count
    since: Round
    present: Seats


class Roster(Record):
    """Who is in. `epoch` rises with every change of the members, `revision` with any change at all."""

    run: Name
    revision: Count
    epoch: Count
    generation: Count
    """How often the run has begun: once, and again each time that nobody in sync was left and sites came back with an older state."""
    founded: Round | None
    """Rounds completed at the (latest) beginning; None: not begun."""
    members: Annotated[tuple[Member, ...], Field(max_length=MAX_SEATS)]
    turn: Turn | None
    """The latest that is settled."""
    pending: Count | None
    """Epoch of a change for which the sites in sync are asked to promise; None: none."""
    why: Text
    """What the run waits for, in words; empty: nothing."""

    @property
    def living(self) -> tuple[Member, ...]:
        """Members that are there, in order of seats."""
        return tuple(m for m in self.members if m.standing != "out")

    @property
    def synced(self) -> tuple[int, ...]:
        """Seats that are there and in sync: who may give state, and take part."""
        return tuple(m.seat for m in self.members if m.standing == "synced")


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
    have: Have | None
    bootstrap: bool = False
    """Begin from this site's state, alone if need be."""


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


class Promise(Record):
    """This site enters no round from `first` on before it knows the turn of `epoch` or a later one."""

    epoch: Count
    first: Round


class Beat(Record):
    """Renews a lease."""

    caller: Caller
    report: Report = Report()
    promise: Promise | None = None


class News(Record):
    """Answer to Beat, and what the standing stream brings at every change."""

    roster: Roster
    plan: Count
    """Version of the latest plan; 0: none."""
    newest: Round | None
    """The newest round that is committed."""


class Synced(Record):
    """A site has the state of the run: from `donor`, or of its own (gossip, and only who was in sync before)."""

    caller: Caller
    have: Have
    donor: Name | None = None


# ---- rounds, plans, keys


class Share(Record):
    """A contribution to a mean, and its weight: tokens, or 1."""

    seat: Seat
    weight: Count


class Propose(Record):
    """A site has heard these in a round (of a synchronous method), itself included."""

    caller: Caller
    round: Round
    fragment: Annotated[int, Field(ge=0, lt=2**16)] = 0
    took: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MAX_SEATS)]
    gone: Seats = ()
    """Whom this site has lost."""
    wait_s: Seconds = 0.0
    """The answer may take so long."""


class Commit(Record):
    """Who took part in a round, with what weight. The same on all sites, once and for all."""

    round: Round
    fragment: Annotated[int, Field(ge=0, lt=2**16)]
    generation: Count
    epoch: Count
    took: Annotated[tuple[Share, ...], Field(max_length=MAX_SEATS)]
    """In order of seats. Empty: the round is skipped, nobody moves."""
    by: Seat
    """Whose proposal it is: it has all of these contributions."""
    present: Seats
    """Who is in sync when the round is committed, and so takes part in the next."""


class Verdict(Record):
    """Answer to Propose."""

    commit: Commit | None
    late: bool = False
    """The proposer's own contribution is not in it: see `Spec.late`."""
    why: Text = ""
    """Without a commit: what is missing."""
    ask_coordinator: bool = False
    """The coordinator is there, as the site that would stand in for it knows."""


class Elect(Record):
    """A proposal to the site that stands in for the coordinator, and what is known of the rounds before."""

    propose: Propose
    known: Annotated[tuple[Commit, ...], Field(max_length=1024)] = ()


class HandIn(Record):
    """Commits that sites agreed on without the coordinator."""

    caller: Caller
    commits: Annotated[tuple[Commit, ...], Field(min_length=1, max_length=1024)]


class Set(Record):
    """Sets a key of the run."""

    caller: Caller
    key: Key
    value: Value


class Get(Record):
    """Asks for the values of keys. Waits until all are set, at most `wait_s`."""

    caller: Caller
    keys: Keys
    wait_s: Seconds = 0.0
    values: bool = True
    """False: only whether they are there."""


class Values(Record):
    """Answer to Get. Without `found`, at least one key is not set, and there are no values."""

    found: bool
    values: Annotated[tuple[Value, ...], Field(max_length=MAX_SEATS)] = ()


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


class PlanReply(Record):
    """Answer to Publish, and to a request for the latest plan."""

    plan: Plan | None


class SiteStatus(Record):
    """One line of `gossamer wan status`."""

    site: Name
    seat: Seat
    standing: str
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
    founded: Round | None
    newest: Round | None
    why: str
    sites: tuple[SiteStatus, ...]
    counts: dict[str, int]
    """joins, leaves, expiries, late, skipped, refused, ..."""


class Status(Record):
    """Answer to Ask."""

    runs: tuple[RunStatus, ...]


class Done(Record):
    """Nothing more to say."""
