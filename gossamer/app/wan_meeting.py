"""How the members of a session come together. Whoever waits for others looks up ten times a second: a signal ends the wait, and so does
what makes it vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from gossamer.app.job import Job
from gossamer.app.wan_presence import Presence
from gossamer.core.errors import RunFailed
from gossamer.core.tree import layout_hash
from gossamer.real.board import PeerLost
from gossamer.real.group import Group, NotMet
from gossamer.train.data import Corpus
from gossamer.wan.records import Session
from gossamer.wan.sessions import Sessions
from gossamer.wan.wire import Links

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
    """

    def __init__(self, session: Session, presence: Presence, sessions: Sessions, links: Links, look: Callable[[], None]) -> None:
        self._session, self._presence, self._sessions, self._links, self._look = session, presence, sessions, links, look
        roster = presence.client.roster
        self._doubt_s = time.monotonic() + _DOUBT_S
        self._boots = {j: m.boot for j in session.members if j != links.me and (m := roster.at(j)) is not None}

    def group(self, job: Job, corpus: Corpus) -> Group:
        """All of them, connected and compared.

        Raises:
            Vain: one of them is gone, or does not come in time, or the run has gone on to another session.
            RunFailed: one trains something else.
        """
        session, links = self._session, self._links
        try:
            self._presence.connect(links, session.members, self.check)
            group = Group(
                links.store, links.me, job.n, links.wire, start_timeout_s=self._presence.client.timeouts.connect, survives=job.goes_on,
                members=session.members, waiting=self.check,
            )  # fmt: skip
        except Vain:
            raise
        except RunFailed as error:
            raise Vain(str(error)) from error
        group.board.round, group.board.called = session.round, lambda j: f"site {self._presence.name_of(j) or f'at seat {j}'}"
        try:
            group.all_equal(
                {
                    "configuration": job.run_id,
                    "parameter layout": layout_hash(job.layout),
                    "corpus": corpus.content_hash,
                    "torch": torch.__version__,
                }
            )
        except BaseException as error:
            group.abort(error)
            if isinstance(error, PeerLost):
                self._presence.neighbours.lost(error.worker)
                raise Vain(f"{error.name} is gone ({error.why})") from error
            if isinstance(error, NotMet) or error is group.board.failure:
                raise Vain(str(error)) from error
            raise
        return group

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
            link, member = self._links.links.get(j), roster.at(j)
            name = names(j) or f"seat {j}"
            if link is not None and link.over is not None:
                raise Vain(f"site {name} is gone ({link.over})")
            if link is not None and link.session is not None:
                continue
            if j in gone:
                raise Vain(f"site {name} is gone")
            if member is not None and (member.boot != boot or not member.there):
                raise Vain(f"site {name} is {'another process now' if member.there else 'out of the run'}")
            if doubts:
                neighbours.lost(j)
