"""One site of a wide-area run: it joins, and goes from session to session until the run ends or it leaves.

A session is a stretch of the run with fixed members, in which the ordinary program runs over a group as everywhere else. When a member is
lost (synchronous methods), leaves, or a site comes, the sites go back to the last boundary that one of them holds, and open the next one.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from gossamer.app.collect import STREAMS, merge
from gossamer.app.job import Job
from gossamer.app.progress import Progress
from gossamer.app.simulate import write_result
from gossamer.app.wan_apart import Apart, Missing
from gossamer.app.wan_folder import SiteFolder
from gossamer.app.wan_hooks import SiteHooks, finish
from gossamer.app.wan_logs import LogPlace
from gossamer.app.wan_meeting import Meeting, Vain
from gossamer.app.wan_ops import SiteOps
from gossamer.app.wan_presence import Presence, Where
from gossamer.app.wan_slow import Slow
from gossamer.app.wan_spec import link_settings, spec_of
from gossamer.app.wan_state import Snapshot, bring, keeps, read_latest, take, write
from gossamer.app.wan_waiting import Entrance
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree, master
from gossamer.real.board import PeerLost
from gossamer.real.driver import run
from gossamer.real.group import Group
from gossamer.train.compute import TrainBody
from gossamer.train.data import Corpus
from gossamer.train.resuming import Resuming
from gossamer.wan.deadlines import Deadline
from gossamer.wan.ended import OVER
from gossamer.wan.loop import in_loop
from gossamer.wan.records import Plan, Report, Session
from gossamer.wan.sessions import Sessions
from gossamer.wan.state_service import NotBrought, StateAsk, StateServer
from gossamer.wan.wire import Links
from gossamer.worker.peer import peer
from gossamer.worker.regroup import regroup
from gossamer.worker.state import State
from gossamer.worker.stream import held as outset

log = logging.getLogger(__name__)
_TRIES = 3
"""Times in a row that a state may fail to come."""


class Leaving(Exception):
    """This site was asked to leave, by a signal."""

    def __init__(self, signal: int) -> None:
        self.signal = signal


class SiteRun:
    """One site, from its start to its end: `take_part`, then `close`.

    Raises:
        BadInput: what was given cannot be.
    """

    def __init__(self, job: Job, where: Where, corpus: Corpus, place: LogPlace | None = None) -> None:
        self.job, self.where, self.corpus = job, where, corpus
        self.spec = spec_of(job, corpus)
        self._console = Console(highlight=False, soft_wrap=True)
        self._asked: int | None = None
        self._group: Group | None = None
        self._apart: Apart
        self._opening: Snapshot | None = None  # what this site gives to those who need it
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._why, self._failed = "start", 0
        self.ops = SiteOps(where.site, self.spec.run, where.metrics, place)
        self.states = StateServer(self._state_for)
        self.presence = Presence(self.spec, where, [self.states.handlers()])
        self.client, self.neighbours = self.presence.client, self.presence.neighbours
        self.sessions = Sessions(self.client, alive=self.neighbours.alive, gone=self.neighbours.gone, ask=self.neighbours.ask)
        self.neighbours.on_ask = self.sessions.serve
        self.ops.coordinator(lambda: self.client.there)
        self.deadline = Deadline(self.spec.floor_s, self.spec.spread)
        self._missing = Missing(self._say, self.presence.name_of)
        self.entrance = Entrance(self.client, self.sessions, where, self._say, self._check_signal)
        self.folder: SiteFolder
        self.hooks: SiteHooks
        self.body: TrainBody
        self.resuming: Resuming

    # ---- life

    def take_part(self, folder: SiteFolder) -> bool:
        """Joins, and goes through the sessions. Whether this site made the summary."""
        self.folder = folder
        timeouts = self.client.timeouts
        self._say(f"site {self.where.site} of run {self.spec.run}: {timeouts.line()}")
        if self.where.time_outs:
            self._say(timeouts.table())
        self.client.seat = -1 if folder.seat is None else folder.seat
        self.entrance.join()
        me = self.client.seat
        self.body = self.job.body(me, self.corpus, self.job.pace_s(me))
        self.resuming = Resuming(self.body)
        held = read_latest(self.job, folder.checkpoints, me, self.body)
        if held is None:
            held = Snapshot.of(self.job.first_state(me, master(self.body.tree)), self.body, 0.0, 0)
        title = f"{self.job.title} at {self.where.site}"
        with Progress(self.job.method.rounds, title, first_round=held.state.round, first_tokens=held.state.tokens) as progress:
            self.hooks = hooks = SiteHooks(self.job, folder, self.corpus, progress, me, self._after_round)
            hooks.held, hooks.session, hooks.trouble = held, held.session, self._say
            hooks.told, hooks.passed = self.ops.note, self.resuming.boundary
            hooks.begun_s = time.monotonic() - held.time_s
            try:
                if folder.there:
                    folder.begin(me)
                    hooks.back_to(held.state.round, held.state.tokens)
                while True:
                    assert hooks.held is not None
                    session = self.entrance.open(hooks.held.have)
                    folder.begin(me)
                    if (made := self._train(session)) is not None:
                        self.client.leave()
                        return made
            except Leaving:
                if folder.there:
                    hooks.save()
                self.client.leave(2.0 if self.client.there else 0.5)
                self._say(f"site {self.where.site} has left run {self.spec.run} after round {hooks.held.state.round}")
                raise
            finally:
                if folder.there:
                    hooks.close()

    def on_signal(self, number: int) -> None:
        """Asks to leave, at the end of the round; a second time, at once."""
        if self._asked is not None:
            raise KeyboardInterrupt
        self._asked = number
        if (group := self._group) is not None:
            group.ask_stop(0)

    def close(self) -> None:
        """Closes all connections."""
        self.presence.close()
        self.ops.close()

    def _check_signal(self) -> None:
        if self._asked is not None:
            raise Leaving(self._asked)

    # ---- one session

    def _train(self, session: Session) -> bool | None:
        """Runs the program in a session. None: it ended before the run did."""
        me, hooks, names = self.client.seat, self.hooks, self.presence.names(session.members)
        links = Links(
            me, self.job.n, f"{self.spec.run}/{session.key}", port=self.presence.port,
            settings=link_settings(self.job, self.client.timeouts),
            terms={"session": session.key}, access=self.presence.access,
        )  # fmt: skip
        group: Group | None = None
        self._say(f"session {session.number}, from round {session.round}: {', '.join(names[j] for j in session.members)}")
        try:
            group = Meeting(session, self.presence, self.sessions, links, self._check_signal).group(self.job, self.corpus)
            self.sessions.entered(session)
            self._missing.met(session.members)
            self.ops.session(session, self._why, lambda: {names.get(j, str(j)): t for j, t in links.traffic().items()})
            self._why = "change"
            self.neighbours.late(frozenset())
            state = self._begin(session, group)
            self._group, self.body.between_steps = group, group.board.check  # whoever is gone, nobody works on for nothing
            if self._asked is not None:
                group.ask_stop(0)
            hooks.ask_stop, hooks.last_round = group.ask_stop, lambda: group.last_round
            self._apart = Apart(self.spec, self.neighbours, group, names.get, self._missing)
            with Slow(self.spec, self.deadline, self.neighbours, group):
                state, _ = run(
                    peer(self.job.seat(me), state), self.resuming, hooks, group, start_s=hooks.now_s(), rounds0=session.round,
                    ahead=self.job.config.run.ahead, on_signal=self.on_signal,
                )  # fmt: skip
            ended = state.round >= self.job.method.rounds
            made = self._finish(group, state) if ended else None
            self._group = None
            self._part(group, ended)
            if ended:
                return made
        except PeerLost as lost:
            self._lost(lost)
        except NotBrought as error:
            self._failed += 1
            if self._failed >= _TRIES:
                raise
            self._say(f"session {session.number} ends here for this site: {error}")
        except Vain as vain:
            self._say(f"session {session.number} did not come about: {vain}")
        except RunFailed as error:
            if group is None or error is not group.board.failure:  # this site's own
                raise
            self._say(f"session {session.number} ends here: {error}")
        finally:
            self._group = None
            self.resuming.break_off()
            if group is not None:
                group.abort(RunFailed("this session is over"))
            links.close()
        self._check_signal()
        return None

    def _begin(self, session: Session, group: Group) -> State:
        """The state of this site at the start of a session."""
        me, hooks = self.client.seat, self.hooks
        held = hooks.held
        assert held is not None
        seat = self.job.seat(me)
        if me in session.donors:
            state = Snapshot.of(held.state, self.body, 0.0, 0).state
            self.body.load_state(held.body)
            self.resuming.begin(state.local or outset(seat, state))
            if kept := self.resuming.kept:
                self._say(f"goes on with round {session.round + 1} after the {kept} inner steps of it that this site has taken")
        else:
            self.resuming.begin(None)
            state = self._heal(session, held, group)
        hooks.back_to(session.round, state.tokens)
        held = Snapshot.of(state, self.body, hooks.now_s(), session.number)
        hooks.held, hooks.session = held, session.number
        with self._lock:
            self.states.forget()
            given = len(session.donors) < len(session.members) and me in session.donors
            self._session, self._opening = session, held if given else None
        if session.members[0] == me:
            absent = [j for j in range(self.job.n) if j not in session.members]
            record = {"kind": "members", "round": session.round, "worker": me, "absent": absent, "session": session.number}
            if session.number > 1:
                hooks.add("metrics.jsonl", record)
        regroup(seat, state, session.members, session.donors)
        return state

    def _heal(self, session: Session, held: Snapshot, group: Group) -> State:
        """The state of a donor."""
        me, roster = self.client.seat, self.presence.roster() or self.client.roster
        donor = roster.at(session.donors[me % len(session.donors)])
        if donor is None or donor.card.address is None:
            reachable = [m for j in session.donors if (m := roster.at(j)) is not None and m.card.address is not None]
            if not reachable:
                names = ", ".join(self.presence.names(session.donors).values())
                raise RunFailed(
                    f"{names} hold the state of the run and cannot be dialled: give all sites --relay, or these --bind and --advertise"
                )
            donor = reachable[0]
        where = self.folder.path / "taken"
        inner = self.job.config.wan.inner == "donor"

        async def get() -> None:
            await bring(self.neighbours.channel(donor), session, inner, where, donor, self.client.timeouts.connect)

        def check() -> None:
            self._check_signal()
            group.board.check()

        in_loop(get(), check=check)
        drift: Tree = master(self.body.tree) if keeps(self.spec, held, self.sessions.known(held.session + 1)) else {}
        self._failed = 0
        state = take(self.job, me, session, donor.seat, where, self.body, held, drift)
        shutil.rmtree(where, ignore_errors=True)
        own = f", and keeps its own work since round {held.state.round}" if drift else ""
        self._say(f"took the state after round {session.round} from site {donor.site}{own}")
        return state

    def _state_for(self, ask: StateAsk) -> tuple[int, Path] | None:
        """For a site that needs the state at the start of the session. In a thread of its own."""
        with self._lock:
            session, held = self._session, self._opening
        if session is None or held is None or session.number != ask.session:
            return None
        path, _ = write(self.folder.path / "given" / f"{ask.session}-{int(ask.inner)}", self.client.seat, held, inner=ask.inner)
        return held.state.round, path

    def _finish(self, group: Group, state: State) -> bool:
        """The end of the run. Whether this site made the summary."""
        hooks, folder = self.hooks, self.folder
        hooks.close()
        mine = False

        def conclude(trees: dict[int, Tree], streams: list[dict[str, bytes]]) -> str:
            nonlocal mine
            mine = True
            for name in STREAMS:
                merge(folder, name, [one[name] for one in streams if name in one])
            gone = [j for j in range(self.job.n) if j not in trees]
            write_result(self.job, "wan", folder, trees, hooks.judge, without_records=gone)
            if gone:
                self._say(f"without the records of {', '.join(self.presence.names(tuple(gone)).values())}, not there at the end")
            with suppress(RunFailed):  # for sites that come back later
                over = Plan(version=self.client.news.plan + 1, since=self.job.method.rounds, body=OVER + self.where.site)
                self.client.publish(over, self.client.timeouts.call)
            return (folder.path / "summary.json").read_text()

        summary = finish(self.job, group, hooks, state, conclude)
        if not mine:
            for name in STREAMS:
                merge(folder, name, [(hooks.records / name).read_bytes()])
            folder.write_summary(json.loads(summary))
        return mine

    def _part(self, group: Group, ended: bool) -> None:
        """The farewell. At the end of the run all is written, and a site that is gone is missed by nobody."""
        try:
            group.close()
        except RunFailed:
            if not ended:
                raise

    def _lost(self, lost: PeerLost) -> None:
        self._why = "lost"
        self._missing.lost(lost.worker, f"round {lost.round}: {lost.why}", "the others go back to the last boundary")
        self.neighbours.lost(lost.worker)

    def _after_round(self, report: Report) -> bool:
        self.client.report(report)
        if (why := self._apart.why()) and self._why != "apart":
            self._say(why)
            self._why = "apart"
        return bool(self.client.waiting) or self._asked is not None or bool(why)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)
        log.info("%s", text)
