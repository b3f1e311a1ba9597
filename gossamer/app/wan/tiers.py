"""Servers of a method with servers (halos) among sites: each runs beside a worker, in the process of one of the sites.

A server has a seat of the session, with connections of its own, which go to the port of its site and show its certificate. Where it is all
work out alike from what each says at the start of the session: a server stays with the site that has it; where no member has it, it begins
anew beside the first worker of its region, the global one beside the best connected of these (`gossamer.core.tiers.placed`), from the
parameters that this worker has, with no momentum. So no session waits for a site that is gone, and none needs a server's state to travel.

In a session a dead worker is left out. A region whose server dies is without it for its session: its workers ask for the next one, and the
others stop for that at one block. Without the global server nobody goes on: all open the next session.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

from gossamer.app.job import Job
from gossamer.app.served import seats_of
from gossamer.app.wan.host import Held, Host, Site, wants_server
from gossamer.app.wan.places import by_site
from gossamer.core.errors import RunFailed
from gossamer.core.ranges import Ranges
from gossamer.core.tiers import Tiers, placed
from gossamer.core.tree import Tree, master
from gossamer.real.group import Group
from gossamer.train import checkpoint
from gossamer.wan.links.link import Traffic
from gossamer.wan.links.wire import Links
from gossamer.wan.roster.records import Session
from gossamer.worker.server import first_of
from gossamer.worker.server_state import ServerState

_POLL_S, _FAREWELL_S = 0.02, 2.0


class Word(NamedTuple):
    """What a site says at the start of a session."""

    was: int
    """The last session in which it held the state of the run."""
    listens: bool
    holds: Mapping[int, int]
    """Server -> the last session that it served in here."""
    taken: Mapping[int, int]
    """Of the global server, if it is here: local server -> its reports."""

    def text(self) -> str:
        """As it is said."""
        return json.dumps(self._asdict())

    @classmethod
    def read(cls, text: str) -> Word:
        """What was said. Raises RunFailed: it is none."""
        try:
            found = json.loads(text)
            holds, taken = ({int(k): int(v) for k, v in found[name].items()} for name in ("holds", "taken"))
            return cls(int(found["was"]), bool(found["listens"]), holds, taken)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFailed(f"a site says of its servers what cannot be read ({error!r}): run one release on all sites") from None


class Places(NamedTuple):
    """What all have agreed on."""

    at: dict[int, int]
    """Server -> the worker beside which it is."""
    kept: frozenset[int]
    """Servers that go on as they are."""
    was: int
    """The session before."""
    taken: dict[int, int]
    """Reports that the global server has of each local one."""


def agree(job: Job, session: Session, words: Mapping[int, Word]) -> Places:
    """Where the servers of a session are. The same from the same words.

    Raises:
        RunFailed: none of the sites can be reached.
    """
    tiers = _tiers(job)
    was = max(words[j].was for j in session.donors)
    able = [j for j in session.members if words[j].listens]
    if not able:
        raise RunFailed("none of the sites can be dialled, and a server must be: give one of them an address to advertise, or all a relay")
    at = placed(job.fleet, tiers, able)
    at |= {tiers.home(j): at.get(tiers.home(j), able[0]) for j in session.members}  # a region of sites that only dial out
    kept = {}
    for seat in at:
        holders = [j for j in session.members if was and words[j].holds.get(seat) == was]
        if holders:
            kept[seat] = holders[0]
    taken = words[kept[tiers.top]].taken if tiers.top in kept else {}
    return Places(at | kept, frozenset(kept), was, dict(taken))


def _tiers(job: Job) -> Tiers:
    assert job.method.tiers is not None
    return job.method.tiers


class Hosting:
    """The servers of a run, as one site sees them."""

    def __init__(self, site: Site) -> None:
        self._site, self.job, self._presence, self._say = site, site.job, site.presence, site.say
        self.held: dict[int, Held] = {}
        self.places: Places | None = None
        self._said: str | None = None
        self.here: list[Host] = []
        """Those of the session that are here."""

    @property
    def me(self) -> int:
        """The worker's seat."""
        return self._presence.client.seat

    # ---- a session

    def meet(self, links: Links, session: Session, was: int, check: Callable[[], None]) -> tuple[int, ...]:
        """Agrees on where the servers are, starts those that are here, and lets the worker's connections find all of them.

        Args:
            was: the last session in which this site held the state of the run.
            check: asked meanwhile; what it raises ends the wait.

        Returns:
            Their seats.

        Raises:
            RunFailed: a member is gone, or says nothing.
        """
        counts = {s: h.session for s, h in self.held.items() if h.live or self.me in session.donors}
        top = self.held.get(_tiers(self.job).top)
        word = Word(was, self._presence.listens, counts, top.state.taken if top is not None else {})
        links.store.set(f"servers/{self.me}", word.text())
        self.places = places = agree(self.job, session, self._words(links, session, check))
        self._presence.hosts.update(places.at)
        self.here = [Host(self._site, seat, session, places.at) for seat in sorted(places.at) if places.at[seat] == self.me]
        for seat in sorted(places.at):
            links.add(seat, self._presence.peer(seat))
        for host in self.here:
            host.thread.start()
        return tuple(sorted(places.at))

    def _words(self, links: Links, session: Session, check: Callable[[], None]) -> dict[int, Word]:
        keys = {j: f"servers/{j}" for j in session.members}
        until_s = time.monotonic() + self._presence.client.timeouts.connect
        while not links.store.check(list(keys.values())):
            check()
            if time.monotonic() > until_s:
                names = self._presence.names(tuple(j for j in keys if not links.store.check([keys[j]])))
                raise RunFailed(f"site {', '.join(names.values())} is silent at the start of the session")
            time.sleep(_POLL_S)
        return {j: Word.read(links.store.get(key).decode()) for j, key in keys.items()}

    def begin(self, session: Session, x: Tree, time_s: float) -> None:
        """The worker has the state of the session, its parameters x: the servers here begin. `time_s`: what its clock shows."""
        assert self.places is not None
        tiers, places = _tiers(self.job), self.places
        new = []
        for host in self.here:
            held = self.held.get(host.seat)
            if held is None or host.seat not in places.kept:
                begun = first_of(self.job.seat(host.seat), master(x), fresh=session.round == 0)
                begun.reports = places.taken.get(host.seat, 0)
                held = Held(begun, session.number, True)
                new.append(host.name)
            held.state.fresh = held.state.fresh and session.round == 0 and not places.was
            if tiers.top not in places.kept and host.seat == tiers.home(places.at[tiers.top]):
                held.state.forget()  # the global server begins with it
            held.session, held.live = session.number, True
            self.held[host.seat] = held
        self.held = {host.seat: self.held[host.seat] for host in self.here}
        if new:
            self._say(f"{' and '.join(new)} {'begins' if len(new) == 1 else 'begin'} here, from round {session.round}")
        for host in self.here:
            host.held, host.start_s = self.held[host.seat], time_s
            host.begun.set()
        where = self._presence.name_of(places.at[tiers.top])
        if tiers.top not in self.held and where != self._said:
            self._say(f"the global server is at site {where}")
        self._said = where

    def bereft(self, error: RunFailed, group: Group | None) -> str:
        """What to say where a session has ended for want of a server; empty: it has not. Its site is asked anew whether it is there.

        Raises:
            RunFailed: a server here has failed: this site cannot go on.
        """
        for host in self.here:
            if host.failure is not None:
                raise host.failure
        if group is None or self.places is None or not wants_server(error):
            return ""
        tiers = _tiers(self.job)
        seat = tiers.top if tiers.top in group.board.dead else tiers.home(self.me)
        names = seats_of(self.job)
        assert names is not None
        site = self._presence.name_of(self.places.at[seat]) or f"seat {self.places.at[seat]}"
        if (at := self.places.at[seat]) != self.me:
            self._presence.neighbours.lost(at)
        who = "all" if seat == tiers.top else "its workers"
        return f"{names.name(seat)}, at site {site}, is gone: {who} go on in the next session"

    def end(self, farewell: bool = False) -> None:
        """The session is over. `farewell`: all have taken leave of each other."""
        for host in self.here:
            host.stop(_FAREWELL_S if farewell else 0.0)
        self.here, self.places = [], None
        self._presence.hosts.clear()

    def was_in(self, session: int) -> bool:
        """Whether a site that held the state of the run last in this session was in the one before that of now."""
        return self.places is not None and 0 < session == self.places.was

    def traffic(self, links: Links, places: Ranges, names: Mapping[int, str]) -> dict[str, Traffic]:
        """Of the worker here and the servers here with each other site, by its name."""
        here = [links, *(host.links for host in self.here if host.links is not None)]
        found = by_site([one.traffic() for one in here], places, names, self._presence.hosts)
        found.pop(names.get(self.me, ""), None)
        return found

    # ---- checkpoints

    def save(self, round: int) -> dict[int, list[str]]:
        """Writes a part of a checkpoint for each server here; their SHA-256."""
        found, running = {}, {host.seat: host for host in self.here}
        for seat, held in self.held.items():
            with running[seat].rests if seat in running else nullcontext():
                found[seat] = [self._write(round, seat, held)]
        return found

    def _write(self, round: int, seat: int, held: Held) -> str:
        state, extra = held.state.pack()
        return checkpoint.write_part(self._site.folder.checkpoints, round, seat, state, {}, extra | {"session": held.session})

    def load(self, round: int | None) -> None:
        """Takes up what the checkpoint of this site has, from which it begins; None: there is none."""
        if round is None:
            return
        folder = self._site.folder.checkpoints
        for seat in checkpoint.read_manifest(folder, round).parts:
            if seat >= self.job.n:
                part = checkpoint.read_part(folder, round, seat, self.job.home)
                self.held[seat] = Held(ServerState.unpack(part.state, part.extra), int(part.extra["session"]), False)
