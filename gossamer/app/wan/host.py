"""One server of a method with servers (halos), in a thread of a site's process: see `gossamer.app.wan.tiers`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.app.collect import STREAMS
from gossamer.app.folder import JsonLines, RunFolder
from gossamer.app.job import Job
from gossamer.app.served import ServerHooks, seats_of, to_its_end
from gossamer.app.wan.end import finish
from gossamer.app.wan.holding import compare, meet
from gossamer.app.wan.presence import Presence
from gossamer.core.errors import RunFailed
from gossamer.real.group import Group
from gossamer.real.site import Alone
from gossamer.train.data import Corpus
from gossamer.wan.links.wire import Links
from gossamer.wan.roster.records import Session
from gossamer.worker.effects import Program, RecvAny, Reply
from gossamer.worker.server import ServerGone, server
from gossamer.worker.server_state import ServerState
from gossamer.worker.state import State

_POLL_S = 0.02
_JOIN_S = 60.0


class Site(NamedTuple):
    """Where servers are."""

    job: Job
    presence: Presence
    corpus: Corpus
    folder: RunFolder
    """The site's own run folder."""
    links: Callable[[int, Session], Links]
    """(Worker or server, session) -> connections for it."""
    say: Callable[[str], None]


@dataclass
class Held:
    """A server's state at this site."""

    state: ServerState
    session: int
    """The last session that it served in."""
    live: bool
    """It is as it was left, not as a checkpoint has it."""


def wants_server(error: RunFailed) -> bool:
    """Whether a program has ended since a server is gone that it needs."""
    return isinstance(error if isinstance(error, ServerGone) else error.__cause__, ServerGone)


class Host:
    """One server of one session, in a thread of its own.

    Args:
        servers: seats of all of them.
    """

    def __init__(self, site: Site, seat: int, session: Session, servers: Collection[int]) -> None:
        self._site, self.seat, self._session, self._servers = site, seat, session, sorted(servers)
        self._members = (*session.members, *sorted(servers))
        names = seats_of(site.job)
        assert names is not None
        self.name = names.name(seat)
        self.held: Held | None = None
        self.start_s = 0.0
        """What its clock shows when it begins."""
        self.begun, self.rests = threading.Event(), threading.Lock()
        """The lock is free while the server waits for messages: then its state is whole, and stays."""
        self.failure: RunFailed | None = None
        """It has failed by itself, not for want of others."""
        self._group: Group | None = None
        self._over = False
        self.links: Links | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        job, members, presence = self._site.job, self._members, self._site.presence
        timeouts = presence.client.timeouts
        try:
            links = self.links = self._site.links(self.seat, self._session)
            links.connect({j: presence.peer(j) for j in members if j != self.seat}, timeouts.lease * 1.5, check=self._check)
            group = self._group = meet(job, links, self._session, Alone(), timeouts, self._check, self._servers)
            group.board.called = presence.called
            compare(job, self._site.corpus, group)
            while not self.begun.wait(_POLL_S):
                group.board.check()
                self._check()
            self._run(group)
        except RunFailed as error:
            known = self._group is not None and error is self._group.board.failure
            if self.begun.is_set() and not (self._over or known or wants_server(error)):
                self.failure = RunFailed(f"{self.name}: {error}")
        except Exception as error:
            self.failure = RunFailed(f"{self.name}: {type(error).__name__}: {error}")
        finally:
            if self._group is not None:
                self._group.abort(RunFailed("this session is over"))
            if self.links is not None:
                self.links.close()

    def _check(self) -> None:
        if self._over:
            raise RunFailed("this session is over")

    def _run(self, group: Group) -> None:
        site, job, session = self._site, self._site.job, self._session
        assert self.held is not None
        records = _Records(site.folder, self.seat, session.round, site.say)
        hooks = ServerHooks(job, group, records, site.corpus, session.members, session.round)
        program = server(job.seat(self.seat), self.held.state, since=session.round, there=self._members)
        state = to_its_end(job, group, _resting(program, self.rests), hooks, start_s=self.start_s, round0=session.round)
        last = group.last_round
        if last is None or last >= job.method.rounds:
            finish(job, group, {name: (records.folder.path / name).read_bytes() for name in STREAMS}, state, lambda trees, streams: "")
        with suppress(RunFailed):
            group.close()

    def stop(self, patience_s: float) -> None:
        """Ends it, if it does not end by itself in so many seconds."""
        self.thread.join(patience_s)
        self._over = True
        if self._group is not None:
            self._group.board.fail(RunFailed("this session is over"))
        if self.links is not None and self._group is None:
            self.links.close()
        self.thread.join(_JOIN_S)


@contextmanager
def _held(lock: threading.Lock) -> Iterator[Callable[[bool], None]]:
    """A lock that is taken, and can be let go and taken again; free at the end."""
    taken = False

    def hold(wanted: bool) -> None:
        nonlocal taken
        if wanted and not taken:
            lock.acquire()
        elif taken and not wanted:
            lock.release()
        taken = wanted

    try:
        yield hold
    finally:
        hold(False)


def _resting(program: Program, lock: threading.Lock) -> Program:
    """The program of a server, which holds the lock but while it waits for a message."""
    with _held(lock) as hold:
        reply: Reply = None
        while True:
            hold(True)
            try:
                effect = program.send(reply)
            except StopIteration as end:
                final: State = end.value
                return final
            hold(not isinstance(effect, RecvAny))
            reply = yield effect


class _Records:
    """A server's own. A full disk costs records, and no more."""

    def __init__(self, folder: RunFolder, seat: int, round: int, say: Callable[[str], None]) -> None:
        path: Path = folder.path / "workers" / str(seat)
        path.mkdir(parents=True, exist_ok=True)
        self.folder, self._say = RunFolder(path), say
        for name in STREAMS:
            self.folder.cut(name, round)
            (path / name).touch()
        self._file = JsonLines(path / "metrics.jsonl")

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Adds a record."""
        try:
            self._file.add(record)
        except RunFailed as error:
            self._say(f"{error}; the run goes on, and what is not written waits")

    def close(self) -> None:
        """Closes the file."""
        with suppress(RunFailed):
            self._file.close()
