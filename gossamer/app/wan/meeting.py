"""How the members of a session come together. Whoever waits for others looks up ten times a second: a signal ends the wait, and so does
what makes it vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from gossamer.app.job import Job
from gossamer.app.wan.holding import compare, meet
from gossamer.app.wan.presence import Presence
from gossamer.app.wan.ranks import Ranks
from gossamer.app.wan.tiers import Hosting
from gossamer.core.errors import RunFailed
from gossamer.core.ranges import Ranges
from gossamer.net.crew import RankLost
from gossamer.real.board import PeerLost
from gossamer.real.group import Group, NotMet
from gossamer.train.data import Corpus
from gossamer.wan.links.wire import Links
from gossamer.wan.roster.records import Session
from gossamer.wan.roster.sessions import GoneOn, Sessions

T = TypeVar("T")
_LOOK_S = 0.1
_DOUBT_S = 1.0
"""Who has not come by then is asked whether it is there."""


class Vain(RunFailed):
    """A session will not come about. The message says why."""


def patiently(job: Callable[[], T], check: Callable[[], None]) -> T:
    """What `job` returns, in a thread of its own. What `check` raises meanwhile ends the wait; the job then goes on, and nobody hears of
    it."""
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(job())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, name="wan-waits", daemon=True).start()
    while not wait([found], _LOOK_S).done:
        check()
    return found.result()


class Meeting:
    """The members of a session, as this site waits for them.

    Args:
        look: raises what is to end the wait, such as a signal.
        places: the ranks of all sites, as the links number them.
        ranks: those of this site.
    """

    def __init__(
        self,
        session: Session,
        presence: Presence,
        sessions: Sessions,
        links: Links,
        look: Callable[[], None],
        places: Ranges,
        ranks: Ranks,
    ) -> None:
        self._session, self._presence, self._sessions, self._links, self._look = session, presence, sessions, links, look
        roster = presence.client.roster
        self._doubt_s = time.monotonic() + _DOUBT_S
        self._ranks = ranks
        self._seats = {j: tuple(places.seats(j)) for j in session.members}
        self._boots = {j: m.boot for j in session.members if links.me not in self._seats[j] and (m := roster.at(j)) is not None}

    def group(self, job: Job, corpus: Corpus, hosting: Hosting | None = None, was: int = 0) -> Group:
        """All of them, connected and compared.

        Args:
            hosting: of a method with servers.
            was: the last session in which this site held the state of the run.

        Raises:
            Vain: one of them is gone, or does not come in time, or the run has gone on to another session.
            RunFailed: one trains something else.
        """
        session, links, ranks = self._session, self._links, self._ranks
        try:
            self._presence.connect(links, session.members, self.check)
            ranks.connected(self._presence.neighbours.lost, self.check)
            ranks.meet()
            servers = hosting.meet(links, session, was, self.check) if hosting else ()
            group = meet(job, links, session, ranks.site, self._presence.client.timeouts, self.check, servers)
        except (Vain, RankLost):
            raise
        except RunFailed as error:
            raise Vain(str(error)) from error
        group.board.round, group.board.called = session.round, self._called
        try:
            self._sessions.bind(session)
            compare(job, corpus, group)
            ranks.met(group.board, self._look)
        except BaseException as error:
            group.abort(error)
            if isinstance(error, PeerLost):
                lost = next((j for j, seats in self._seats.items() if error.worker in seats), None)
                if lost in self._boots:
                    self._presence.neighbours.lost(lost)
                raise Vain(f"{error.name} is gone ({error.why})") from error
            if isinstance(error, NotMet | GoneOn) or (error is group.board.failure and not isinstance(error, RankLost)):
                raise Vain(str(error)) from error
            raise
        return group

    def _called(self, number: int) -> str:
        """Of the board's messages."""
        seat = next((j for j, seats in self._seats.items() if number in seats), number)
        rank = f", rank {self._seats[seat].index(number)}" if len(self._seats.get(seat, ())) > 1 else ""
        return f"{self._presence.called(seat)}{rank}"

    def check(self) -> None:
        """Whether there is still something to wait for.

        Raises:
            Vain: there is not.
        """
        self._look()
        session, names = self._session, self._presence.name_of
        latest = self._sessions.latest
        if latest is not None and latest != session and latest.number >= session.number:
            raise Vain(f"the run has gone on to session {latest.number}")
        roster, neighbours = self._presence.client.roster, self._presence.neighbours
        gone, doubts = neighbours.gone(), time.monotonic() > self._doubt_s
        if doubts:
            self._doubt_s = float("inf")
        for j, boot in self._boots.items():
            links, member = [self._links.links.get(k) for k in self._seats[j]], roster.at(j)
            name = names(j) or f"seat {j}"
            for link in links:
                if link is not None and link.over is not None:
                    raise Vain(f"site {name} is gone ({link.over})")
            if all(link is not None and link.session is not None for link in links):
                continue
            if j in gone:
                raise Vain(f"site {name} is gone")
            if member is not None and (member.boot != boot or not member.there):
                raise Vain(f"site {name} is {'another process now' if member.there else 'out of the run'}")
            if doubts:
                neighbours.lost(j)
