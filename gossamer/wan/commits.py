"""Who took part in a round of a synchronous method: one answer for all. No clock, no IO.

Every site proposes whom it has heard; the first proposal that is complete becomes the commit of the round, and every other proposer gets
that one, whenever it asks. A proposal is complete when all it took are in sync and there, at least `Spec.min_sites` of them, and it took

- with quorum "all": everybody who is in sync and there, but for those whom every other site has lost;
- with quorum "deadline": the same; or, once the deadline is over, whatever it took.

Weights are whole numbers (tokens), so that all compute with the same ones. With `Spec.without = "elect"`, half of those who were in sync at
the commit before must have proposed as well, and where a site stands in for the coordinator, more than half. A site proposes a round to one
of the two only, so they cannot both decide on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gossamer.wan.membership import Membership
from gossamer.wan.messages import Refused
from gossamer.wan.records import Commit, Propose, Share, Verdict

Place = tuple[int, int]
"""Round and fragment."""

WINDOW = 2
"""Rounds before and after the next one that are talked about. What is older is on disk, what is later is a mistake."""


class Book:
    """The open proposals of one run, in the order of arrival. It is not kept: after a restart the sites propose again."""

    def __init__(self) -> None:
        self._open: dict[Place, dict[int, Propose]] = {}
        self._since_s: dict[Place, float] = {}

    def add(self, state: Membership, seat: int, said: Propose, now_s: float) -> None:
        """A site in sync proposes. Its later word for the same place replaces its earlier one, in the earlier one's turn.

        Raises:
            Refused: garbage: no seat twice, its own among them, a round that can be; stale: the round is over and was never committed.
        """
        seats = [share.seat for share in said.took]
        if len(set(seats)) < len(seats) or seat not in seats:
            raise Refused("garbage", f"seat {seat} proposes seats {seats}: expected each once, its own among them")
        if said.round > state.next_round + WINDOW:
            raise Refused("garbage", f"seat {seat} proposes round {said.round}, the fleet is in round {state.next_round}")
        if said.round < max(state.founded or 0, state.next_round - WINDOW):
            raise Refused("stale", f"round {said.round} is over without a commit, the fleet is in round {state.next_round}")
        place = (said.round, said.fragment)
        self._open.setdefault(place, {})[seat] = said
        self._since_s.setdefault(place, now_s)

    def waited_s(self, place: Place, now_s: float) -> float:
        """Since the first proposal."""
        return now_s - self._since_s.get(place, now_s)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where there are proposals without a commit, rounds rising."""
        return tuple(sorted(self._open))

    def decide(self, state: Membership, place: Place, *, over: bool, elected: bool = False) -> Verdict:
        """The commit, if one of the proposals is complete; else what is missing.

        Args:
            over: the deadline is over.
            elected: a site decides in place of the coordinator.
        """
        open_, synced, spec = self._open.get(place, {}), state.synced, state.spec
        base = frozenset(state.base) - frozenset(state.left)
        if (elected or spec.without == "elect") and base:
            there = len(base & synced & open_.keys())
            if 2 * there < len(base) or (elected and 2 * there == len(base)):
                return Verdict(
                    commit=None, why=f"{there} of the {len(base)} sites that were at the last commit have proposed: too few to go on"
                )
        if len(synced) < spec.min_sites:
            why = f"{len(synced)} sites are in sync, a round needs {spec.min_sites}"
            if spec.below_min == "skip" and over and synced & open_.keys():
                return Verdict(commit=self._commit(state, place, (), min(synced & open_.keys())), why=why)
            return Verdict(commit=None, why=why)
        lost = frozenset(s for s in synced if self._lost_by_all(open_, s, synced))
        why = "nobody has proposed"
        for seat, said in open_.items():
            took = frozenset(share.seat for share in said.took)
            if seat not in synced:
                why = f"seat {seat} is not there any more"
            elif took - synced:
                why = f"seats {_few(took - synced)} of the proposal are not there any more: propose again without them"
            elif len(took) < spec.min_sites:
                why = f"the proposal has {len(took)} sites, a round needs {spec.min_sites}"
            elif took >= synced - lost or (over and spec.quorum == "deadline"):
                return Verdict(commit=self._commit(state, place, said.took, seat))
            else:
                why = f"seats {_few(synced - lost - took)} are there and not in the proposal"
        return Verdict(commit=None, why=why)

    def close(self, place: Place) -> dict[int, Propose]:
        """Forgets what was proposed up to this round: it is committed, or over. Those of this place are given back."""
        mine = self._open.pop(place, {})
        self._since_s.pop(place, None)
        for old in [p for p in self._open if p[0] < place[0] - WINDOW]:
            del self._open[old], self._since_s[old]
        return mine

    def forget(self) -> None:
        """The run has begun again."""
        self._open.clear()
        self._since_s.clear()

    @staticmethod
    def _lost_by_all(open_: Mapping[int, Propose], seat: int, synced: frozenset[int]) -> bool:
        others = synced - {seat}
        return bool(others) and all(j in open_ and seat in open_[j].gone for j in others)

    @staticmethod
    def _commit(state: Membership, place: Place, took: tuple[Share, ...], by: int) -> Commit:
        return Commit(
            round=place[0],
            fragment=place[1],
            generation=state.generation,
            epoch=state.epoch,
            took=tuple(sorted(took, key=lambda share: share.seat)),
            by=by,
            present=tuple(sorted(state.synced)),
        )


def answer(commit: Commit, seat: int) -> Verdict:
    """What a proposer gets of a commit."""
    return Verdict(commit=commit, late=bool(commit.took) and seat not in {share.seat for share in commit.took})


def _few(seats: frozenset[int]) -> str:
    listed = sorted(seats)
    return ", ".join(map(str, listed[:8])) + (" ..." if len(listed) > 8 else "")
