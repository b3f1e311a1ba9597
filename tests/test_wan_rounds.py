"""Who took part in a round: one answer for all, whatever comes twice, late or not at all. And a state machine against a plain model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from coordinator_toys import X0, Desk, caller, spec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gossamer.wan.messages import Refused
from gossamer.wan.records import Ask, Commit, HandIn, Have, Plan, Publish, Share


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


ALL = {0: 100, 1: 50, 2: 25}


def test_the_first_complete_proposal_is_the_round(desk: Desk) -> None:
    desk.found()
    waiting = desk.propose("a", 0, {0: 100, 1: 50})
    assert waiting.commit is None and "seats 2 are there and not in the proposal" in waiting.why
    first = desk.propose("b", 0, ALL)
    assert first.commit is not None and first.commit.by == 1 and not first.late
    assert {s.seat: s.weight for s in first.commit.took} == ALL
    for site, took in (("a", {0: 1, 1: 1, 2: 1}), ("c", ALL), ("b", {0: 1, 1: 1})):
        assert desk.propose(site, 0, took).commit == first.commit, "whoever asks, whatever it says"
    desk.restart()
    for site in ("a", "b", "c"):
        assert desk.propose(site, 0, {0: 7, 1: 7, 2: 7}).commit == first.commit


def test_rounds_are_committed_in_order(desk: Desk) -> None:
    desk.found()
    assert desk.propose("a", 1, ALL).commit is None
    assert desk.propose("b", 0, ALL).commit is not None
    assert desk.propose("a", 1, ALL).commit is not None, "it was waiting for the one before"
    with pytest.raises(Refused, match="in round 2"):
        desk.propose("a", 99, ALL)


def test_fragments_of_a_round_have_commits_of_their_own(desk: Desk) -> None:
    desk.found()
    commits = [desk.propose("a", 0, {0: f, 1: f, 2: f}, fragment=f).commit for f in range(3)]
    assert [c.took[0].weight for c in commits if c] == [0, 1, 2]


@pytest.mark.parametrize("took", [{1: 1, 2: 1}, {0: 1, 7: 1}])
def test_proposals_that_cannot_be(desk: Desk, took: dict[int, int]) -> None:
    desk.found()
    if 0 in took:
        assert "not there" in desk.propose("a", 0, took).why
    else:
        with pytest.raises(Refused, match="its own among them"):
            desk.propose("a", 0, took)
    assert desk.state().newest is None


def test_who_heals_has_no_say(desk: Desk) -> None:
    desk.found("a", "b", of=spec(founders=2))
    desk.join("c", have=None, of=spec(founders=2))
    with pytest.raises(Refused, match="not in sync"):
        desk.propose("c", 0, ALL)
    assert "not there" in desk.propose("a", 0, ALL).why
    assert desk.propose("a", 0, {0: 1, 1: 1}).commit is not None


def test_a_death_completes_the_round_of_the_others(desk: Desk) -> None:
    desk.found()
    desk.propose("a", 0, {0: 100, 1: 50})
    desk.wait(11.0, "a", "b")
    verdict = desk.propose("b", 0, {0: 100, 1: 50})
    assert verdict.commit is not None and verdict.commit.by == 0 and verdict.commit.present == (0, 1)


def test_whom_all_others_have_lost_is_not_waited_for(desk: Desk) -> None:
    desk.found()
    assert desk.propose("a", 0, {0: 100, 1: 50}, gone=(2,)).commit is None, "the word of one is not enough"
    assert desk.propose("b", 0, {0: 100, 1: 50}, gone=(2,)).commit is not None
    late = desk.propose("c", 0, ALL)
    assert late.late and late.commit is not None and desk.state().counts["late"] == 1
    desk.propose("c", 0, ALL)
    assert desk.state().counts["late"] == 1, "counted once"


def test_two_that_lose_each_other_are_no_quorum(desk: Desk) -> None:
    two = spec(seats=2)
    desk.found("a", "b", of=two)
    assert desk.propose("a", 0, {0: 1}, gone=(1,)).commit is None
    assert desk.propose("b", 0, {1: 1}, gone=(0,)).commit is None
    desk.wait(40.0, "a")
    verdict = desk.propose("a", 0, {0: 1})
    assert verdict.commit is None and "1 sites are in sync, a round needs 2" in verdict.why


def test_after_the_deadline_a_quorum_is_enough(desk: Desk) -> None:
    desk.found("a", "b", "c", of=spec(quorum="deadline"))
    assert desk.propose("a", 0, {0: 100, 1: 50}).commit is None
    desk.wait(29.0, "a", "b", "c")
    assert desk.state().newest is None
    desk.wait(2.0, "a", "b", "c")
    assert desk.state().newest == 0
    late = desk.propose("c", 0, ALL)
    assert late.late and late.commit is not None and [s.seat for s in late.commit.took] == [0, 1]
    assert late.commit.present == (0, 1, 2), "late, but there: it takes part in the next round"
    assert desk.propose("a", 1, {0: 1}).commit is None, "less than a quorum is not enough, ever"
    desk.wait(90.0, "a", "b", "c")
    assert desk.state().newest == 0


def test_too_few_skip_the_round_where_that_is_the_policy(desk: Desk) -> None:
    desk.found("a", "b", "c", of=spec(below_min="skip"))
    desk.wait(11.0, "a")
    assert desk.propose("a", 0, {0: 1}).commit is None
    desk.wait(31.0, "a")
    verdict = desk.propose("a", 0, {0: 1})
    assert verdict.commit is not None and verdict.commit.took == () and not verdict.late
    assert desk.state().counts["skipped"] == 1 and desk.state().base == (0, 1, 2), "one is still no quorum"


def handed(desk: Desk, site: str, *commits: Commit) -> None:
    desk.coordinator.hand_in(HandIn(caller=caller(site), commits=commits))


def elected(round: int, *seats: int, weight: int = 1, by: int = 0) -> Commit:
    took = tuple(Share(seat=s, weight=weight) for s in seats)
    return Commit(round=round, fragment=0, generation=0, epoch=1, took=took, by=by, present=seats)


def test_rounds_from_the_time_without_the_coordinator_count(desk: Desk) -> None:
    desk.found("a", "b", "c", of=spec(without="elect"))
    desk.propose("a", 0, ALL)
    assert desk.propose("b", 0, ALL).commit is not None, "half of three is two"
    desk.restart()
    handed(desk, "a", elected(1, 0, 1), elected(2, 0, 1))
    handed(desk, "b", elected(2, 0, 1), elected(1, 0, 1))
    assert desk.state().newest == 2 and desk.standing("c") == "healing", "it was not with them"
    assert desk.propose("b", 2, ALL).commit == elected(2, 0, 1)
    with pytest.raises(Refused, match="the run is in round 3"):
        handed(desk, "a", elected(7, 0, 1))


def test_a_fleet_that_fell_in_two_is_told(desk: Desk) -> None:
    desk.found("a", "b", "c", of=spec(without="elect"))
    for t in range(2):
        desk.propose("a", t, ALL), desk.propose("b", t, ALL)
    handed(desk, "a", elected(1, 0, 1, 2, weight=9))
    assert desk.propose("c", 1, ALL).commit == elected(1, 0, 1, 2, weight=9), "nobody had built on the coordinator's"
    with pytest.raises(Refused, match="others have built"):
        handed(desk, "a", elected(0, 0, 1, weight=9))
    assert desk.state().counts["replaced"] == 1


def test_nobody_commits_for_a_coordinator_that_is_waited_for(desk: Desk) -> None:
    desk.found()
    with pytest.raises(Refused, match="nobody else commits"):
        handed(desk, "a", elected(0, 0, 1, 2))


def test_a_plan_is_published_once(desk: Desk) -> None:
    desk.found()
    mine, other = (Plan(version=1, since=5, body=text) for text in ("mine", "other"))
    assert desk.coordinator.publish(Publish(caller=caller("a"), plan=mine)).plan == mine
    assert desk.coordinator.publish(Publish(caller=caller("b"), plan=other)).plan == mine
    with pytest.raises(Refused, match="the next one is 2"):
        desk.coordinator.publish(Publish(caller=caller("b"), plan=Plan(version=3, since=5, body="x")))
    desk.restart()
    assert desk.coordinator.plan(caller("c")).plan == mine


def test_the_status_tells_who_lags(desk: Desk) -> None:
    desk.found()
    desk.beat("a", round=9), desk.beat("b", round=4)
    desk.wait(11.0, step_s=3.0)
    desk.join("a", boot=1)
    (run,) = desk.coordinator.status(Ask(run="demo")).runs
    assert [s.standing for s in run.sites] == ["waiting", "out", "out"] and run.counts["expiries"] == 3 and "b, c had" in run.why
    with pytest.raises(Refused, match="there are: demo"):
        desk.coordinator.status(Ask(run="other"))


def test_a_full_disk_changes_nothing(desk: Desk) -> None:
    desk.found()
    before = desk.state()
    pages = desk.db._db.execute("PRAGMA page_count").fetchone()[0]
    desk.db._db.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for k in range(200):
            desk.db.set("demo", f"key {k}", "x" * 4000)

    with pytest.raises(Refused) as refused:
        fill()
    assert refused.value.code == "disk" and refused.value.refusal.retry_s is not None

    def crowd() -> None:
        for k in range(100):
            desk.join("a", of=spec(f"run-{k}"))

    with pytest.raises(Refused, match="could not write"):
        crowd()
    assert [state.spec.run for state in desk.db.runs()] == sorted(desk.coordinator.runs)
    desk.db._db.execute("PRAGMA max_page_count = 1000000")
    assert desk.state() == before
    assert desk.propose("a", 0, ALL).commit is not None


SITES = ("a", "b", "c")


class Churn(RuleBasedStateMachine):
    """Three sites of a synchronous run join, fall silent, leave, heal, propose; the coordinator restarts. Against plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.desk = Desk(Path(self.folder.name) / "runs.db")
        self.boots = dict.fromkeys(SITES, 0)
        self.there: dict[str, str] = {}  # site -> standing
        self.due_s: dict[str, float] = {}
        self.ever: set[str] = set()
        self.commits: dict[tuple[int, int], Commit] = {}
        self.epoch = 0
        self.begun = False
        self.with_state: dict[str, bool] = {}

    def teardown(self) -> None:
        self.desk.close()
        self.folder.cleanup()

    @property
    def now_s(self) -> float:
        return self.desk.clock.now_s

    def synced(self) -> set[str]:
        return {s for s, standing in self.there.items() if standing == "synced"}

    def expect(self, true: bool) -> None:
        assert true

    def look(self) -> None:
        """Takes over what the model leaves open: who founds. All else it foretells."""
        members = self.desk.state().members if "demo" in self.desk.coordinator.runs else ()
        nobody = not self.synced()
        for member in members:
            if member.standing == "synced" and self.there.get(member.site) != "synced":
                assert nobody, "in sync without a donor"
                assert self.with_state.get(member.site), "in sync without a state"
                assert not self.begun or member.site in self.ever, "one that never was in sync began a run again"
                self.there[member.site] = "synced"
            elif member.standing == "healing" and self.there.get(member.site) == "waiting":
                assert nobody
                self.there[member.site] = "healing"
        if nobody and self.synced():
            self.begun = True
            self.ever |= self.synced()

    @rule(site=st.sampled_from(SITES), again=st.booleans(), with_state=st.booleans())
    def join(self, site: str, again: bool, with_state: bool) -> None:
        state = self.desk.state() if "demo" in self.desk.coordinator.runs else None
        begun, before = state is not None and state.founded is not None, self.synced()
        if not again:
            self.boots[site] += 1
        have = Have(round=state.next_round, digest="aa") if with_state and state is not None and begun else X0 if with_state else None
        try:
            self.desk.join(site, boot=self.boots[site], have=have)
        except Refused as refused:
            self.expect(refused.code == "flapping")
            if not again:
                self.boots[site] -= 1
            return
        self.due_s[site] = self.now_s + 10.0
        if site not in self.there or not again:
            self.there[site] = "healing" if begun and before - {site} else "waiting"
            self.with_state[site] = have is not None
        self.look()

    @rule(site=st.sampled_from(SITES), stale=st.booleans())
    def beat(self, site: str, stale: bool) -> None:
        boot = self.boots[site] - stale
        try:
            self.desk.beat(site, boot=max(boot, 0))
            assert (site in self.there and boot == self.boots[site]) or boot < 0
            self.due_s[site] = self.now_s + 10.0
        except Refused as refused:
            self.expect(refused.code in ("unknown", "expired", "superseded"))
            self.expect(site not in self.there or boot != self.boots[site])

    @rule(site=st.sampled_from(SITES))
    def leave(self, site: str) -> None:
        self.desk.coordinator.leave(caller(site, self.boots[site]))
        self.there.pop(site, None)
        self.due_s.pop(site, None)
        self.look()

    @rule(seconds=st.sampled_from((0.5, 3.0, 4.9)))
    def time_passes(self, seconds: float) -> None:
        self.desk.clock.now_s += seconds
        self.desk.coordinator.tick()
        for site in [s for s, due_s in self.due_s.items() if due_s <= self.now_s]:
            del self.there[site], self.due_s[site]
        self.look()

    @rule()
    def restart(self) -> None:
        if "demo" not in self.desk.coordinator.runs:
            return
        before = self.desk.state()
        self.desk.restart()
        after = self.desk.state()
        assert after.model_copy(update={"counts": {}}) == before.model_copy(update={"counts": {}}), "nothing is lost but the last counts"
        self.due_s = dict.fromkeys(self.there, self.now_s + 10.0)

    @precondition(lambda self: self.synced())
    @rule(site=st.sampled_from(SITES), donor=st.sampled_from((*SITES, None)), behind=st.sampled_from((0, 0, 0, 1)))
    def heal(self, site: str, donor: str | None, behind: int) -> None:
        round = max(0, self.desk.state().next_round - behind)
        may = (
            self.there.get(site) == "synced"
            or (site in self.there and donor is not None and self.there.get(donor) == "synced" and round == self.desk.state().next_round)
        )  # fmt: skip
        try:
            self.desk.heal(site, round, donor, boot=self.boots[site])
            assert may
            self.there[site] = "synced"
            self.ever.add(site)
        except Refused:
            assert not may

    @precondition(lambda self: self.synced())
    @rule(
        site=st.sampled_from(SITES),
        seats=st.none() | st.sets(st.integers(0, 2), min_size=1),
        back=st.sampled_from((0, 0, 0, -1, 1, 2)),
        data=st.data(),
    )
    def propose(self, site: str, seats: set[int] | None, back: int, data: Any) -> None:
        state = self.desk.state()
        if seats is None:
            seats = set(state.synced)
        round, weight = max(0, state.next_round - back), data.draw(st.integers(0, 9))
        seat_of = {m.site: m.seat for m in state.members}
        place = (state.generation, round)
        try:
            verdict = self.desk.propose(site, round, dict.fromkeys(sorted(seats), weight), boot=self.boots[site])
        except Refused as refused:
            self.expect(self.there.get(site) != "synced" or seat_of[site] not in seats or refused.code == "stale")
            return
        assert self.there.get(site) == "synced"
        if place in self.commits:
            assert verdict.commit == self.commits[place], "one answer, for ever"
            assert verdict.late == (seat_of[site] not in {s.seat for s in verdict.commit.took})
        elif verdict.commit is not None:
            there = {seat_of[s] for s in self.synced()}
            took = {s.seat for s in verdict.commit.took}
            assert took == there and len(there) >= 2 and set(verdict.commit.present) == there
            assert round == state.next_round
        else:
            complete = {seat_of[s] for s in self.synced()} == seats and len(seats) >= 2 and round == state.next_round
            assert not complete

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if "demo" not in self.desk.coordinator.runs:
            return
        state = self.desk.state()
        assert state.epoch >= self.epoch
        self.epoch = state.epoch
        assert {m.site: m.standing for m in state.living} == self.there
        for place, commit in self.commits.items():
            assert self.desk.db.commit("demo", place[0], place[1], 0) == commit
        if state.newest is not None and (found := self.desk.db.commit("demo", state.generation, state.newest, 0)) is not None:
            self.commits[state.generation, state.newest] = found


Churn.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestChurn = Churn.TestCase
