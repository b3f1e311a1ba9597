"""What one rank of a site has from session to session: body, state, records; and how it begins a session with them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gossamer.app.folder import RunFolder
from gossamer.app.job import Job
from gossamer.app.progress import Progress
from gossamer.app.served import Passing, seats_of, servers_of
from gossamer.app.wan.hooks import SiteHooks
from gossamer.app.wan.places import places_of
from gossamer.app.wan.spec import link_settings
from gossamer.app.wan.state import Snapshot, advance, give, part_of_mark, read, take
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree, layout_hash, master
from gossamer.net.gates import Gated
from gossamer.real.driver import run
from gossamer.real.group import Group
from gossamer.real.site import Alone, Site
from gossamer.train.data import Corpus
from gossamer.train.resuming import Resuming
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.links.listening import Port
from gossamer.wan.links.wire import Links
from gossamer.wan.roster.records import Report, Session
from gossamer.wan.state_service import StateAsk
from gossamer.wan.trust.access import Access
from gossamer.worker.peer import peer
from gossamer.worker.ranks import among_ranks
from gossamer.worker.regroup import regroup
from gossamer.worker.server import client
from gossamer.worker.state import State
from gossamer.worker.stream import held as outset


class Holding:
    """One rank's.

    Args:
        me: the worker that its site is.
        site: this rank among the others of it.
        folder: the site's run folder.
        found: the round of its newest checkpoint; None: there is none.
        on_round: as of SiteHooks.
    """

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        me: int,
        site: Alone | Gated,
        folder: RunFolder,
        found: int | None,
        progress: Callable[[Snapshot], Progress],
        on_round: Callable[[Report], bool],
    ) -> None:
        self.job, self.me, self.folder = job, me, folder
        self.place = job.place(site.rank, site.size)
        self.number = me if job.ranges is None else job.ranges.seats(me)[site.rank]
        """Among all ranks of all sites, as the groups count."""
        self.seat = job.rank_seat(self.number)
        among = site if isinstance(site, Gated) else None
        self.body = job.body(me, corpus, job.pace_s(me), among)
        self.resuming = Resuming(self.body)
        if found is None:
            held = Snapshot(job.first_state(me, master(self.body.tree), self.seat), self.body.state(), 0.0, 0)
        else:
            held = read(folder.checkpoints, found, me, self.body, self.place)
        self.progress = progress(held)
        self.hooks = SiteHooks(job, folder, corpus, self.progress, me, on_round, number=self.number, ranks=among)
        self.hooks.held, self.hooks.passed = held, self.resuming.boundary
        self.hooks.begun_s = time.monotonic() - held.time_s
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._opening: Snapshot | None = None  # what this site gives to those who need it

    @property
    def held(self) -> Snapshot:
        """The last boundary."""
        assert self.hooks.held is not None
        return self.hooks.held

    def go_on(self) -> None:
        """The run folder is one of an earlier process: this one goes on in it."""
        self.hooks.back_to(self.held.state.round, self.held.state.tokens)

    def marks(self) -> list[dict[str, Any]]:
        """Of the boundaries that this rank can go on from, the last first: round, session, and its part of the mark, as text."""
        self.hooks.writer.wait()  # what it tells of a part belongs to the session before
        found = [one for one in (self.hooks.held, self.hooks.before) if one is not None]
        return [{"round": one.state.round, "session": one.session, "mark": str(part_of_mark(self.seat, one.state))} for one in found]

    def settle(self, round: int) -> None:
        """Goes back to that boundary."""
        if self.held.state.round != round:
            self.hooks.held = self.hooks.before
        self.hooks.before = None
        assert self.held.state.round == round

    def begin(self, session: Session, taken_from: int | None, keeps: bool, forget: Callable[[], None]) -> tuple[State, int]:
        """The state of this site at the start of a session, and inner steps of the round that need not be taken again.

        Args:
            taken_from: the worker whose state was brought to the folder `taken`; None: this site holds that of the session, or (of a
                method with servers) goes on from its own with the blocks of now.
            keeps: what this site has come to from its own state is said with its next round.
            forget: what was given to others before is given no more.
        """
        me, hooks, held = self.me, self.hooks, self.held
        if taken_from is None and held.state.round < session.round:
            self.resuming.begin(None)
            state = advance(self.job, me, session.round, held, self.body)
        elif taken_from is None:
            state = copy.deepcopy(held.state)
            self.body.load_state(held.body)
            self.resuming.begin(state.local or outset(self.seat, state))
        else:
            self.resuming.begin(None)
            drift: Tree = master(self.body.tree) if keeps else {}
            state = take(self.job, me, session.round, taken_from, self.taken, self.body, held, drift, self.place)
        hooks.back_to(session.round, state.tokens)
        held = Snapshot.of(state, self.body, hooks.now_s(), session.number)
        hooks.held, hooks.before = held, None
        with self._lock:
            forget()
            given = len(session.donors) < len(session.members) and me in session.donors
            self._session, self._opening = session, held if given else None
        if not self.job.servers:
            regroup(self.seat, state, session.members, session.donors)
        return state, self.resuming.kept

    @property
    def taken(self) -> Path:
        """Where the state of another site is brought."""
        return self.folder.path / "taken"

    def into(self, group: Group, check: Callable[[], None]) -> None:
        """The program runs over this group next. `check` raises where it cannot go on."""
        self.body.between_steps = check  # whoever is gone, nobody works on for nothing
        self.hooks.ask_stop = group.ask_stop

    def run(self, session: Session, group: Group, state: State, on_signal: Callable[[int], None]) -> State:
        """Runs the program, to the end of the run or of the session."""
        servers = servers_of(self.job)
        program = client(self.seat, state) if servers else among_ranks(self.seat, peer(self.seat, state))
        self.hooks.passing = Passing(self.job, group, session.round) if servers else None
        final, _ = run(
            program, self.resuming, self.hooks, group, start_s=self.hooks.now_s(), rounds0=session.round,
            ahead=self.job.config.run.ahead, servers=servers, on_signal=on_signal,
        )  # fmt: skip
        return final

    def state_for(self, ask: StateAsk) -> tuple[int, Path] | None:
        """For a site that needs the state at the start of the session. In a thread of its own."""
        with self._lock:
            session, held = self._session, self._opening
        if session is None or held is None or session.number != ask.session:
            return None
        path = give(self.folder.path / "given" / f"{ask.session}-{int(ask.inner)}", self.me, held, ask.inner, self.place)
        return held.state.round, path


def links_of(job: Job, number: int, run: str, session: Session, port: Port, access: Access, timeouts: Timeouts) -> Links:
    """Connections of a rank or a server in a session."""
    return Links(
        number, places_of(job).n + job.servers, f"{run}/{session.key}", port=port, settings=link_settings(job, timeouts),
        terms={"session": session.key}, access=access,
    )  # fmt: skip


def meet(
    job: Job,
    links: Links,
    session: Session,
    site: Site,
    timeouts: Timeouts,
    waiting: Callable[[], None],
    servers: Sequence[int] = (),
) -> Group:
    """All members of a session, as this rank is connected to them.

    Args:
        waiting: as of Group.
        servers: seats of those that are in the session.

    Raises:
        RunFailed: some do not come.
    """
    places = places_of(job)
    return Group(
        links.store,
        links.me,
        places.n + job.servers,
        links.wire,
        start_timeout_s=timeouts.connect,
        survives=job.goes_on,
        members=[*(number for worker in session.members for number in places.seats(worker)), *servers],
        seats=seats_of(job),
        site=lambda: site,
        waiting=waiting,
    )


def compare(job: Job, corpus: Corpus, group: Group) -> None:
    """That all train the same.

    Raises:
        RunFailed: one does not.
    """
    group.all_equal(
        {
            "configuration": job.run_id,
            "parameter layout": layout_hash(job.layout),
            "corpus": corpus.content_hash,
            "torch": torch.__version__,
        }
    )


def part(group: Group, ended: bool) -> None:
    """The farewell. At the end of the run all is written, and a site that is gone is missed by nobody."""
    try:
        group.close()
    except RunFailed:
        if not ended:
            raise
