"""Sessions, as one site asks for them, with or without the coordinator.

    sessions = Sessions(client, alive=lambda: links.alive, gone=lambda: links.gone, ask=control.ask)
    session = sessions.open(Have(round=12, digest=hash, session=3), timeout_s=60)
    ...                       # the members of the session meet
    sessions.entered(session)  # and it counts

A session is a stretch of a run with fixed members. When one of them is lost (synchronous methods), leaves, or another site asks to be let
in, all open the next one. With `Spec.without = "elect"` (in gossip "go_on") a site stands in for a coordinator that is away: see
`gossamer.wan.roster.standin`. With "wait" the sites wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from gossamer.core.errors import RunFailed
from gossamer.wan.roster.calls import Away
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.messages import Refused, pack, unpack
from gossamer.wan.roster.records import MAX_BOUND, Elect, Have, Known, Propose, Session, Verdict
from gossamer.wan.roster.standin import StandIn

_HOLD_S = 0.25
"""The coordinator holds an answer back for so long; then the site says anew whom it reaches."""
_POLL_S = 0.05
_KEPT = 16
"""Sessions that are remembered."""


class NotYet(RunFailed):
    """No session has opened in time. The message says for whom, or for what, the run waits."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text)
        self.why = why
        """That alone; empty: nobody has said it yet."""


class GoneOn(RunFailed):
    """The run has gone on to another session."""


class Sessions:
    """The sessions of one site's run.

    Args:
        client: has joined the run.
        alive: seats that this site reaches now.
        gone: seats that it has lost, cannot reach, or does not wait for. Who is in neither is not known yet, and waited for, at most for
            the deadline.
        ask: sends bytes to a seat and returns its answer, what its `serve` made of them. Raises RunFailed when it cannot.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        *,
        alive: Callable[[], Iterable[int]],
        gone: Callable[[], Iterable[int]],
        ask: Callable[[int, bytes], bytes],
    ) -> None:
        self._client, self._alive, self._gone, self._ask = client, alive, gone, ask
        self._lock = threading.Lock()
        self._standin = StandIn(client.spec)
        self._bound: tuple[Session, ...] = ()
        self._keep: Callable[[tuple[Session, ...]], None] = lambda bound: None
        self._opened: Session | None = None
        """The last one that `open` gave; until this process asks for one, the latest of before."""
        self._asked = False
        """Whether this process has asked for a session."""
        self.missed = 0
        """Sessions that opened without this site, since it first asked for one."""
        self.on_missed: Callable[[], None] = lambda: None
        """Called at each of these."""
        self._seen: Session | None = None
        self._why = ""
        """What the next session waits for, as was said last."""
        self._known: dict[int, Session] = {}

    def remember(self, bound: Sequence[Session], keep: Callable[[tuple[Session, ...]], None]) -> None:
        """Before the first `open`: the sessions that an earlier process of this site was bound to, and where they are put."""
        self._bound, self._keep = tuple(bound), keep

    @property
    def latest(self) -> Session | None:
        """The newest that this site knows of."""
        with self._lock:
            self._look()
            return self._standin.known.latest

    @property
    def waiting(self) -> tuple[int, ...]:
        """Others that ask for the next session, and could be let in: as the coordinator says, or as they ask this site in its place."""
        if self._client.away_s is None:
            return self._client.waiting
        with self._lock:
            return tuple(seat for seat in self._standin.waiting(time.monotonic()) if seat != self._client.seat)

    def known(self, number: int) -> Session | None:
        """The session of that number, if it is one of the last that this site has heard of."""
        with self._lock:
            self._look()
            return self._known.get(number)

    def open(self, have: Have | None, *, timeout_s: float) -> Session:
        """Asks for the next session until there is one with this site in it. One that this gave before is not given again.

        Args:
            have: the state of this site; None: it takes a donor's.

        Raises:
            NotYet: not in time. To be called again.
            Refused: by the coordinator, for good.
            RunFailed: this site has left the run, or is out of it for good.
        """
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            session, said = self._step(have, left_s)
            if session is not None:
                self._why = ""
                return session
            self._why = said or self._why
        what = self._why or "nobody has answered"
        raise NotYet(f"run {self._client.spec.run}, no session within {timeout_s:.4g} s: {what}", self._why)

    def _step(self, have: Have | None, left_s: float) -> tuple[Session | None, str]:
        """Asks once. The session; or what is missing."""
        latest = self.latest
        if not self._asked:  # what has opened before this process asked for anything is not its own, whatever its site was in
            self._opened = latest
        if latest is not None and (found := self._mine(latest)) is not None:
            return found, ""
        verdict = self._propose(latest, have, left_s)
        session = verdict.session
        if session is None or verdict.late or not self._may_open(session):
            return None, verdict.why
        self._opened = session
        return session, ""

    def bind(self, session: Session) -> None:
        """All members of a session are connected to this site, which is about to tell them so. From now on any of them may have entered it:
        call this before, so that this site, or a later process of it, never helps to open another one as if nobody had.

        Raises:
            GoneOn: it is too late for that.
        """
        with self._lock:
            self._look()
            latest = self._standin.known.latest
            if latest is not None and latest != session and latest.number >= session.number:
                raise GoneOn(f"the run has gone on to session {latest.number}")
            since = self._standin.known.entered.number if self._standin.known.entered is not None else 0
            self._bound = (*(s for s in self._bound if s.number >= since and s != session), session)[-MAX_BOUND:]
            self._keep(self._bound)

    def entered(self, session: Session) -> None:
        """All members of a session have met here: it counts."""
        with self._lock:
            self._standin.learn(Known(latest=session, entered=session))
            self._bound = tuple(s for s in self._bound if s.number >= session.number)
            self._keep(self._bound)
        self._client.enter(session)

    def serve(self, data: bytes) -> bytes:
        """The answer to another site's `ask`. Any thread may call it.

        Raises:
            Refused: those bytes are no question, or of a site that is none of the run.
        """
        request, client = unpack(Elect, data), self._client
        who = request.propose.caller
        asker = next((m for m in client.roster.members if m.site == who.site), None)
        if asker is None or asker.boot != who.boot or who.run != client.spec.run:
            raise Refused("unknown", f"site {who.site} is not one of run {client.spec.run}, as site {client.caller.site} knows it")
        with self._lock:
            self._look()
            verdict = self._standin.decide(
                client.seat, client.roster, asker, request, self._others(self._alive), client.away_s, time.monotonic()
            )
        return pack(verdict)

    # ---- asking

    def _propose(self, latest: Session | None, have: Have | None, left_s: float) -> Verdict:
        client, before = self._client, latest.number if latest is not None else have.session if have is not None else 0
        with self._lock:
            entered = self._standin.known.entered
        request = Propose(
            caller=client.caller,
            number=before + 1,
            entered=entered.key if entered is not None and entered == client.session else None,
            opened=self._past,
            bound=self._bound,
            have=have if client.astray is None else None,
            alive=tuple(sorted({client.seat, *self._others(self._alive)})),
            gone=self._others(self._gone),
            wait_s=min(_HOLD_S, left_s),
        )
        self._asked = True
        now_s = time.monotonic()
        with self._lock:
            whom = self._standin.whom(client.seat, request.alive, request.number, client.away_s, now_s)
            if isinstance(whom, int):
                self._standin.asking(request.number, whom, now_s)
        verdict = self._of_site(whom, request) if isinstance(whom, int) else self._of_coordinator(whom == "nobody", request, left_s)
        with self._lock:
            self._standin.told(verdict)
        if verdict.session is None and whom != "coordinator":
            time.sleep(min(_POLL_S, left_s))
        return verdict

    def _of_coordinator(self, hold: bool, request: Propose, left_s: float) -> Verdict:
        client = self._client
        if hold:
            return Verdict(session=None, why="the site that stood in for the coordinator is gone")
        try:
            client.hand_in(left_s)
            return client.propose(request, min(left_s, client.timeouts.lease))
        except Away as error:  # who is slow for a moment changes nothing of what is waited for
            lasts = (client.away_s or 0.0) > client.timeouts.beat
            return Verdict(session=None, why=str(error) if lasts else "")
        except Refused as error:
            retry_s = error.refusal.retry_s
            if error.code == "conflict":  # sessions that nobody has entered, of which the coordinator does not know
                with self._lock:
                    self._standin.give_in(client.roster, entered=False)
            elif retry_s is None:
                raise
            time.sleep(min(_POLL_S if retry_s is None else retry_s, left_s))
            return Verdict(session=None, why=str(error))

    def _of_site(self, leader: int, request: Propose) -> Verdict:
        """The answer of the site that stands in."""
        with self._lock:
            data = pack(Elect(propose=request, known=self._standin.known))
        try:
            return unpack(Verdict, self.serve(data) if leader == self._client.seat else self._ask(leader, data))
        except RunFailed as error:
            return Verdict(session=None, why=f"seat {leader}, which stands in for the coordinator, does not answer ({error})"[:1024])

    def _mine(self, latest: Session) -> Session | None:
        """The latest session, if this process is in it and was not yet: the news may be quicker than the answer."""
        mine = latest.has(self._client.seat, self._client.caller.boot)
        if not mine and self._asked and latest != self._seen:
            self.missed += 1
            self.on_missed()
        self._seen = latest
        if not self._may_open(latest):
            return None
        self._opened = latest
        return latest

    @property
    def _past(self) -> int:
        """The latest session that this site was in, or tried to be."""
        return max(self._opened.number if self._opened is not None else 0, *(s.number for s in self._bound), 0)

    def _may_open(self, session: Session) -> bool:
        """Whether this process is in it, and in none of that number or a later one: else two of a number could each have its members."""
        return session.number > self._past and session.has(self._client.seat, self._client.caller.boot)

    def _look(self) -> None:
        """Under the lock: what the coordinator says."""
        if self._client.astray is not None and self._standin.known.entered is not None:
            self._standin.give_in(self._client.roster, entered=True)
        self._standin.hear(self._client.roster)
        if (latest := self._standin.known.latest) is not None:
            self._known[latest.number] = latest
            self._known.pop(latest.number - _KEPT, None)

    def _others(self, seats: Callable[[], Iterable[int]]) -> tuple[int, ...]:
        return tuple(sorted(set(seats()) - {self._client.seat}))
