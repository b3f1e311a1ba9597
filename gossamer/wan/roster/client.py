"""A site's side of the coordinator: joins, shows signs of life, hears the news, and gets along while the coordinator is away.

    client = CoordinatorClient(dial.channel, spec, "oslo", Card(address="203.0.113.5:7400"))
    client.join(timeout_s=60)
    sessions = Sessions(client, ...)  # gossamer.wan.roster.sessions

Two threads: one beats, one holds the standing stream. When the coordinator does not answer they try again, first soon, then every beat, at
random moments so that not all sites come at once; `away_s` says since when, and `roster` stays the last one that was heard. A site whose
lease has run out joins again by itself, and is still in its session if that goes on. The coordinator is told of the session that this site
has entered whenever it knows of none, or of an older one. Every request may be made twice without harm, and is, until its time is over."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import grpc

from gossamer.core.errors import RunFailed
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.roster.calls import Away, Calls, Channel
from gossamer.wan.roster.membership import check_spec
from gossamer.wan.roster.messages import Record, Refused, unpack
from gossamer.wan.roster.records import (
    PROTOCOL,
    Admission,
    Ask,
    Beat,
    Caller,
    Card,
    Done,
    HandIn,
    Join,
    News,
    Plan,
    PlanReply,
    Propose,
    Publish,
    Report,
    Roster,
    Session,
    Spec,
    Status,
    Verdict,
)

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
Kind: TypeAlias = Literal["away", "back", "roster", "waiting", "plan", "expired", "rejoined", "astray", "refused"]


class Event(NamedTuple):
    """Something that happened to a client; told in one of its threads, which must not be held up."""

    kind: Kind
    text: str


class CoordinatorClient:
    """One site of one run.

    Args:
        channel: makes the connection.
        bootstrap: begin from this site's state, whoever else is missing.
        take_over: come in place of another process of this site, though that one is there.
        on_event: told what happens.

    Raises:
        BadInput: the run is one that cannot be.
    """

    def __init__(
        self,
        channel: Channel,
        spec: Spec,
        site: str,
        card: Card,
        *,
        bootstrap: bool = False,
        take_over: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        check_spec(spec)
        self.spec = spec
        self.timeouts = Timeouts.of(spec.floor_s, lease_s=spec.lease_s)
        self.caller = Caller(run=spec.run, site=site, boot=secrets.token_hex(16))
        self.seat = self.seed = -1
        """Known once joined."""
        self.failure: RunFailed | None = None
        """Why this client has given up: another process of its site has joined, or the run is another one now."""
        self.on_failure: Callable[[RunFailed], None] = lambda error: None
        """Told of it, in a thread of this client."""
        self.stands = False
        """Whether the standing stream brings news."""
        self.session: Session | None = None
        """The one that this site has entered."""
        self.astray: Refused | None = None
        """Why that one does not count: the run has gone another way, and this site needs the state of a donor."""
        self._card, self._bootstrap, self._take_over, self._on_event = card, bootstrap, take_over, on_event
        self._changed = threading.Condition()
        self._news: News | None = None
        self._report, self._reported_s = Report(), time.monotonic()
        self._over = threading.Event()
        self._hurry = threading.Event()
        self._rejoining, self._handing = threading.Lock(), threading.Lock()
        self._admissions = 0
        self._watching: Any = None
        self._calls = Calls(channel, self.timeouts, on_lost=self._lost, on_back=self._back)
        self._threads = [threading.Thread(target=f, name=f"wan-{f.__name__}", daemon=True) for f in (self._beats, self._stands)]

    # ---- being there

    def join(self, timeout_s: float) -> Roster:
        """Joins the run and stays in it.

        Raises:
            Refused: the coordinator does not want this site; the message says why.
            Away: it did not answer.
        """
        admission = self._calls.request("Join", self._join_request(), Admission, timeout_s)
        self._admitted(admission)
        for thread in self._threads:
            thread.start()
        return admission.roster

    @property
    def roster(self) -> Roster:
        """The last one that was heard."""
        return self.news.roster

    @property
    def news(self) -> News:
        """The last ones."""
        if self._news is None:
            raise RunFailed(f"site {self.caller.site} has not joined run {self.spec.run} yet")
        return self._news

    @property
    def waiting(self) -> tuple[int, ...]:
        """Other sites that ask for the next session, and could be let in."""
        return tuple(seat for seat in self.news.waiting if seat != self.seat)

    @property
    def away_s(self) -> float | None:
        """For how long the coordinator has not answered; None: it answers."""
        return self._calls.away_s

    @property
    def there(self) -> bool:
        """Whether the coordinator answers, and has let this site in."""
        return self._news is not None and self._calls.away_s is None

    def wait_for(self, wanted: Callable[[Roster], bool], timeout_s: float) -> Roster:
        """The first roster that is as wanted.

        Raises:
            RunFailed: none has come in time, with what the run waits for; or this site is refused.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not wanted(self.roster):
                self._check()
                if (left_s := until_s - time.monotonic()) <= 0:
                    away = f"the coordinator is away for {self.away_s:.1f} s" if self.away_s is not None else "the coordinator is there"
                    raise RunFailed(
                        f"site {self.caller.site} has waited {timeout_s:.0f} s for run {self.spec.run} ({away}): {self.news.why}"
                    )
                self._changed.wait(min(left_s, 1.0))
            return self.roster

    def report(self, report: Report) -> None:
        """What the next beats say."""
        self._report, self._reported_s = report, time.monotonic()

    def enter(self, session: Session) -> None:
        """This site has entered a session, with all of its members. The coordinator is told at once, and whenever it does not know."""
        self.session, self.astray, self._bootstrap = session, None, False
        self._hurry.set()

    def leave(self, timeout_s: float = 2.0) -> None:
        """Leaves the run; then closes. Where the coordinator does not answer, the lease runs out."""
        self._over.set()
        with suppress(RunFailed):
            self._calls.once("Beat", self._beat(), News, timeout_s / 2)  # what it has told since the last one
        with suppress(RunFailed):
            self._calls.request("Leave", self.caller, Done, timeout_s)
        self.close()

    def close(self) -> None:
        """Closes the connection without a word: as if the process had died."""
        self._over.set()
        self._hurry.set()
        if self._watching is not None:
            self._watching.cancel()
        self._calls.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2.0)

    # ---- sessions and plans

    def propose(self, proposal: Propose, timeout_s: float) -> Verdict:
        """The session that is asked for; without one after `proposal.wait_s`, what is missing.

        Raises:
            Refused: flapping, superseded, conflict.
            Away: the coordinator did not answer within `timeout_s`.
        """
        return self._ask("Propose", proposal, Verdict, timeout_s, proposal.wait_s)

    def hand_in(self, timeout_s: float) -> None:
        """Tells the coordinator of the session that this site has entered, if it does not know of that one.

        Raises:
            Away: it did not answer.
        """
        with self._handing:
            mine, theirs = self.session, self.roster.session
            if mine is None or self.astray is not None or (theirs is not None and (theirs == mine or theirs.number > mine.number)):
                return
            try:
                self._ask("HandIn", HandIn(caller=self.caller, session=mine), Done, timeout_s)
            except Refused as error:
                if error.code not in ("conflict", "garbage"):
                    raise
                self.astray = error
                self._tell("astray", str(error))

    def publish(self, plan: Plan, timeout_s: float) -> Plan | None:
        """The plan of that version: this one, unless another site was first."""
        return self._ask("Publish", Publish(caller=self.caller, plan=plan), PlanReply, timeout_s).plan

    def plan(self, timeout_s: float) -> Plan | None:
        """The latest plan."""
        return self._ask("Plan", self.caller, PlanReply, timeout_s).plan

    def status(self, timeout_s: float) -> Status:
        """Of this run."""
        return self._ask("Status", Ask(run=self.spec.run), Status, timeout_s)

    def _ask(self, method: str, request: Record, kind: type[R], timeout_s: float, wait_s: float = 0.0) -> R:
        """The answer to a member. One that is out joins again first."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._check()
            seen = self._admissions
            try:
                return self._calls.request(method, request, kind, max(0.001, until_s - time.monotonic()), wait_s)
            except Refused as error:
                if error.code not in ("expired", "unknown") or time.monotonic() > until_s:
                    raise
                self._rejoin(seen)

    # ---- the two threads

    def _beats(self) -> None:
        attempt = 0
        while not self._over.is_set():
            seen = self._admissions
            try:
                self._heard(self._calls.once("Beat", self._beat(), News, self.timeouts.call))
                self.hand_in(self.timeouts.call)
                attempt, pause_s = 0, self.timeouts.beat
            except Away:
                pause_s, attempt = self._calls.pause_s(attempt), attempt + 1
            except Refused as error:
                pause_s = self._calls.pause_s(attempt)
                self._refused(error, seen)
            except RunFailed as error:
                self._give_up(error)
            if self.failure is not None or self._over.is_set():
                return
            self._hurry.wait(pause_s)
            self._hurry.clear()

    def _beat(self) -> Beat:
        """The last report, since which some time has passed."""
        report, since_s = self._report, time.monotonic() - self._reported_s
        if report.exchange_s is not None:
            report = report.model_copy(update={"exchange_s": report.exchange_s + since_s})
        entered = self.session.key if self.session is not None and self.astray is None else None
        return Beat(caller=self.caller, report=report, entered=entered)

    def _stands(self) -> None:
        attempt = 0
        while not self._over.is_set() and self.failure is None:
            try:
                self._watching = self._calls.stream("Watch", self.caller)
                for data in self._watching:
                    self._calls.reached()
                    self.stands = True
                    self._heard(unpack(News, data))
                    attempt = 0
                    if self._over.is_set():
                        return
            except (grpc.RpcError, ValueError, RunFailed) as error:
                log.debug("run=%s the standing stream broke: %s", self.spec.run, error)
            if self.stands:
                self.stands = False
                self._hurry.set()  # whether the coordinator answers is known at once
            self._over.wait(self._calls.pause_s(attempt))
            attempt += 1

    def _refused(self, error: Refused, seen: int) -> None:
        """A beat was refused: the site joins again, or gives up."""
        if error.code not in ("expired", "unknown"):
            if error.refusal.retry_s is None:
                self._give_up(error)
            return
        try:
            self._rejoin(seen)
        except Away:
            return
        except Refused as again:
            if again.refusal.retry_s is None:
                self._give_up(again)
            else:
                self._over.wait(again.refusal.retry_s)

    def _rejoin(self, seen: int) -> None:
        """Joins again, unless that has happened since `seen` admissions."""
        with self._rejoining:
            if seen != self._admissions or self._over.is_set():
                return
            self._tell("expired", f"site {self.caller.site} is out of run {self.spec.run}: it joins again")
            self._admitted(self._calls.once("Join", self._join_request(), Admission, self.timeouts.call))
            self._tell("rejoined", f"site {self.caller.site} is in run {self.spec.run} again")

    def _join_request(self) -> Join:
        seat = self.seat if self.seat >= 0 else None
        return Join(
            protocol=PROTOCOL,
            spec=self.spec,
            caller=self.caller,
            card=self._card,
            seat=seat,
            bootstrap=self._bootstrap,
            take_over=self._take_over,
        )

    def _admitted(self, admission: Admission) -> None:
        with self._changed:
            if self._admissions and admission.seat != self.seat:
                raise RunFailed(f"seat {self.seat} of site {self.caller.site} belongs to another site now: start it again")
            self._admissions += 1
            self._take_over, self._calls.admitted = False, True
            self.seat, self.seed = admission.seat, admission.seed
            self._news = News(roster=admission.roster, plan=self._news.plan if self._news else 0, waiting=(), why="")
            self._changed.notify_all()

    def _heard(self, news: News) -> None:
        with self._changed:
            old = self._news
            if old is None or news.roster.revision < old.roster.revision:
                return  # answers may overtake each other
            self._news = news if news.plan >= old.plan else news.model_copy(update={"plan": old.plan})
            self._changed.notify_all()
        if news.roster != old.roster:
            self._tell("roster", f"epoch {news.roster.epoch}, {len(news.roster.living)} sites, {len(news.roster.inside)} in the session")
        if news.waiting != old.waiting and (waiting := self.waiting):
            self._tell("waiting", f"seats {', '.join(map(str, waiting))} ask for the next session")
        if news.plan > old.plan:
            self._tell("plan", f"plan {news.plan}")

    # ---- there and away

    def _back(self, away_s: float) -> None:
        with self._changed:
            self._changed.notify_all()
        self._tell("back", f"the coordinator of run {self.spec.run} answers again, after {away_s:.1f} s")

    def _lost(self, why: str) -> None:
        self._tell("away", f"the coordinator of run {self.spec.run} does not answer ({why})")

    def _give_up(self, error: RunFailed) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self.on_failure(error)
        self._tell("refused", str(error))

    def _check(self) -> None:
        if self._over.is_set():
            raise RunFailed(f"site {self.caller.site} has left run {self.spec.run}")
        if self.failure is not None:
            raise RunFailed(f"site {self.caller.site} is out of run {self.spec.run}: {self.failure}") from self.failure

    def _tell(self, kind: Kind, text: str) -> None:
        quiet = {"roster": logging.DEBUG, "waiting": logging.DEBUG, "plan": logging.DEBUG, "rejoined": logging.INFO}
        log.log(quiet.get(kind, logging.WARNING), "%s", text)
        self._on_event(Event(kind, text))
