"""Commits of rounds with or without the coordinator (synchronous methods).

    rounds = Rounds(client, living=lambda: group.living, ask=control.ask)
    verdict = rounds.commit(7, [Share(seat=0, weight=4096), ...], timeout_s=600)

While the coordinator is away: with `Spec.without = "wait"` the round waits for it. With `"elect"`, once it has been away for
`Timeouts.elect`, the lowest site that is there and in sync stands in for it. It decides by the same rules (`commits.Book`), and only with
proposals of more than half of those who were in sync at the commit before. Nobody is asked to vote: all know who is lowest. A site asks one
of the two about a round, and goes to another only when that one is gone or says so. What was decided is handed to the coordinator, when it
is back, before anything else is.

What this cannot see: a coordinator that has committed a round and was lost, or cut off, before it could tell. The others then decide that
round themselves, and theirs counts; a site that was told the coordinator's is told so, and heals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from gossamer.core.errors import RunFailed
from gossamer.wan import membership
from gossamer.wan.calls import Away
from gossamer.wan.client import CoordinatorClient
from gossamer.wan.commits import WINDOW, Book, Place, answer
from gossamer.wan.deadlines import Deadline
from gossamer.wan.membership import Membership
from gossamer.wan.messages import Refused, pack, unpack
from gossamer.wan.records import Commit, Elect, Propose, Share, Verdict

_KEPT_ROUNDS = 64
_POLL_S = 0.05


class Rounds:
    """The commits of one site's run.

    Args:
        living: seats of the sites that this one can talk to, itself included.
        ask: sends bytes to a seat and returns its answer, what its `serve` made of them. Raises RunFailed when it cannot.
    """

    def __init__(self, client: CoordinatorClient, living: Callable[[], Iterable[int]], ask: Callable[[int, bytes], bytes]) -> None:
        self._client, self._living, self._ask = client, living, ask
        self._lock = threading.Lock()
        self._known: dict[Place, Commit] = {}
        self._mine: list[Commit] = []
        """Made without the coordinator, which has not been told."""
        self._book = Book()
        self._deadline = Deadline(client.spec.floor_s, client.spec.spread)
        self._asked: tuple[Place, int] | None = None
        """The round about which this site has asked another, and which."""

    def commit(self, round: int, took: Sequence[Share], *, fragment: int = 0, gone: Sequence[int] = (), timeout_s: float) -> Verdict:
        """Who took part in a round, as all sites are told. Without a commit after `timeout_s`, the verdict says what is missing.

        Raises:
            Refused: this site is out of the run, not in sync, or on the wrong side of a fleet that fell in two.
        """
        client, place, until_s = self._client, (round, fragment), time.monotonic() + timeout_s
        verdict = Verdict(commit=None, why="the coordinator is away")
        while verdict.commit is None and (left_s := until_s - time.monotonic()) > 0:
            proposal = Propose(caller=client.caller, round=round, fragment=fragment, took=tuple(took), gone=tuple(gone))
            if (leader := self._leader(place)) is not None:
                verdict = self._of_site(leader, proposal)
                if verdict.ask_coordinator:
                    self._asked = None
                if verdict.commit is None:
                    time.sleep(min(_POLL_S, left_s))
                continue
            try:
                self._hand_in(left_s)
                verdict = client.propose(round, took, fragment=fragment, gone=gone, timeout_s=min(left_s, client.timeouts.lease))
            except Away as error:
                verdict = Verdict(commit=None, why=str(error))
        if verdict.commit is not None:
            self._learn([verdict.commit])
        return verdict

    def serve(self, data: bytes) -> bytes:
        """The answer to another site's `ask`. Any thread may call it.

        Raises:
            Refused: (garbage) those bytes are no question.
        """
        request = unpack(Elect, data)
        member = next((m for m in self._client.roster.members if m.site == request.propose.caller.site), None)
        if member is None or member.boot != request.propose.caller.boot or request.propose.caller.run != self._client.spec.run:
            raise Refused("unknown", f"site {request.propose.caller.site} is not one of run {self._client.spec.run}")
        self._learn(request.known)
        return pack(self._decide(member.seat, request.propose))

    def _leader(self, place: Place) -> int | None:
        """Who stands in for the coordinator; None: nobody, ask the coordinator itself."""
        client = self._client
        if client.spec.without != "elect":
            return None
        living = set(self._living()) & set(client.roster.synced)
        if self._asked is not None and self._asked[0] == place and self._asked[1] in living:
            return self._asked[1]
        away_s = client.away_s
        return min(living, default=None) if away_s is not None and away_s >= client.timeouts.elect else None

    def _of_site(self, leader: int, proposal: Propose) -> Verdict:
        self._asked = ((proposal.round, proposal.fragment), leader)
        if leader == self._client.seat:
            return self._decide(leader, proposal)
        with self._lock:
            known = tuple(self._known[p] for p in sorted(self._known) if p[0] >= proposal.round - WINDOW)
        try:
            verdict = unpack(Verdict, self._ask(leader, pack(Elect(propose=proposal, known=known))))
        except RunFailed as error:
            return Verdict(commit=None, why=f"seat {leader}, which stands in for the coordinator, does not answer ({error})")
        if verdict.commit is not None:
            self._elected(verdict.commit)
        return verdict

    def _decide(self, seat: int, proposal: Propose) -> Verdict:
        """As the one who stands in, if this site is."""
        place, now_s = (proposal.round, proposal.fragment), time.monotonic()
        leader = self._leader(place)
        with self._lock:
            if (commit := self._known.get(place)) is not None:
                return answer(commit, seat)
            if self._client.away_s is None:
                self._book.close(place)
                return Verdict(commit=None, why="the coordinator is there: ask it", ask_coordinator=True)
            if leader != self._client.seat:
                who = "nobody does yet" if leader is None else f"seat {leader} does"
                return Verdict(commit=None, why=f"seat {self._client.seat} does not stand in for the coordinator: {who}")
            state = self._state()
            self._book.add(state, seat, proposal, now_s)
            waited_s = self._book.waited_s(place, now_s)
            verdict = self._book.decide(state, place, over=waited_s >= self._deadline.seconds, elected=True)
            if verdict.commit is None:
                return verdict
            self._book.close(place)
        self._elected(verdict.commit)
        return answer(verdict.commit, seat)

    def _state(self) -> Membership:
        """The run as this site knows it: the last roster, less those who are gone."""
        roster, living = self._client.roster, set(self._living())
        latest = max(self._known, default=None)
        base = self._known[latest].present if latest is not None else (roster.turn.present if roster.turn else roster.synced)
        state = Membership(
            spec=self._client.spec,
            seed=self._client.seed,
            epoch=roster.epoch,
            generation=roster.generation,
            founded=roster.founded,
            members=roster.members,
            turn=roster.turn,
            base=base,
            newest=latest[0] if latest is not None else self._client.news.newest,
        )
        return membership.expire(state, [m.site for m in roster.members if m.seat not in living])

    def _learn(self, commits: Iterable[Commit]) -> None:
        with self._lock:
            for commit in commits:
                if commit.generation == self._client.roster.generation:
                    self._known.setdefault((commit.round, commit.fragment), commit)
            newest = max(self._known, default=(0, 0))[0]
            for old in [
                place
                for place in self._known
                if place[0] < newest - _KEPT_ROUNDS or self._known[place].generation != self._client.roster.generation
            ]:
                del self._known[old]

    def _elected(self, commit: Commit) -> None:
        self._learn([commit])
        with self._lock:
            if commit not in self._mine:
                self._mine.append(commit)

    def _hand_in(self, timeout_s: float) -> None:
        with self._lock:
            commits = list(self._mine)
        if commits:
            self._client.hand_in(commits, timeout_s)
            with self._lock:
                self._mine = [commit for commit in self._mine if commit not in commits]
