"""The coordinator: what it knows of its runs, and its answers. No network here (see service.py); the clock is given.

It is small on purpose. It holds who is in, the sessions of a run, its plans and a seed; no parameter ever passes through it. Each answer is
on disk before it is given, so a coordinator that is killed and started again goes on where it was: leases begin anew, proposals that were
open are made again by the sites, and nobody gets another answer than before.

Time goes first: whatever comes in, leases that are over are over before it counts. A coordinator that was stopped for a while drops what
was proposed before, since the sites may have gone on without it.

One thread (or event loop) calls it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from gossamer.core.errors import BadInput
from gossamer.wan.deadlines import Deadline, Timeouts
from gossamer.wan.roster import membership
from gossamer.wan.roster.differing import differences
from gossamer.wan.roster.ended import ended
from gossamer.wan.roster.leases import Leases
from gossamer.wan.roster.ledgerdb import LedgerDB
from gossamer.wan.roster.membership import Membership
from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.opening import Book
from gossamer.wan.roster.records import (
    PROTOCOL,
    Admission,
    Ask,
    Beat,
    Caller,
    Done,
    Forget,
    HandIn,
    Join,
    Member,
    News,
    PlanReply,
    Propose,
    Publish,
    Report,
    RunStatus,
    Status,
    Verdict,
)
from gossamer.wan.roster.standing import run_status

log = logging.getLogger(__name__)

MAX_RUNS = 256
_TOLD_SESSIONS = 8
"""So many of the last sessions are told to people."""


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
        self.heard_s: dict[str, float] = {}
        """When."""
        self.waiting: tuple[int, ...] = ()
        self.why = ""
        self.asked: set[int] = set()
        """Seats whose arrival in the opening that is under way has been seen."""
        self.opened: tuple[int, float] | None = None
        """The latest session, and since when it had been asked for."""
        self.late: set[int] = set()
        """Seats that were late for it."""
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
            number = state.session.number if state.session is not None else 0
            log.info("run=%s taken up epoch=%d sites=%d session=%d", state.spec.run, state.epoch, len(state.living), number)

    # ---- membership

    def join(self, request: Join) -> Admission:
        """See `membership.join`. The first site of a run opens it."""
        if request.protocol != PROTOCOL:
            raise Refused("foreign", f"the site speaks protocol {request.protocol}, the coordinator {PROTOCOL}: use one release")
        who, site = request.caller, request.caller.site
        if request.spec.run != who.run:
            raise Refused("garbage", f"site {site} joins run {who.run} with the description of {request.spec.run}")
        now_s, run = self._clock(), self.runs.get(who.run)
        if run is not None:
            self._pass_time(run)
            if run.state.session is None and not run.state.living and differences(run.state.spec, request.spec):
                log.info("run=%s never began and has nobody: site=%s describes it anew", who.run, site)
                run = None
        run = run or self._open(request, now_s)
        old = run.state.find(site)
        new = membership.join(run.state, request)
        if old is not None and old.there and old.boot != who.boot and not request.take_over:
            membership.check_place(old, who, run.leases.holder(site, old.boot, who.boot, now_s), run.timeouts.beat)
        if new is not run.state and (wait_s := run.leases.retry_s(site, now_s)) > 0:
            raise Refused("flapping", f"site {site} has joined too often of late: it may again in {wait_s:.1f} s", wait_s)
        self._put(run, new)
        if old is None or old.boot != who.boot:
            run.reports.pop(site, None)  # of the process before; now that this one is in
        run.leases.renew(site, now_s)
        self.runs[who.run] = run
        member = membership.caller(run.state, who)
        log.info("run=%s site=%s joined seat=%d standing=%s epoch=%d", who.run, site, member.seat, member.standing, run.state.epoch)
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
        run.reports[member.site], run.heard_s[member.site] = request.report, self._clock()
        self._put(run, membership.entered(run.state, member, request.entered))
        return self._news(run)

    def doubt(self, who: Caller) -> None:
        """The standing stream of a site has broken."""
        if (found := self._known(who)) is not None:
            found[0].leases.doubt(who.site, self._clock())

    def expel(self, who: Caller, why: str) -> None:
        """The certificate with which a site has called is not good any more: it is out."""
        if (found := self._known(who)) is not None and found[1].there:
            run = found[0]
            self._put(run, membership.expire(run.state, [who.site], why.partition(": ")[0]))
            run.leases.drop(who.site)
            log.warning("run=%s site=%s is out epoch=%d: %s", who.run, who.site, run.state.epoch, why)

    def news(self, who: Caller) -> tuple[int, News]:
        """For the standing stream: the version, and what a site is told."""
        run, _ = self._caller(who)
        return run.version, self._news(run)

    def tick(self) -> None:
        """To be called several times a lease: leases and deadlines that are over."""
        for name, run in self.runs.items():
            try:
                self._pass_time(run)
                self._decide(run)
            except Refused as error:  # the disk: nothing has changed, and it is tried again
                log.error("run=%s %s", name, error)

    # ---- sessions

    def propose(self, request: Propose) -> Verdict:
        """The session that is asked for, if it can open, or is open; or, for now, what is missing."""
        run, member = self._caller(request.caller)
        self._put(run, membership.entered(run.state, member, request.entered))
        last, now_s = run.state.session, self._clock()
        if last is None or request.number > last.number:
            run.book.add(run.state, member, request, now_s)
            if member.inside and member.seat not in run.asked:
                run.asked.add(member.seat)
                since_s = run.book.since_s(run.state)
                run.deadline.arrived(now_s - since_s if since_s is not None else 0.0)
            self._decide(run)
        return self.verdict(request)

    def verdict(self, request: Propose) -> Verdict:
        """The answer to what was proposed before."""
        run, member = self._caller(request.caller)
        last = run.state.session
        if last is None or request.number > last.number:
            return Verdict(session=None, why=run.why)
        late = not last.has(member.seat, member.boot) or not member.inside
        if late and run.opened is not None and run.opened[0] == last.number:
            if member.seat not in run.late:  # nobody waited for it; a count is not worth a write of its own: on disk with the next change
                run.late.add(member.seat)
                run.state = run.state.counting("late")
            if member.seat not in run.asked:
                run.asked.add(member.seat)
                run.deadline.arrived(self._clock() - run.opened[1])
        return Verdict(session=last, late=late)

    def hand_in(self, request: HandIn) -> Done:
        """See `membership.handed_in`."""
        run, member = self._caller(request.caller)
        name, session = run.state.spec.run, request.session
        last = run.state.session
        if last is not None and session.number < last.number and self._db.session(name, session.number) == session:
            return Done()
        new = membership.handed_in(run.state, member, session)
        if new is run.state or new.session == last:
            self._put(run, new)
            return Done()
        new = new.revised()
        with self._db.change():
            self._db.put_session(name, session)
            self._db.put(new)
        self._begin(run, new, None)
        log.info("run=%s session=%d handed in by site=%s", name, session.number, member.site)
        return Done()

    def _decide(self, run: Run) -> None:
        """Opens the next session, if that can be."""
        now_s, since_s = self._clock(), run.book.since_s(run.state)
        waited_s = now_s - since_s if since_s is not None else 0.0
        opening = run.book.decide(run.state, over=waited_s >= run.deadline.seconds)
        if (session := opening.session) is None:
            if (waiting := run.book.waiting(run.state), opening.why) != (run.waiting, run.why):
                run.waiting, run.why = waiting, opening.why
                self._tell(run)
            return
        for _ in sorted(opening.late - run.asked):
            run.deadline.missed(waited_s)
        new = membership.opened(run.state, session, opening.held)
        if opening.lost:
            new = new.model_copy(update={"lost": True})
        if opening.late:
            new = new.counting("late", len(opening.late))
        if opening.diverged:
            new = new.counting("diverged", len(opening.diverged))
            log.error(
                "run=%s sites=%s hold another state after %d rounds than the others, and heal",
                new.spec.run,
                new.names(opening.diverged),
                session.round,
            )
        new = new.revised()
        with self._db.change():
            self._db.put_session(new.spec.run, session)
            self._db.put(new)
        self._begin(run, new, since_s)
        run.late = set(opening.late)
        log.info("run=%s session=%d round=%d sites=%s", new.spec.run, session.number, session.round, new.names(session.members))

    def _begin(self, run: Run, new: Membership, since_s: float | None) -> None:
        run.book.forget()
        run.asked.clear()
        run.late.clear()
        run.waiting, run.why = (), ""
        run.opened = (new.session.number, since_s) if new.session is not None and since_s is not None else None
        self._assign(run, new)

    # ---- plans

    def publish(self, request: Publish) -> PlanReply:
        """The plan of that version: this one, unless another site was first."""
        run, member = self._caller(request.caller)
        if not member.inside:
            raise Refused("not_in_sync", f"site {member.site} is in no session: it cannot plan for the others")
        if request.plan.version == run.plan + 1:
            end = ended(member.site, request.plan.body, request.plan.since)
            new = run.state.model_copy(update={"ended": end}).revised() if end is not None else run.state
            with self._db.change():
                self._db.put_plan(run.state.spec.run, request.plan)
                self._db.put(new)  # with counts that are not on disk yet
            run.plan, run.state = run.plan + 1, new
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
        return run_status(run, self._db.sessions(run.state.spec.run, _TOLD_SESSIONS), self._clock())

    def forget(self, request: Forget, who: str | None) -> Done:
        """A run that has nobody, or a site of a run that is not there, as somebody asks who looks after it."""
        run = self.runs.get(request.run)
        if run is None:
            raise Refused("unknown", f"there is no run {request.run} here; there are: {', '.join(sorted(self.runs))[:800] or 'none'}")
        self._pass_time(run)
        if request.site is not None:
            self._put(run, membership.forget(run.state, request.site))
            run.reports.pop(request.site, None)
        elif living := run.state.living:
            names = ", ".join(m.site for m in living)[:800]
            raise Refused(
                "conflict", f"run {request.run} has sites that are there: {names}. Stop them first; it is forgotten when all are out"
            )
        else:
            with self._db.change():
                self._db.forget(request.run)
            del self.runs[request.run]
        log.warning("run=%s site=%s forgotten by=%s", request.run, request.site or "-", who or "-")
        return Done()

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

    def _known(self, who: Caller) -> tuple[Run, Member] | None:
        """Its run and the member that it is, there or not; None: another process of its site is, or none."""
        run = self.runs.get(who.run)
        member = run.state.find(who.site) if run is not None else None
        return None if run is None or member is None or member.boot != who.boot else (run, member)

    def _caller(self, who: Caller) -> tuple[Run, Member]:
        run = self.runs.get(who.run)
        if run is None:
            raise Refused("unknown", f"there is no run {who.run} here")
        self._pass_time(run)
        return run, membership.caller(run.state, who)

    def _pass_time(self, run: Run) -> None:
        """Leases that are over."""
        now_s = self._clock()
        if run.leases.slept(now_s):
            run.book.forget()
        over = run.leases.tick(now_s)
        if not over:
            return
        try:
            self._put(run, membership.expire(run.state, over))
        except Refused:
            for site in over:
                run.leases.renew(site, now_s - run.timeouts.lease)
            raise
        log.warning("run=%s sites=%s expired epoch=%d", run.state.spec.run, ",".join(over), run.state.epoch)

    def _news(self, run: Run) -> News:
        return News(roster=run.state.roster(), plan=run.plan, waiting=run.waiting, why=run.why[:1024])

    def _put(self, run: Run, new: Membership) -> None:
        """Makes a change of the members count: on disk, then here."""
        if new == run.state:
            return
        new = new.revised()
        with self._db.change():
            self._db.put(new)
        run.book.drop(m.seat for m in new.members if not m.there)
        self._assign(run, new)
        self._decide(run)

    def _assign(self, run: Run, new: Membership) -> None:
        run.state = new
        self._tell(run)

    def _tell(self, run: Run) -> None:
        run.version += 1
        self._on_change(run.state.spec.run)
