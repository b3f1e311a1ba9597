"""The coordinator: what it knows of its runs, and its answers. No network here (see service.py); the clock is given.

It is small on purpose. It holds who is in, who took part in which round, a plan, a seed and short texts; no parameter ever passes through
it. Each answer is on disk before it is given, so a coordinator that is killed and started again goes on where it was: leases begin anew,
proposals that were open are made again by the sites, and nobody gets another answer than before.

One thread (or event loop) calls it.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable

from gossamer.core.errors import BadInput
from gossamer.wan import membership
from gossamer.wan.commits import Book, Place, answer
from gossamer.wan.deadlines import Deadline, Timeouts
from gossamer.wan.leases import Leases
from gossamer.wan.ledgerdb import LedgerDB
from gossamer.wan.membership import Membership
from gossamer.wan.messages import Refused
from gossamer.wan.records import (
    PROTOCOL,
    Admission,
    Ask,
    Beat,
    Caller,
    Commit,
    Done,
    Get,
    HandIn,
    Join,
    Member,
    News,
    PlanReply,
    Propose,
    Publish,
    Report,
    Roster,
    RunStatus,
    Set,
    SiteStatus,
    Status,
    Synced,
    Values,
    Verdict,
)

log = logging.getLogger(__name__)

MAX_RUNS = 256
_KEPT_PLACES = 64


class Run:
    """One run, in memory: what is on disk, and what only the present process knows."""

    def __init__(self, state: Membership, plan: int, now_s: float) -> None:
        spec = state.spec
        self.state = state
        self.plan = plan
        self.timeouts = Timeouts.of(spec.floor_s, lease_s=spec.lease_s)
        self.leases = Leases(self.timeouts.lease, self.timeouts.grace, now_s)
        self.leases.keep([m.site for m in state.living], now_s)
        self.deadline = Deadline(spec.floor_s, spec.spread)
        self.book = Book()
        self.reports: dict[str, Report] = {}
        self.began_s: dict[Place, float] = {}
        """First proposals of the latest places."""
        self.late: deque[tuple[Place, int]] = deque(maxlen=4 * _KEPT_PLACES)
        """Counted already."""
        self.version = 0
        """Rises with every change that the sites are told of."""


class Coordinator:
    """All runs of one state file.

    Args:
        clock: monotonic seconds.
        on_change: told the run at every change.
    """

    def __init__(self, db: LedgerDB, clock: Callable[[], float], on_change: Callable[[str], None] = lambda run: None) -> None:
        self._db, self._clock, self._on_change = db, clock, on_change
        self.runs: dict[str, Run] = {}
        for state in db.runs():
            plan = db.plan(state.spec.run)
            self.runs[state.spec.run] = Run(state, plan.version if plan else 0, clock())
            log.info("run=%s taken up epoch=%d sites=%d newest=%s", state.spec.run, state.epoch, len(state.living), state.newest)

    # ---- membership

    def join(self, request: Join) -> Admission:
        """See `membership.join`. The first site of a run opens it."""
        if request.protocol != PROTOCOL:
            raise Refused("foreign", f"the site speaks protocol {request.protocol}, the coordinator {PROTOCOL}: use one release")
        if request.spec.run != request.caller.run:
            raise Refused(
                "garbage", f"site {request.caller.site} joins run {request.caller.run} with the description of {request.spec.run}"
            )
        now_s, site, run = self._clock(), request.caller.site, self.runs.get(request.caller.run)
        if run is None:
            run = self._open(request, now_s)
        old = run.state.find(site)
        new = membership.join(run.state, request)
        if new is not run.state:
            if (wait_s := run.leases.retry_s(site, now_s)) > 0:
                raise Refused("flapping", f"site {site} has joined too often of late: it may again in {wait_s:.1f} s", wait_s)
            if old is None or old.boot != request.caller.boot:
                run.reports.pop(site, None)
        self._put(run, new)
        run.leases.renew(site, now_s)
        self.runs[request.caller.run] = run
        member = membership.caller(run.state, request.caller)
        log.info(
            "run=%s site=%s joined seat=%d standing=%s epoch=%d", request.caller.run, site, member.seat, member.standing, run.state.epoch
        )
        return Admission(seat=member.seat, seed=run.state.seed, lease_s=run.timeouts.lease, roster=run.state.roster())

    def leave(self, who: Caller) -> Done:
        """A site goes. Nothing happens when it has gone."""
        run = self.runs.get(who.run)
        if run is not None:
            new = membership.leave(run.state, who)
            if new is not run.state:
                self._put(run, new)
                run.leases.drop(who.site)
                log.info("run=%s site=%s left epoch=%d", who.run, who.site, run.state.epoch)
        return Done()

    def beat(self, request: Beat) -> News:
        """A sign of life."""
        run, member = self._caller(request.caller)
        run.leases.renew(member.site, self._clock())
        run.reports[member.site] = request.report
        if request.promise is not None:
            self._put(run, membership.promise(run.state, member, request.promise))
        return self._news(run)

    def doubt(self, who: Caller) -> None:
        """The standing stream of a site has broken."""
        run = self.runs.get(who.run)
        member = run.state.find(who.site) if run is not None else None
        if run is not None and member is not None and member.boot == who.boot:
            run.leases.doubt(who.site, self._clock())

    def news(self, who: Caller) -> tuple[int, News]:
        """For the standing stream: the version, and what a site is told."""
        run, _ = self._caller(who)
        return run.version, self._news(run)

    def synced(self, request: Synced) -> Roster:
        """See `membership.synced`."""
        run, member = self._caller(request.caller)
        self._put(run, membership.synced(run.state, request))
        log.info("run=%s site=%s in sync round=%d donor=%s", request.caller.run, member.site, request.have.round, request.donor)
        return run.state.roster()

    def tick(self) -> None:
        """To be called several times a lease: leases and deadlines that are over."""
        now_s = self._clock()
        for name, run in self.runs.items():
            over = run.leases.tick(now_s)
            try:
                if over:
                    self._put(run, membership.expire(run.state, over))
                    log.warning("run=%s sites=%s expired epoch=%d", name, ",".join(over), run.state.epoch)
                self._decide(run)
            except Refused as error:  # the disk: nothing has changed, and it is tried again
                for site in over:
                    run.leases.renew(site, now_s - run.timeouts.lease)
                log.error("run=%s %s", name, error)

    # ---- rounds

    def propose(self, request: Propose) -> Verdict:
        """The commit of the round; or, for now, what is missing."""
        run, member = self._caller(request.caller)
        if member.standing != "synced":
            raise Refused("not_in_sync", f"site {member.site} is not in sync: it takes part from the round that follows its healing")
        place, now_s = (request.round, request.fragment), self._clock()
        if (commit := self._commit(run, place)) is None:
            run.book.add(run.state, member.seat, request, now_s)
            run.began_s.setdefault(place, now_s)
            run.deadline.arrived(now_s - run.began_s[place])
            self._decide(run)
            commit = self._commit(run, place)
        elif place in run.began_s and (place, member.seat) not in run.late and member.seat not in {share.seat for share in commit.took}:
            run.deadline.arrived(now_s - run.began_s[place])
            self._count_late(run, place, member.seat)
        if commit is not None:
            return answer(commit, member.seat)
        if request.round > run.state.next_round:
            return Verdict(commit=None, why=f"round {run.state.next_round} is not committed yet")
        return Verdict(commit=None, why=run.book.decide(run.state, place, over=False).why)

    def hand_in(self, request: HandIn) -> Done:
        """Commits from the time without the coordinator. They count; of one here that nobody has built on, theirs takes the place."""
        run, member = self._caller(request.caller)
        spec = run.state.spec
        if spec.without != "elect":
            raise Refused(
                "conflict", f"run {spec.run} waits for its coordinator (without = {spec.without!r}): nobody else commits its rounds"
            )
        for commit in sorted(request.commits, key=lambda c: (c.round, c.fragment)):
            here = self._commit(run, (commit.round, commit.fragment))
            if here is not None and here.took == commit.took:
                continue
            text = f"round {commit.round}, handed in by site {member.site}"
            if commit.generation != run.state.generation:
                raise Refused("conflict", f"{text}: of generation {commit.generation}, the run is in {run.state.generation}")
            if here is not None and commit.round != run.state.newest:
                raise Refused("conflict", f"{text}: it has another commit, on which others have built; the site needs the state of a donor")
            if (
                commit.round > run.state.next_round
                or commit.round < max(run.state.founded or 0, run.state.next_round - 1)
                or member.seat not in commit.present
            ):
                raise Refused("conflict", f"{text}: the run is in round {run.state.next_round}")
            new = membership.taken_over(membership.committed(run.state, commit), commit, member.seat).revised()
            with self._db.change():
                self._db.replace_commit(spec.run, commit)
                self._db.put(new)
            run.book.close((commit.round, commit.fragment))
            self._assign(run, new.counting("replaced" if here is not None else "handed_in"))
            log.info("run=%s round=%d handed in by site=%s", spec.run, commit.round, member.site)
        return Done()

    def _commit(self, run: Run, place: Place) -> Commit | None:
        return self._db.commit(run.state.spec.run, run.state.generation, *place)

    def _decide(self, run: Run) -> None:
        """Commits what can be, rounds rising."""
        for place in run.book.places:
            if place[0] > run.state.next_round:
                return
            waited_s = run.book.waited_s(place, self._clock())
            verdict = run.book.decide(run.state, place, over=waited_s >= run.deadline.seconds)
            if (commit := verdict.commit) is None:
                continue
            new = membership.committed(run.state, commit).revised()
            with self._db.change():
                self._db.put_commit(new.spec.run, commit)
                self._db.put(new)
            took = {share.seat for share in commit.took}
            for seat in sorted(run.book.close(place).keys() - took if took else ()):
                self._count_late(run, place, seat)
            for _ in sorted(run.state.synced - took if took else ()):
                run.deadline.missed(waited_s)
            for old in sorted(run.began_s)[:-_KEPT_PLACES]:
                del run.began_s[old]
            self._assign(run, new)
            log.info("run=%s round=%d fragment=%d committed sites=%d %s", new.spec.run, *place, len(took), verdict.why)

    def _count_late(self, run: Run, place: Place, seat: int) -> None:
        run.late.append((place, seat))
        run.state = run.state.counting("late")  # on disk with the next change: a count is not worth a write of its own

    # ---- keys and plans

    def set(self, request: Set) -> Done:
        """Sets a key of the run."""
        run, _ = self._caller(request.caller)
        self._db.set(run.state.spec.run, request.key, request.value)
        self._on_change(run.state.spec.run)
        return Done()

    def get(self, request: Get) -> Values:
        """The values of keys, if all are set."""
        run, _ = self._caller(request.caller)
        values = []
        for key in request.keys:
            if (value := self._db.value(run.state.spec.run, key)) is None:
                return Values(found=False)
            values.append(value)
        return Values(found=True, values=tuple(values) if request.values else ())

    def publish(self, request: Publish) -> PlanReply:
        """The plan of that version: this one, unless another site was first."""
        run, member = self._caller(request.caller)
        if member.standing != "synced":
            raise Refused("not_in_sync", f"site {member.site} is not in sync: it cannot plan for the others")
        if request.plan.version == run.plan + 1:
            with self._db.change():
                self._db.put_plan(run.state.spec.run, request.plan)
            run.plan += 1
            self._tell(run)
        elif not 1 <= request.plan.version <= run.plan:
            raise Refused("stale", f"plan {request.plan.version} was published, the next one is {run.plan + 1}")
        return PlanReply(plan=self._db.plan(run.state.spec.run, request.plan.version))

    def plan(self, who: Caller) -> PlanReply:
        """The latest plan."""
        run, _ = self._caller(who)
        return PlanReply(plan=self._db.plan(run.state.spec.run))

    # ---- for people

    def status(self, request: Ask) -> Status:
        """One run, or all."""
        if request.run is not None and request.run not in self.runs:
            raise Refused("unknown", f"there is no run {request.run} here; there are: {', '.join(sorted(self.runs)) or 'none'}")
        return Status(runs=tuple(self._status(run) for name, run in sorted(self.runs.items()) if request.run in (None, name)))

    def _status(self, run: Run) -> RunStatus:
        state, now_s = run.state, self._clock()
        first = max((run.reports[m.site].round for m in state.living if m.site in run.reports), default=0)
        return RunStatus(
            run=state.spec.run,
            epoch=state.epoch,
            generation=state.generation,
            founded=state.founded,
            newest=state.newest,
            why=state.why,
            sites=tuple(self._site_status(run, m, first, now_s) for m in state.members),
            counts=dict(state.counts),
        )

    @staticmethod
    def _site_status(run: Run, member: Member, first: int, now_s: float) -> SiteStatus:
        report = run.reports.get(member.site)
        return SiteStatus(
            site=member.site,
            seat=member.seat,
            standing=member.standing,
            address=member.card.address,
            lease_s=run.leases.left_s(member.site, now_s),
            lag=None if report is None or member.standing == "out" else first - report.round,
            report=report,
        )

    # ---- state

    def _open(self, request: Join, now_s: float) -> Run:
        spec = request.spec
        if len(self.runs) >= MAX_RUNS:
            raise Refused("quota", f"the coordinator holds {len(self.runs)} runs: at most {MAX_RUNS}")
        try:
            membership.check_spec(spec)
        except BadInput as error:
            raise Refused("garbage", f"run {spec.run} cannot be: {error}") from error
        return Run(Membership(spec=spec, seed=secrets.randbits(62) if spec.seed is None else spec.seed), 0, now_s)

    def _caller(self, who: Caller) -> tuple[Run, Member]:
        run = self.runs.get(who.run)
        if run is None:
            raise Refused("unknown", f"there is no run {who.run} here")
        return run, membership.caller(run.state, who)

    def _news(self, run: Run) -> News:
        return News(roster=run.state.roster(), plan=run.plan, newest=run.state.newest)

    def _put(self, run: Run, new: Membership) -> None:
        """Makes a change of the members count: on disk, then here."""
        new = membership.found(new)
        if new == run.state:
            return
        new = new.revised()
        with self._db.change():
            self._db.put(new)
        if new.generation != run.state.generation:
            run.book.forget()
            run.began_s.clear()
            run.late.clear()
        self._assign(run, new)
        self._decide(run)

    def _assign(self, run: Run, new: Membership) -> None:
        run.state = new
        self._tell(run)

    def _tell(self, run: Run) -> None:
        run.version += 1
        self._on_change(run.state.spec.run)
