"""Sessions, whatever is cut, lost, late, killed and started again, with a coordinator that dies, stands still, or loses its
file, and sites that stand in for it, in whatever order.

Held against what must be true of all of them together: at most one session of a number is ever entered; none below `min_sites`; none that
does not go on from the one before, nor from a state that its donor has not; no round is lost that more than half of a session's processes
hold; nowhere two runs; and when all is well again, all come together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from session_world import World, world

from gossamer.wan.deadlines import Timeouts

T = Timeouts.of(30.0)
MEMORY = Path("/dev/shm")  # nothing here is about disks
STEPS = 60


class Trouble:
    """What may happen, at random."""

    def __init__(self, w: World, random: Random) -> None:
        self.w, self.random = w, random
        self.weights: dict[Callable[[], None], float] = {
            self.settle: 8, self.wait: 5, self.asks: 4, self.phases: 4, self.rounds: 4, self.ask: 3, self.half_a_round: 3, self.join: 3,
            self.back: 3, self.night: 2, self.divide: 2, self.dark: 2, self.light: 2, self.crash: 2, self.checkpoint: 2,
            self.coordinator_returns: 2, self.restart: 1, self.tear: 1, self.coordinator_dies: 1, self.late: 1, self.freeze: 0.7,
            self.leave: 0.5, self.unsure: 0.5,
        }  # fmt: skip

    def happens(self) -> None:
        self.random.choices(list(self.weights), list(self.weights.values()))[0]()

    def some(self, share: float) -> set[int]:
        return {j for j in range(self.w.n) if self.random.random() < share}

    def pairs(self, cut: Callable[[int, int], bool]) -> None:
        self.w.cut = {frozenset((i, j)) for i, j in itertools.combinations(range(self.w.n), 2) if cut(i, j)}

    def one(self) -> Any:
        return self.w.procs[self.random.choice(sorted(self.w.procs))] if self.w.procs else None

    # ---- sites

    def ask(self) -> None:
        if proc := self.one():
            proc.fate = self.random.choice(("well", "well", "lost", "slow", "unheard"))
            proc.step()
            proc.fate = "well"

    def asks(self) -> None:
        for proc in list(self.w.procs.values()):
            if self.random.random() < 0.7:
                proc.step()

    def settle(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.w.settle()

    def phases(self) -> None:
        for proc in list(self.w.procs.values()):
            for phase in ("bind", "enter", "heal", "work", "complete"):
                if self.random.random() < 0.6:
                    getattr(proc, phase)()

    def rounds(self) -> None:
        self.w.everybody("work", "complete")

    def half_a_round(self) -> None:
        self.w.everybody("work")
        for proc in list(self.w.procs.values()):
            if self.random.random() < 0.5:
                proc.complete()

    def checkpoint(self) -> None:
        if proc := self.one():
            self.w.disks[proc.seat] = proc.have

    def crash(self) -> None:
        if proc := self.one():
            self.w.kill(proc.seat)

    def back(self) -> None:
        for seat in sorted(self.some(0.7)):
            self.w.start(seat)

    def restart(self) -> None:
        for seat in sorted(self.some(0.4)):
            self.w.kill(seat)
            self.w.start(seat)

    def leave(self) -> None:
        if proc := self.one():
            self.w.depart(proc.seat)

    # ---- lines

    def divide(self) -> None:
        part = self.some(0.5)
        self.pairs(lambda i, j: (i in part) != (j in part))

    def tear(self) -> None:
        self.pairs(lambda i, j: self.random.random() < 0.25)

    def join(self) -> None:
        self.w.cut = set()

    def dark(self) -> None:
        self.w.dark = self.some(0.5)

    def light(self) -> None:
        self.w.dark = set()

    def unsure(self) -> None:
        self.w.unsure = self.some(0.3) if self.random.random() < 0.4 else set()

    def late(self) -> None:
        self.w.deliver()

    # ---- the coordinator, and time

    def coordinator_dies(self) -> None:
        self.w.coordinator_dies()

    def freeze(self) -> None:
        self.w.frozen = self.w.up

    def coordinator_returns(self) -> None:
        self.w.coordinator_returns(without_file=self.random.random() < 0.3)

    def wait(self) -> None:
        self.w.pass_time(self.random.choice((1.0, 5.0, T.lease + 4.0, T.elect + 6.0, 40.0)))

    def night(self) -> None:
        """The fleet falls in two, and loses the coordinator, or a part of it does, for long."""
        (self.divide if self.random.random() < 0.7 else self.tear)()
        self.dark()
        if self.random.random() < 0.3:
            self.coordinator_dies()
        self.w.pass_time(T.elect + 6.0)
        for _ in range(2):
            self.w.settle()


def begun(w: World) -> World:
    for seat in range(w.n):
        w.start(seat)
    for _ in range(3):
        w.settle()
        w.pass_time(2.0)
    assert len(w.running) == 1
    return w


def walk(seed: int, folder: Path, **changes: Any) -> int:
    """One way that things may go, and then all is well again. How many sessions were entered."""
    random = Random(seed)
    n = random.choice((2, 3, 4, 4, 5, 5))
    founders = random.choice((n, n, max(2, n - 2)))
    least = min(random.choice((2, 2, 3)), founders)
    quorum, wait = random.choice(("all", "all", "deadline")), random.random() < 0.25
    settings = {"min_sites": least, "founders": founders, "quorum": quorum} | ({"without": "wait"} if wait else {}) | changes
    with world(folder / f"{seed}.db", n, **settings) as w:
        begun(w)
        trouble = Trouble(w, random)
        for _ in range(STEPS):
            trouble.happens()
        assert w.heals(), f"they do not come together: {w.desk.why()}"
        return len(w.history)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not MEMORY.is_dir():
        yield tmp_path
        return
    made = MEMORY / tmp_path.name
    made.mkdir()
    yield made
    for file in made.iterdir():
        file.unlink()
    made.rmdir()


@pytest.mark.parametrize("part", range(4))
def test_there_is_one_run_whatever_happens(part: int, folder: Path) -> None:
    assert sum(walk(seed, folder) for seed in range(50 * part, 50 * part + 50)) > 100


def test_there_is_one_run_of_gossip(folder: Path) -> None:
    assert sum(walk(seed, folder, synchronous=False) for seed in range(50)) > 100


# ---- one by one


@pytest.fixture
def five(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "runs.db", 5) as w:
        yield begun(w)


def divided(w: World, *part: int) -> None:
    w.cut = {frozenset((i, j)) for i, j in itertools.combinations(range(w.n), 2) if (i in part) != (j in part)}


def settled(w: World, times: int = 3) -> list[tuple[int, tuple[int, ...], int | None]]:
    """Number, members and who opened it, of the sessions that run."""
    for _ in range(times):
        w.settle()
    return [(s.number, s.members, s.by) for s in w.running]


def test_the_larger_part_goes_on_without_the_coordinator(five: World) -> None:
    five.coordinator_dies()
    divided(five, 0, 1)
    five.pass_time(T.elect + 4.0)
    assert settled(five) == [(2, (2, 3, 4), 2)]
    five.coordinator_returns(without_file=False)
    five.pass_time(4.0)
    assert five.desk.state().session == five.running[0] and five.desk.state().inside == {2, 3, 4}
    five.cut = set()
    while len(five.running) != 1 or five.running[0].number == 2:
        five.pass_time(2.0)
        five.settle()
    session = five.running[0]
    assert (session.members, session.donors, session.by) == ((0, 1, 2, 3, 4), (2, 3, 4), None)


def test_an_answer_that_got_lost_is_not_given_twice(five: World) -> None:
    """The coordinator opens a session and dies before most have heard of it."""
    for seat in (1, 2, 3, 4):
        five.procs[seat].fate = "unheard"
        five.procs[seat].step()
    five.procs[0].step()
    session = five.procs[0].session
    assert session is not None and session.number == 2
    five.coordinator_dies()
    five.pass_time(T.elect + 4.0)
    for seat in (1, 2, 3, 4):
        five.procs[seat].step()
    five.everybody("bind", "enter")
    assert five.running == [session], "the one who stands in knows of it"


def elected(w: World, *members: int) -> None:
    """These are in a session of their own, without the coordinator, and go on."""
    w.coordinator_dies()
    divided(w, *members)
    w.pass_time(T.elect + 4.0)
    assert settled(w) == [(2, members, members[0])]


def test_a_session_that_nobody_came_to_is_nobodys_past(five: World) -> None:
    five.coordinator_dies()
    divided(five, 0, 1, 2)
    five.pass_time(T.elect + 4.0)
    for seat in (0, 1, 2, 0, 1):
        five.procs[seat].step()
    assert {five.procs[s].session.members for s in (0, 1, 2)} == {(0, 1, 2)}  # and then the line to site c breaks
    divided(five, 0, 1)
    five.pass_time(T.lease + 2.0)
    assert settled(five, 8) == [(3, (2, 3, 4), 2)]


def test_a_session_that_may_have_been_entered_is_somebodys(five: World) -> None:
    """All of a session have come to it; who of them has entered it, and goes on, the others cannot know."""
    five.coordinator_dies()
    divided(five, 0, 1, 2)
    five.pass_time(T.elect + 4.0)
    for seat in (0, 1, 2, 0, 1):
        five.procs[seat].step()
    five.everybody("bind")
    divided(five, 0, 1)
    five.pass_time(T.lease + 2.0)
    assert settled(five, 8) == [], "c, d and e are three of five, and yet not the run"
    five.cut = set()
    for _ in range(20):
        five.pass_time(2.0)
        five.settle()
    assert [s.members for s in five.running] == [(0, 1, 2, 3, 4)] and five.running[0].by == 0, "two stood in, and now one does"


def test_who_has_forgotten_where_it_was_is_reminded_by_its_disk(five: World) -> None:
    """Sites a, b and c have gone on by themselves. Then c starts again, from an old state, and meets d and e at the coordinator."""
    elected(five, 0, 1, 2)
    five.kill(2)
    five.start(2)
    divided(five, 0, 1)
    five.dark = {0, 1}
    five.coordinator_returns(without_file=False)
    five.pass_time(T.lease + 40.0)
    assert settled(five) == [(3, (0, 1), 0)], "c, d and e are three of five, and yet not the run"
    assert "too few to go on" in five.desk.why()
    furthest = five.procs[0].have.round
    assert five.heals() and five.procs[3].have.round > furthest


def test_a_coordinator_without_its_file_does_not_go_on_with_half(tmp_path: Path) -> None:
    with world(tmp_path / "runs.db", 4) as w:
        begun(w)
        divided(w, 0, 1)
        w.dark = {2, 3}
        w.pass_time(T.lease + 4.0)
        assert settled(w) == [(2, (0, 1), None)], "half, with the coordinator, is enough"
        w.coordinator_dies()
        w.dark = {0, 1}
        w.coordinator_returns(without_file=True)
        w.pass_time(T.lease + 40.0)
        assert settled(w) == [(2, (0, 1), None)] and "too few" in w.desk.why(), "the others had been told the same, without it"
        assert w.heals()


def test_states_on_disk_of_a_session_that_the_coordinator_missed_are_waited_for(five: World) -> None:
    """All who were in it have died: two with its state on disk, one with an older one."""
    elected(five, 0, 1, 2)
    for seat in (0, 1):
        five.disks[seat] = five.procs[seat].have
    round = five.disks[0].round
    for seat in (0, 1, 2):
        five.kill(seat)
    five.cut = set()
    five.start(2)
    five.coordinator_returns(without_file=False)
    five.pass_time(T.lease + 60.0)
    assert settled(five) == []
    five.start(0)
    five.pass_time(4.0)
    assert five.heals() and five.history[-1].round >= round


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_site_that_was_cut_off_comes_back_while_the_coordinator_is_away(synchronous: bool, tmp_path: Path) -> None:
    with world(tmp_path / "runs.db", 5, synchronous=synchronous) as w:
        begun(w)
        divided(w, 4)
        w.pass_time(T.lease + 4.0)
        settled(w)
        if synchronous:
            assert settled(w) == [(2, (0, 1, 2, 3), None)]
        else:
            assert all(w.procs[s].session.number == 1 for s in range(4)), "nobody stops for it"
        w.coordinator_dies()
        w.pass_time(T.elect + 4.0)
        before = w.procs[0].have.round
        w.cut = set()
        ((_, members, by),) = settled(w, 8)
        assert members == (0, 1, 2, 3, 4) and by == 0 and w.history[-1].round >= before


def test_gossip_opens_no_session_without_more_than_half(tmp_path: Path) -> None:
    """A part of it may go on as it was; with whom it began. Only a new session needs the others."""
    with world(tmp_path / "runs.db", 5, synchronous=False) as w:
        begun(w)
        w.coordinator_dies()
        divided(w, 0, 1)
        w.pass_time(T.elect + 4.0)
        settled(w)
        assert {p.session.number for p in w.procs.values()} == {1}
        w.kill(4)
        w.cut = {frozenset((i, j)) for i, j in itertools.combinations(range(5), 2) if {i, j} != {2, 3}}
        settled(w)
        w.cut |= {frozenset((2, 3))}
        settled(w)
        assert w.history[-1].number == 1, "nobody is left to be with"
        w.cut = {frozenset((i, j)) for i, j in itertools.combinations(range(5), 2) if not {i, j} <= {2, 3}}
        w.pass_time(T.lease)
        settled(w, 6)
        assert w.history[-1].number == 1, "two of five"
        assert w.heals()
