"""Sites, a coordinator and the lines between them, on one clock of our own: whatever is cut, lost, killed, in whatever order.

Held against what must be true of all of them together: one answer for one session; never two sessions that run at once; none below
`min_sites`; none without a donor that held the state of the run; a coordinator that is started again is the one that was killed.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from coordinator_toys import caller
from election_toys import SITES, Fleet, T
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gossamer.wan.records import Have

MEMORY = Path("/dev/shm")


class Churn(RuleBasedStateMachine):
    changes: ClassVar[dict[str, Any]] = {}

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)  # nothing here is about disks
        self.fleet = Fleet(Path(self.folder.name) / "runs.db", **self.changes)
        for _ in range(2):
            self.all_ask()
        self.meet()
        self.time_passes(1.0)
        assert [s.number for s in self.fleet.running] == [1]

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.close()
            self.folder.cleanup()

    @rule(seat=st.integers(0, len(SITES) - 1), lost=st.booleans())
    def ask(self, seat: int, lost: bool) -> None:
        if seat in self.fleet.sites:
            self.fleet.sites[seat].propose(lost)

    @rule()
    def all_ask(self) -> None:
        for site in list(self.fleet.sites.values()):
            site.propose(lost=False)

    @rule()
    def meet(self) -> None:
        for session in {s.opened for s in self.fleet.sites.values() if s.opened is not None}:
            self.fleet.meet(session)

    @rule(times=st.integers(1, 3))
    def settle(self, times: int) -> None:
        for _ in range(times):
            self.all_ask()
            self.meet()

    @rule(cut=st.sets(st.integers(0, len(SITES) - 1), max_size=2), dark=st.sets(st.integers(0, len(SITES) - 1)), up=st.booleans())
    def night(self, cut: set[int], dark: set[int], up: bool) -> None:
        """The fleet falls in two, and loses the coordinator, or a part of it does, for long."""
        self.time_passes(1.0)
        self.cut_in_two(cut)
        self.fleet.dark, self.fleet.up = dark, self.fleet.up and up
        self.time_passes(T.elect + 6.0)
        self.settle(2)

    @rule(back=st.sets(st.integers(0, len(SITES) - 1), min_size=2))
    def power_cut(self, back: set[int]) -> None:
        """All die; some come back, with what they had on disk."""
        self.rounds(1)
        for seat in range(len(SITES)):
            self.checkpoint(seat)
            self.rounds(int(seat == 2))
            self.die(seat)
        for seat in sorted(back):
            self.come_back(seat)
        self.time_passes(T.lease + 4.0)
        self.settle(1)
        self.time_passes(40.0)
        self.settle(1)

    @rule(n=st.integers(1, 4))
    def rounds(self, n: int) -> None:
        for session in self.fleet.running:
            if all(self.fleet.linked(i, j) for i, j in pairwise(session.members)):
                for m in session.members:
                    have = self.fleet.sites[m].have
                    assert have is not None
                    done = have.round + n
                    self.fleet.sites[m].have = Have(round=done, digest=f"{done:x}{session.number:04x}", session=session.number)

    @rule(seat=st.integers(0, len(SITES) - 1))
    def checkpoint(self, seat: int) -> None:
        if seat in self.fleet.sites:
            self.fleet.disks[seat] = self.fleet.sites[seat].have

    @rule(seat=st.integers(0, len(SITES) - 1))
    def die(self, seat: int) -> None:
        if self.fleet.sites.pop(seat, None) is not None and self.fleet.up and seat not in self.fleet.dark:
            self.fleet.desk.coordinator.doubt(caller(SITES[seat], self.fleet.boots[seat]))

    @rule(seat=st.integers(0, len(SITES) - 1))
    def come_back(self, seat: int) -> None:
        if seat not in self.fleet.sites:
            self.fleet.boots[seat] += 1
            self.fleet.start(seat)

    @rule(seat=st.integers(0, len(SITES) - 1))
    def leave(self, seat: int) -> None:
        if seat in self.fleet.sites and self.fleet.up and seat not in self.fleet.dark:
            self.fleet.desk.coordinator.leave(caller(SITES[seat], self.fleet.boots[seat]))
            del self.fleet.sites[seat]

    @rule(cut=st.sets(st.integers(0, len(SITES) - 1), max_size=3))
    def cut_in_two(self, cut: set[int]) -> None:
        self.fleet.side = {s: int(s in cut) for s in range(len(SITES))}

    @rule(dark=st.sets(st.integers(0, len(SITES) - 1)))
    def lines_to_the_coordinator(self, dark: set[int]) -> None:
        self.fleet.dark = dark

    @rule(seconds=st.sampled_from((1.0, 5.0, T.lease + 4.0, T.elect + 6.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    @rule()
    def coordinator_dies(self) -> None:
        self.fleet.up = False

    @rule(frozen=st.booleans())
    def coordinator_is_back(self, frozen: bool) -> None:
        """Killed and started again; or only stopped, with all that it had in memory."""
        if self.fleet.up:
            return
        if not frozen:
            before = {run: r.state.model_copy(update={"counts": {}}) for run, r in self.fleet.desk.coordinator.runs.items()}
            now_s = self.fleet.clock.now_s
            self.fleet.desk.restart()
            self.fleet.clock.now_s = now_s
            after = {run: r.state.model_copy(update={"counts": {}}) for run, r in self.fleet.desk.coordinator.runs.items()}
            assert after == before
        self.fleet.up = True

    @invariant()
    def one_run(self) -> None:
        if not hasattr(self, "fleet"):
            return
        running = self.fleet.running
        assert len(running) <= 1, f"two at once: {running}"
        numbers = [s.number for s in self.fleet.ran]
        assert len(numbers) == len(set(numbers)), "two sessions of one number ran"
        for session in self.fleet.ran:
            assert len(session.members) >= 2
        for older, newer in pairwise(self.fleet.ran):
            assert newer.number > older.number
            assert newer.generation > older.generation or newer.round >= older.round


Churn.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestElections = Churn.TestCase


class Patient(Churn):
    """The same where all wait for the coordinator."""

    changes: ClassVar[dict[str, Any]] = {"without": "wait", "quorum": "deadline"}


Patient.TestCase.settings = Churn.TestCase.settings
TestPatience = Patient.TestCase


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    made = Fleet(tmp_path / "runs.db")
    for _ in range(2):
        for site in made.sites.values():
            site.propose(lost=False)
    for session in {s.opened for s in made.sites.values() if s.opened is not None}:
        made.meet(session)
    assert len(made.running) == 1
    yield made
    made.close()


def ask_all(fleet: Fleet) -> None:
    for site in list(fleet.sites.values()):
        site.propose(lost=False)
    for session in {s.opened for s in fleet.sites.values() if s.opened is not None}:
        fleet.meet(session)


def test_the_larger_part_goes_on_without_the_coordinator(fleet: Fleet) -> None:
    fleet.pass_time(2.0)
    fleet.up = False
    fleet.side = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    fleet.pass_time(T.elect + 4.0)
    for _ in range(2):
        ask_all(fleet)
    (session,) = fleet.running
    assert (session.number, session.members, session.by) == (2, (2, 3, 4), 2)
    fleet.up = True
    fleet.pass_time(4.0)
    assert fleet.desk.state().session == session and fleet.desk.state().inside == {2, 3, 4}
    fleet.side = dict.fromkeys(fleet.side, 0)
    for _ in range(4):
        if fleet.ran[-1] == session:
            ask_all(fleet)
    (session,) = fleet.running
    assert session.members == (0, 1, 2, 3, 4) and session.by is None and session.donors == (0, 1, 2, 3, 4)


def test_an_answer_that_got_lost_is_not_given_twice(fleet: Fleet) -> None:
    """The coordinator opens a session and dies before most have heard of it."""
    fleet.pass_time(2.0)
    for seat in (1, 2, 3, 4):
        fleet.sites[seat].propose(lost=True)
    fleet.sites[0].propose(lost=False)
    session = fleet.sites[0].opened
    assert session is not None and session.number == 2
    fleet.up = False
    fleet.pass_time(T.elect + 4.0)
    for _ in range(2):
        ask_all(fleet)
    assert fleet.ran[1:] == [session], "the one who stands in knows of it"


def test_a_session_that_nobody_entered_makes_no_majority(fleet: Fleet) -> None:
    fleet.pass_time(2.0)
    fleet.up, fleet.side = False, {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    fleet.pass_time(T.elect + 4.0)
    for _ in range(2):
        for seat in (0, 1, 2):
            fleet.sites[seat].propose(lost=False)
    assert {fleet.sites[s].opened.members for s in (0, 1, 2)} == {(0, 1, 2)}  # and then the line to site c breaks
    fleet.side = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    for _ in range(4):
        fleet.pass_time(T.lease + 2.0)
        ask_all(fleet)
    assert [s.members for s in fleet.ran] == [(0, 1, 2, 3, 4), (2, 3, 4)]
