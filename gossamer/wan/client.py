"""A site's side of the coordinator: joins, shows signs of life, hears the news, and gets along while the coordinator is away.

    client = CoordinatorClient(dial.channel, spec, "oslo", Card(address="203.0.113.5:7400"), have=Have(round=0, digest=x0))
    client.join(timeout_s=60)
    roster = client.wait_for(lambda roster: roster.founded is not None, timeout_s=600)

Two threads: one beats, one holds the standing stream. When the coordinator does not answer they try again, first soon, then every beat, at
random moments so that not all sites come at once; `away_s` says since when, and `roster` stays the last one that was heard. A site whose
lease has run out joins again by itself, as one that must heal. Every request may be made twice without harm, and is, until its time is
over."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import grpc

from gossamer.core.errors import RunFailed
from gossamer.wan.calls import Away, Calls, Channel
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.membership import check_spec
from gossamer.wan.messages import Record, Refused, unpack
from gossamer.wan.records import (
    PROTOCOL,
    Admission,
    Ask,
    Beat,
    Caller,
    Card,
    Commit,
    Done,
    Get,
    HandIn,
    Have,
    Join,
    News,
    Plan,
    PlanReply,
    Promise,
    Propose,
    Publish,
    Report,
    Roster,
    Set,
    Share,
    Spec,
    Status,
    Synced,
    Values,
    Verdict,
)
from gossamer.wan.service import MAX_WAIT_S

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
Kind: TypeAlias = Literal["away", "back", "roster", "plan", "expired", "rejoined", "refused"]


class Event(NamedTuple):
    """Something that happened to a client; told in one of its threads, which must not be held up."""

    kind: Kind
    text: str


class CoordinatorClient:
    """One site of one run.

    Args:
        channel: makes the connection.
        have: the state that this site holds; None: it needs a donor's.
        bootstrap: begin from this site's state, alone if need be.
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
        have: Have | None,
        bootstrap: bool = False,
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
        self.stands = False
        """Whether the standing stream brings news."""
        self._card, self._have, self._bootstrap, self._on_event = card, have, bootstrap, on_event
        self._changed = threading.Condition()
        self._news: News | None = None
        self._report = Report()
        self._promise: Promise | None = None
        self._over = threading.Event()
        self._hurry = threading.Event()
        self._rejoining = threading.Lock()
        self._admissions = 0
        self._watching: Any = None
        self._calls = Calls(channel, self.timeouts, on_lost=self._lost, on_back=self._back)
        self.when_back: list[Callable[[], None]] = []
        """Called when the coordinator is back, in a thread that must not be held up."""
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
    def away_s(self) -> float | None:
        """For how long the coordinator has not answered; None: it answers."""
        return self._calls.away_s

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
                        f"site {self.caller.site} has waited {timeout_s:.0f} s for run {self.spec.run} ({away}): {self.roster.why}"
                    )
                self._changed.wait(min(left_s, 1.0))
            return self.roster

    def report(self, report: Report, have: Have | None = None) -> None:
        """What the next beats say; and the state that this site now holds, should it have to join again."""
        self._report = report
        if have is not None:
            self._have = have

    def promise(self, epoch: int, first: int) -> None:
        """This site enters no round from `first` on before it knows the turn of `epoch` or a later one. Said at once and until it is so."""
        self._promise = Promise(epoch=epoch, first=first)
        self._hurry.set()

    def synced(self, have: Have, donor: str | None, timeout_s: float) -> Roster:
        """This site has got the state of `donor`, or (gossip) goes on with its own.

        Raises:
            Refused: not_in_sync, or stale: the fleet has gone on meanwhile.
        """
        self._have = have
        roster = self._ask("Synced", Synced(caller=self.caller, have=have, donor=donor), Roster, timeout_s)
        self._heard(News(roster=roster, plan=self.news.plan, newest=self.news.newest))
        return roster

    def leave(self, timeout_s: float = 2.0) -> None:
        """Leaves the run; then closes. Where the coordinator does not answer, the lease runs out."""
        self._over.set()
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

    # ---- rounds, plans, keys

    def propose(self, round: int, took: Sequence[Share], *, fragment: int = 0, gone: Sequence[int] = (), timeout_s: float) -> Verdict:
        """Who took part in a round, as all sites are told. Without a commit after `timeout_s`, the verdict says what is missing.

        Raises:
            Refused: not_in_sync, expired, stale.
            Away: the coordinator did not answer.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(MAX_WAIT_S, until_s - time.monotonic()))
            request = Propose(caller=self.caller, round=round, fragment=fragment, took=tuple(took), gone=tuple(gone), wait_s=wait_s)
            verdict = self._ask("Propose", request, Verdict, until_s - time.monotonic(), wait_s)
            if verdict.commit is not None or time.monotonic() >= until_s:
                return verdict

    def hand_in(self, commits: Sequence[Commit], timeout_s: float) -> None:
        """Commits that were made without the coordinator.

        Raises:
            Refused: conflict: the fleet fell in two, and this site is on the other side.
        """
        self._ask("HandIn", HandIn(caller=self.caller, commits=tuple(commits)), Done, timeout_s)

    def publish(self, plan: Plan, timeout_s: float) -> Plan | None:
        """The plan of that version: this one, unless another site was first."""
        return self._ask("Publish", Publish(caller=self.caller, plan=plan), PlanReply, timeout_s).plan

    def plan(self, timeout_s: float) -> Plan | None:
        """The latest plan."""
        return self._ask("Plan", self.caller, PlanReply, timeout_s).plan

    def set(self, key: str, value: str, timeout_s: float) -> None:
        """Sets a key of the run."""
        self._ask("Set", Set(caller=self.caller, key=key, value=value), Done, timeout_s)

    def get(self, keys: Sequence[str], timeout_s: float, *, wait_s: float = 0.0, values: bool = True) -> Values:
        """The values of keys, if all are set or become so within `wait_s`; `timeout_s` more for an answer."""
        until_s = time.monotonic() + wait_s
        while True:
            once_s = max(0.0, min(MAX_WAIT_S, until_s - time.monotonic()))
            request = Get(caller=self.caller, keys=tuple(keys), wait_s=once_s, values=values)
            found = self._ask("Get", request, Values, timeout_s + once_s, once_s)
            if found.found or time.monotonic() >= until_s:
                return found

    def status(self, timeout_s: float) -> Status:
        """Of this run."""
        return self._ask("Status", Ask(run=self.spec.run), Status, timeout_s)

    def _ask(self, method: str, request: Record, kind: type[R], timeout_s: float, wait_s: float = 0.0) -> R:
        """The answer to a member. One that is out joins again first, where that makes no difference to what it asks."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._check()
            seen = self._admissions
            try:
                return self._calls.request(method, request, kind, max(0.001, until_s - time.monotonic()), wait_s)
            except Refused as error:
                if error.code not in ("expired", "unknown") or method not in ("Set", "Get", "Plan") or time.monotonic() > until_s:
                    raise
                self._rejoin(seen)

    # ---- the two threads

    def _beats(self) -> None:
        attempt = 0
        while not self._over.is_set():
            seen = self._admissions
            try:
                beat = Beat(caller=self.caller, report=self._report, promise=self._promise)
                self._heard(self._calls.once("Beat", beat, News, self.timeouts.call))
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
            self.stands = False
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
        return Join(protocol=PROTOCOL, spec=self.spec, caller=self.caller, card=self._card, have=self._have, bootstrap=self._bootstrap)

    def _admitted(self, admission: Admission) -> None:
        with self._changed:
            self._admissions += 1
            self.seat, self.seed = admission.seat, admission.seed
            news = self._news
            self._news = News(roster=admission.roster, plan=news.plan if news else 0, newest=news.newest if news else None)
            self._changed.notify_all()

    def _heard(self, news: News) -> None:
        with self._changed:
            old = self._news
            if old is None or news.roster.revision < old.roster.revision:
                return  # answers may overtake each other
            self._news = news if news.plan >= old.plan else news.model_copy(update={"plan": old.plan})
            if self._promise is not None and (turn := news.roster.turn) is not None and turn.epoch >= self._promise.epoch:
                self._promise = None
            self._changed.notify_all()
        if news.roster != old.roster:
            self._tell("roster", f"epoch {news.roster.epoch}, {len(news.roster.living)} sites, {len(news.roster.synced)} in sync")
        if news.plan > old.plan:
            self._tell("plan", f"plan {news.plan}")

    # ---- there and away

    def _back(self, away_s: float) -> None:
        with self._changed:
            self._changed.notify_all()
        self._tell("back", f"the coordinator of run {self.spec.run} is back after {away_s:.1f} s")
        for call in self.when_back:
            call()

    def _lost(self, why: str) -> None:
        self._tell("away", f"the coordinator of run {self.spec.run} does not answer ({why})")

    def _give_up(self, error: RunFailed) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self._tell("refused", str(error))

    def _check(self) -> None:
        if self._over.is_set():
            raise RunFailed(f"site {self.caller.site} has left run {self.spec.run}")
        if self.failure is not None:
            raise RunFailed(f"site {self.caller.site} is out of run {self.spec.run}: {self.failure}") from self.failure

    def _tell(self, kind: Kind, text: str) -> None:
        log.log(logging.DEBUG if kind in ("roster", "plan") else logging.WARNING, "%s", text)
        self._on_event(Event(kind, text))
