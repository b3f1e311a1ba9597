"""One site of a wide-area run: it joins, and goes from session to session until the run ends or it leaves.

A session is a stretch of the run with fixed members, in which the ordinary program runs over a group as everywhere else. When a member is
lost (synchronous methods), leaves, or a site comes, the sites go back to the last boundary that one of them holds, and open the next one.
"""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import suppress
from typing import Any

from rich.console import Console

from gossamer.app.job import Job
from gossamer.app.progress import Progress
from gossamer.app.tracking.loggers import Loggers
from gossamer.app.wan.apart import Apart, Missing
from gossamer.app.wan.bound import Bound
from gossamer.app.wan.end import conclude
from gossamer.app.wan.folder import SiteFolder
from gossamer.app.wan.holding import Holding, links_of, part
from gossamer.app.wan.host import Site
from gossamer.app.wan.logs import LogPlace
from gossamer.app.wan.meeting import Meeting, Vain
from gossamer.app.wan.ops import SiteOps
from gossamer.app.wan.out import Out
from gossamer.app.wan.places import address_of, by_site, names_of, places_of
from gossamer.app.wan.presence import Presence, Where
from gossamer.app.wan.ranks import Ranks
from gossamer.app.wan.slow import Slow
from gossamer.app.wan.spec import spec_of
from gossamer.app.wan.state import Snapshot, bring, keeps, part_of_mark
from gossamer.app.wan.tiers import Hosting
from gossamer.app.wan.waiting import Entrance
from gossamer.core.errors import RunFailed
from gossamer.net.crew import RankLost
from gossamer.real.board import PeerLost
from gossamer.real.group import Group
from gossamer.train import checkpoint
from gossamer.train.data import Corpus
from gossamer.wan.deadlines import Deadline
from gossamer.wan.links.link import Traffic
from gossamer.wan.links.wire import Links
from gossamer.wan.loop import in_loop
from gossamer.wan.roster.ended import OVER
from gossamer.wan.roster.records import Card, Member, Plan, Report, Session
from gossamer.wan.roster.sessions import Sessions
from gossamer.wan.state_service import NotBrought, StateServer
from gossamer.worker.state import State

log = logging.getLogger(__name__)
_TRIES = 3
"""Times in a row that a state may fail to come."""
STOPPING = "stopping at the end of the round; once more ends at once"


def goes_on_from(folder: SiteFolder) -> str:
    """What a site that leaves has in its folder, to be said after what it has done."""
    found = checkpoint.newest(folder.checkpoints) if folder.there else None
    if found is None:
        return ""
    return f": there is a checkpoint of round {found} in {folder.path}, and the same command with --out {folder.path} goes on from there"


class Leaving(Exception):
    """This site was asked to leave, by a signal."""

    def __init__(self, signal: int) -> None:
        self.signal = signal


class SiteRun:
    """One site, from its start to its end: `take_part`, then `close`.

    Raises:
        BadInput: what was given cannot be.
    """

    def __init__(self, job: Job, where: Where, corpus: Corpus, place: LogPlace, ranks: Ranks) -> None:
        self.job, self.where, self.corpus = job, where, corpus
        self.places, self.ranks = places_of(job), ranks
        self.spec = spec_of(job, corpus)
        self._console = Console(emoji=False, highlight=False, soft_wrap=True)
        self._asked: int | None = None
        self._group: Group | None = None
        self._apart: Apart
        self._signalled = False
        self._why, self._failed = "start", 0
        self.ops = SiteOps(where.site, self.spec.run, where.metrics, place)
        self.holding: Holding | None = None
        self.loggers: Loggers | None = None
        self.hosting: Hosting | None = None
        self.states = StateServer(lambda ask: None if self.holding is None else self.holding.state_for(ask))
        self.out = Out(where.site)
        self.presence = Presence(self.spec, where, [self.states.handlers()], self.places, self.ranks, self.out.say)
        self.client, self.neighbours = self.presence.client, self.presence.neighbours
        self.sessions = Sessions(self.client, alive=self.neighbours.alive, gone=self.neighbours.gone, ask=self.neighbours.ask)
        self.neighbours.on_ask = self.sessions.serve
        self.sessions.on_missed = lambda: self.neighbours.late(frozenset())  # it was this site that was late
        self.ops.coordinator(lambda: self.client.there)
        self.deadline = Deadline(self.spec.floor_s, self.spec.spread)
        self._missing = Missing(self._say, self.presence.called)
        self.entrance = Entrance(self.client, self.sessions, where, self._say, self._missing, self._check)
        self.folder: SiteFolder

    # ---- life

    def take_part(self, folder: SiteFolder) -> bool:
        """Joins, and goes through the sessions. Whether this site made the summary."""
        self.folder = folder
        timeouts = self.client.timeouts
        self._say(f"site {self.where.site} of run {self.spec.run}: {timeouts.line()}")
        if self.where.time_outs:
            self._say(timeouts.table())
        self.client.seat = -1 if folder.seat is None else folder.seat
        bound = Bound(folder.path, self._say)
        self.sessions.remember(bound.read(), bound.keep)
        self.entrance.join()
        self.presence.joined(self._check)
        me, found = self.client.seat, checkpoint.latest(folder.checkpoints)
        if self.job.fleet.ranks[me] != self.ranks.size:
            raise RunFailed(
                f"seat {me} has {self.job.fleet.ranks[me]} ranks, and site {self.where.site} runs {self.ranks.size}: check wan.sites"
            )
        asked = self.ranks.start(me, folder.path, found, self.presence.roster)
        self.holding = holding = Holding(self.job, self.corpus, me, self.ranks.site, folder, found, self._progress, self._after_round)
        hooks = holding.hooks
        hooks.trouble, hooks.told = self._say, self._told
        self.loggers = Loggers.of(self.job, folder.path, me=me, site=self.where.site, run=self.spec.run, say=self._say)
        hooks.went_back = self.loggers.back_to
        if self.job.servers:
            self.hosting = Hosting(Site(self.job, self.presence, self.corpus, folder, self._links, self._say))
            self.hosting.load(found)
            hooks.beside = self.hosting.save
        self.ranks.asked = self._leave_for
        self.ranks.started(asked, holding, self._check_signal)
        with holding.progress:
            try:
                if folder.there:
                    folder.begin(me, self._names())
                    holding.go_on()
                while True:
                    session = self.entrance.open(self.ranks.settle(self._check_signal, timeouts.deadline))
                    folder.begin(me, self._names())
                    if (made := self._train(session, holding)) is not None:
                        self.client.leave()
                        self.ranks.save()
                        if made:
                            self.loggers.rest(folder.read_lines("metrics.jsonl"), told=me)
                        return made
            except Leaving:
                if folder.there:
                    if self.hosting:  # its servers have gone on since the last boundary
                        hooks.save(again=True)
                    self.ranks.save()
                    folder.was_stopped(checkpoint.newest(folder.checkpoints), "the same gossamer wan join with --out")
                self.client.leave(2.0 if self.client.there else 0.5)
                self._say(
                    f"site {self.where.site} has left run {self.spec.run} after round {holding.held.state.round}{goes_on_from(folder)}"
                )
                raise
            except RunFailed as error:
                self.neighbours.ends = lambda: True
                if self.out.because(error):
                    if folder.there:
                        self.ranks.save()
                        kept = f"site {self.where.site} keeps its state after round {holding.held.state.round}"
                        self._say(f"{kept}: {self.out.goes_on()}")
                    self.out.check()
                raise
            finally:
                if folder.there:
                    hooks.close()
                    shutil.rmtree(folder.path / "given", ignore_errors=True)

    def _progress(self, held: Snapshot) -> Progress:
        title, rounds, state = f"{self.spec.run} at {self.where.site}", self.job.method.rounds, held.state
        return Progress(rounds, title, first_round=state.round, first_tokens=state.tokens, console=self._console)

    def on_signal(self, number: int) -> None:
        """Asks to leave, at the end of the round; a second time, at once."""
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        self._leave_for(number)

    def _leave_for(self, number: int) -> None:
        """A signal to this process, or to another rank of the site."""
        if self._asked is None:
            self._asked = number
            if (group := self._group) is not None:
                group.ask_stop(0)
                # Not from here, which may be within a print that the signal has interrupted.
                threading.Thread(target=self._say, args=(STOPPING,), daemon=True).start()

    def close(self) -> None:
        """Closes all connections."""
        self.presence.close()
        self.ops.close()
        if self.loggers is not None:
            self.loggers.close()

    def _check(self) -> None:
        """What ends this site's waiting."""
        self._check_signal()
        self.ranks.check()

    def _check_signal(self) -> None:
        self.out.check()
        if self._asked is not None:
            raise Leaving(self._asked)

    # ---- one session

    def _train(self, session: Session, holding: Holding) -> bool | None:
        """Runs the program in a session. None: it ended before the run did."""
        ranks, places, names = self.ranks, self.places, self.presence.names(session.members)
        ranks.open(session, self.client.roster, self.presence.inner)
        links, hosting = self._links(holding.number, session), self.hosting
        group: Group | None = None
        parted = False
        self._say(f"session {session.number}, from round {session.round}: {', '.join(names[j] for j in session.members)}")
        try:
            meeting = Meeting(session, self.presence, self.sessions, links, self._check, places, ranks)
            group = meeting.group(self.job, self.corpus, hosting, holding.held.session)
            self.out.ends(group.board)
            self.sessions.entered(session)
            self._missing.met(session.members)
            self.ops.session(session, self._why, lambda: self._traffic(links, names))
            self._why = "change"
            self.neighbours.late(frozenset())
            state = self._begin(session, holding, group)
            if hosting:
                hosting.begin(session, state.x, holding.hooks.now_s())
            self._group = group
            holding.into(group, ranks.check_with(group.board))
            if self._asked is not None:
                group.ask_stop(0)
            self._apart = Apart(self.spec, self.neighbours, group, names.get, self._missing, places)
            with Slow(self.spec, self.deadline, self.neighbours, group, places):
                state = holding.run(session, group, state, self.on_signal)
            ended = state.round >= self.job.method.rounds
            made = self._finish(group, state, holding) if ended else None
            self._group = None
            part(group, ended)
            parted = True
            if ended:
                return made
        except PeerLost as lost:
            self.out.check()
            ranks.end(lost)
            self._lost(places.workers[lost.worker], lost)
        except NotBrought as error:
            self._failed += 1
            if self._failed >= _TRIES:
                raise
            self._say(f"session {session.number} ends here for this site: {error}")
        except Vain as vain:
            self.out.check()
            self._say(f"session {session.number} did not come about: {vain}")
        except RunFailed as error:
            self.out.check()
            if hosting and (why := hosting.bereft(error, group)):
                self._why = "lost"
                self._say(f"{why} (round {holding.held.state.round})")
            elif group is None or error is not group.board.failure or isinstance(error, RankLost):  # this site's own
                raise
            else:
                self._say(f"session {session.number} ends here: {error}")
        finally:
            self._group = None
            holding.resuming.break_off()
            if not parted:
                ranks.end(RunFailed("the session is over"))
            if group is not None:
                group.abort(RunFailed("this session is over"))
            if hosting:
                hosting.end(parted)
            links.close()
        self._check_signal()
        return None

    def _links(self, number: int, session: Session) -> Links:
        """Connections of a rank or a server of this site in a session."""
        links = links_of(self.job, number, self.spec.run, session, self.presence.port, self.presence.access, self.client.timeouts)
        self.presence.watch(links, session.members)
        return links

    def _traffic(self, links: Links, names: dict[int, str]) -> dict[str, Traffic]:
        return self.hosting.traffic(links, self.places, names) if self.hosting else by_site([links.traffic()], self.places, names)

    def _begin(self, session: Session, holding: Holding, group: Group) -> State:
        """The state of this site at the start of a session."""
        me, held, hooks = holding.me, holding.held, holding.hooks
        own = me in session.donors or (self.hosting is not None and self.hosting.was_in(held.session))
        donor = None if own else self._heal(session, holding, group)
        late = donor is not None and self.ranks.even and keeps(self.spec, held, self.sessions.known(held.session + 1))
        self.ranks.begin(None if donor is None else donor.seat, late)
        state, kept = holding.begin(session, None if donor is None else donor.seat, late, self.states.forget)
        mark = self.ranks.mark(part_of_mark(holding.seat, state), self._check_signal)
        if session.digest not in (None, mark):
            raise RunFailed(f"the state of this site is {mark}, that of the session is {session.digest}: it is not gone on with")
        if donor is not None:
            shutil.rmtree(holding.taken, ignore_errors=True)
            since = f", and keeps its own work since round {held.state.round}" if late else ""
            self._say(f"took the state after round {session.round} from site {donor.site}{since}")
        elif kept:
            again = f"the {kept} inner steps of it that this site has taken since the last boundary, and does not take again"
            self._say(f"goes on with round {session.round + 1} after {again}")
        if session.members[0] == me:
            absent = [j for j in range(self.job.n) if j not in session.members]
            record = {"kind": "members", "round": session.round, "worker": me, "absent": absent, "session": session.number}
            if session.number > 1:
                hooks.add("metrics.jsonl", record)
        return state

    def _heal(self, session: Session, holding: Holding, group: Group) -> Member:
        """Brings the state of a donor. Which one."""
        me, roster = holding.me, self.presence.roster() or self.client.roster
        donor = roster.at(session.donors[me % len(session.donors)])
        if donor is None or donor.card.address is None:
            reachable = [m for j in session.donors if (m := roster.at(j)) is not None and m.card.address is not None]
            if not reachable:
                names = ", ".join(self.presence.names(session.donors).values())
                raise RunFailed(
                    f"{names} hold the state of the run and cannot be dialled: give all sites --relay, or these --bind and --advertise"
                )
            donor = reachable[0]
        inner = self.job.config.wan.inner == "donor"
        found = donor
        cards = [Card(address=address_of(donor.card, rank, donor.site)) for rank in range(self.job.fleet.ranks[donor.seat])]

        async def get() -> None:
            channels = [self.neighbours.channel(found.model_copy(update={"card": card})) for card in cards]
            await bring(channels, session, inner, holding.taken, found, self.client.timeouts.connect)

        def check() -> None:
            self._check()
            group.board.check()

        in_loop(get(), check=check)
        self._failed = 0
        return donor

    def _finish(self, group: Group, state: State, holding: Holding) -> bool:
        """The end of the run. Whether this site made the summary."""

        def missing(gone: list[int]) -> None:
            self._say(f"without the records of {', '.join(self.presence.names(tuple(gone)).values())}, not there at the end")

        def made() -> None:
            with suppress(RunFailed):  # for sites that come back later
                over = Plan(version=self.client.news.plan + 1, since=self.job.method.rounds, body=OVER + self.where.site)
                self.client.publish(over, self.client.timeouts.call)

        return conclude(self.job, group, self.folder, holding.hooks, state, missing, made, self._names())

    def _names(self) -> list[str]:
        """Of the workers: their sites, as far as these have come."""
        roster = self.presence.roster() or self.client.roster
        return names_of(self.job, {member.seat: member.site for member in roster.members})

    def _lost(self, worker: int, lost: PeerLost) -> None:
        self._why = "lost"
        if worker == self.client.seat:
            self.ranks.mourn()
            self._say(f"the ranks of this site have lost each other (round {lost.round}: {lost.why}): it goes back to the last boundary")
            return
        self._missing.lost(worker, f"round {lost.round}: {lost.why}", "the others go back to the last boundary")
        self.neighbours.lost(worker)

    def _after_round(self, report: Report) -> bool:
        self.client.report(report)
        if (why := self._apart.why()) and self._why != "apart":
            self._say(why)
            self._why = "apart"
        return bool(self.sessions.waiting) or self._asked is not None or bool(why)

    def _told(self, record: dict[str, Any]) -> None:
        self.ops.note(record)
        if self.loggers is not None:
            self.loggers.add(record)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)
        log.info("%s", text)
