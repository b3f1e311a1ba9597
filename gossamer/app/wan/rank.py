"""One of the further ranks of a site: it does in each session what the first rank does, and decides nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gossamer.app.collect import STREAMS
from gossamer.app.folder import RunFolder
from gossamer.app.job import Job
from gossamer.app.progress import Progress
from gossamer.app.wan.end import finish
from gossamer.app.wan.holding import Holding, compare, links_of, meet, part
from gossamer.app.wan.logs import note
from gossamer.app.wan.places import inner_address, peers_of, places_of, shifted
from gossamer.app.wan.presence import Where, address_at, bind_of, check_relay, missing
from gossamer.app.wan.ranks import started_store, torch_site
from gossamer.app.wan.spec import RosterOf, identity_of, secret_of, spec_of, terms_of
from gossamer.app.wan.state import Snapshot, part_of_mark
from gossamer.core.errors import BadInput, RunFailed
from gossamer.net.crew import Follow
from gossamer.net.gates import Gated
from gossamer.net.start import all_here
from gossamer.net.talk import Message
from gossamer.real.group import Group, NotMet
from gossamer.real.signals import handling
from gossamer.train.data import Corpus
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.links.listening import Port
from gossamer.wan.links.wire import Links
from gossamer.wan.loop import in_loop
from gossamer.wan.roster.messages import unpack
from gossamer.wan.roster.records import Roster, Session
from gossamer.wan.state_service import StateServer
from gossamer.wan.trust.doors import Doors
from gossamer.wan.trust.terms import Party
from gossamer.wan.trust.vigil import Vigil
from gossamer.worker.state import State


class RankRun:
    """Rank `rank` of `size` of a site: `serve`, then `close`.

    Args:
        where: of the site; this rank listens so many ports above the first.

    Raises:
        BadInput: what was given cannot be.
        RunFailed: the first rank is not there.
    """

    def __init__(self, job: Job, where: Where, corpus: Corpus, rank: int, size: int) -> None:
        check_relay(where, size)
        self.job, self.corpus = job, corpus
        self.where = where = replace(where, bind=shifted(where.bind, rank), advertise=shifted(where.advertise, rank))
        self.places, self.spec = places_of(job), spec_of(job, corpus)
        self.timeouts = Timeouts.of(self.spec.floor_s, lease_s=self.spec.lease_s)
        identity, secret = identity_of(where.identity), secret_of(where.identity, where.secret)
        self._roster: Roster | None = None
        party = None if secret is None else Party(terms_of(self.spec, secret), RosterOf(lambda: self._roster))
        self.doors = Doors(where.site, party, identity)
        self._vigil = Vigil(identity, [self.doors.look])  # what becomes of the site decides the first rank
        self.access = self.doors.access(self._site_of)
        self.holding: Holding | None = None
        self.states = StateServer(lambda ask: None if self.holding is None else self.holding.state_for(ask))
        bind, local = bind_of(where, size), all_here(size)
        assert bind is not None
        self.port = Port(bind, self.access, [self.states.handlers()])
        in_loop(self.port.start())
        self.address = address_at(where, bind, self.port.number)
        greeting = {"address": self.address, "inner": inner_address(bind, self.port.number, self.address, local)}
        store = started_store(size)
        self.crew = Follow(store, rank, greeting, orphaned=_orphaned)
        self.crew.told = self._told
        self.site = Gated(torch_site(job, store, rank, size, local), self.crew)

    def _site_of(self, number: int) -> str | None:
        member = None if self._roster is None else self._roster.at(self.places.workers[number])
        return None if member is None else member.site

    def _told(self, message: Message) -> None:
        if "roster" in message:
            self._heard(message["roster"])

    def _heard(self, roster: str) -> None:
        found = unpack(Roster, roster.encode())
        if self._roster is None or found.revision >= self._roster.revision:
            self._roster = found
            self.doors.sweep()

    # ---- orders

    def serve(self) -> None:
        """Does what the first rank asks for, to the end.

        Raises:
            RunFailed: this rank cannot go on, and the site with it.
        """
        with handling(self._signalled):
            for order in self.crew.orders():
                if order["do"] == "start":
                    self._start(order["worker"], Path(order["folder"]), order["found"])
                    self.crew.answer(order, {})
                    continue
                holding = self.holding
                assert holding is not None
                if order["do"] == "held":
                    self.crew.answer(order, {"held": holding.marks()})
                elif order["do"] == "settle":
                    holding.settle(order["round"])
                elif order["do"] == "save":
                    holding.hooks.save()
                    self.crew.answer(order, {})
                elif order["do"] == "session":
                    self._session(order, holding)

    def _signalled(self, number: int) -> None:
        """The first rank decides what becomes of it."""
        self.crew.say({"asked": number})

    def _start(self, me: int, folder: Path, found: int | None) -> None:
        def progress(held: Snapshot) -> Progress:
            return Progress(self.job.method.rounds, "", quiet=True, first_round=held.state.round)

        self.holding = holding = Holding(self.job, self.corpus, me, self.site, RunFolder(folder), found, progress, lambda report: False)
        hooks = holding.hooks
        hooks.trouble = note
        hooks.shared = lambda own: self.crew.say({"bytes": own})
        if found is not None:
            holding.go_on()
        hooks.written = lambda round, tokens, sha: self.crew.say({"saved": [round, tokens, sha]})

    # ---- one session

    def _session(self, order: Message, holding: Holding) -> None:
        session, crew = unpack(Session, order["session"].encode()), self.crew
        if not _there(holding):
            where = holding.folder.path
            raise BadInput(
                f"rank {self.site.rank} does not see the run folder {where}: give --out on storage that all ranks of a site share"
            )
        self._heard(order["roster"])
        crew.begin(order["epoch"])
        links = links_of(self.job, holding.number, self.spec.run, session, self.port, self.access, self.timeouts)
        group: Group | None = None
        parted = False
        try:
            if not self._connect(links, session, order):
                return
            if (meeting := self._next("meet")) is None:
                return
            group = meet(self.job, links, session, self.site, self.timeouts, crew.check)
            compare(self.job, self.corpus, group)
            crew.attach(group.board)
            crew.answer(meeting, {})
            if (begin := self._next("run")) is None:
                return
            state, _ = holding.begin(session, begin["taken_from"], begin["keeps"], self.states.forget)
            crew.answer(begin, {"mark": str(part_of_mark(holding.seat, state))})
            holding.into(group, self._check(holding))
            state = holding.run(session, group, state, self._signalled)
            ended = state.round >= self.job.method.rounds
            if ended:
                self._finish(group, holding, state)
            part(group, ended)
            parted = True
        except RunFailed as error:
            crew.end(error)
            if group is not None and error is not group.board.failure and error is not crew.over and not isinstance(error, NotMet):
                raise
            note(f"session {session.number} ends here: {error}")
        finally:
            holding.resuming.break_off()
            if group is not None and not parted:
                group.abort(crew.over or RunFailed("this session is over"))
            links.close()

    def _connect(self, links: Links, session: Session, order: Message) -> bool:
        """Whether there are connections to all."""
        assert self._roster is not None
        answer: Message = {"why": None, "missing": []}
        peers = {}
        try:
            peers = peers_of(self.places, links.me, session.members, self._roster, self.address, order["inner"])
            links.connect(peers, self.timeouts.lease * 1.5, check=self.crew.check)
        except RunFailed as error:
            answer = {"why": str(error), "missing": missing(links, peers, self.places)}
        self.crew.answer(order, answer)
        return answer["why"] is None

    def _next(self, what: str) -> Message | None:
        """The order that belongs to the session; None: it ends before that."""
        found = self.crew.next_order()
        if found["do"] == what:
            return found
        self.crew.put_back(found)
        return None

    def _check(self, holding: Holding) -> Callable[[], None]:
        def check() -> None:
            self.crew.cross()
            holding.hooks.before = None

        return check

    def _finish(self, group: Group, holding: Holding, state: State) -> None:
        """The end of the run: the records and the parameters of this rank go to whoever makes the summary."""
        hooks = holding.hooks
        hooks.close()
        finish(self.job, group, {name: hooks.own(name) for name in STREAMS}, state, _never)

    def close(self) -> None:
        """Closes all connections."""
        if self.holding is not None and _there(self.holding):
            self.holding.hooks.close()
        self._vigil.close()
        self.crew.close()
        in_loop(self.doors.lines.close())
        in_loop(self.port.stop())
        with suppress(Exception):
            self.site.end()


def _there(holding: Holding) -> bool:
    """Whether the run folder is made, and seen from here."""
    return (holding.folder.path / "config.toml").is_file()


def _never(trees: object, streams: object) -> str:
    raise RunFailed("the summary fell to a further rank of a site, which makes none")


def _orphaned() -> None:
    """The first rank is gone: nobody needs this one any more."""
    note("the first rank of this site is gone: this one ends, too")
    os._exit(1)
