"""Slow sites in synchronous methods: when the others stop waiting, and what becomes of a slow site's work when it is back."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coordinator_toys import spec
from lockstep import Lockstep
from small_runs import settings
from toy import ToyBody

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.wan.slow import Slow
from gossamer.app.wan.spec import spec_of
from gossamer.app.wan.state import keeps
from gossamer.core.errors import BadInput
from gossamer.core.plan import uniform
from gossamer.core.ranges import Ranges
from gossamer.core.tree import master
from gossamer.real.board import Board, PeerLost
from gossamer.recipes import Setting, diloco
from gossamer.wan.deadlines import Deadline
from gossamer.worker.regroup import regroup, taken
from gossamer.worker.seat import Seat


class Field:
    """A group of three sites, as the watch for slow ones sees it."""

    def __init__(self, ranks: tuple[int, ...] = (1, 1, 1), **changes: object) -> None:
        self.late: list[frozenset[int]] = []
        self.board, self.ready_s = Board(), defaultdict(dict)  # type: ignore[var-annotated]
        notes = SimpleNamespace(ready_at=lambda round: dict(self.ready_s[round]))
        self.group: Any = SimpleNamespace(board=self.board, notes=notes, members=tuple(range(sum(ranks))), me=0)
        self.deadline = Deadline(0.2, 6.0)
        neighbours, places = SimpleNamespace(late=self.late.append), Ranges(ranks, {})
        self.slow = Slow(spec(**changes), self.deadline, neighbours, self.group, places)  # type: ignore[arg-type]

    def fails(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while self.board.failure is None and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.board.failure is not None


SHORT = {"floor_s": 0.2, "min_sites": 2, "lease_s": 0.1}


def test_who_is_past_the_deadline_is_not_waited_for() -> None:
    field = Field(quorum="deadline", **SHORT)
    with field.slow:
        field.ready_s[0].update({0: time.monotonic(), 1: time.monotonic()})
        assert field.fails(30.0)
    assert isinstance(field.board.failure, PeerLost) and field.board.failure.worker == 2
    assert field.late == [frozenset({2})] and "past the deadline of 0.2 s" in field.board.failure.why


def test_a_site_is_ready_with_all_of_its_ranks_and_this_one_with_its_first() -> None:
    field = Field((2, 1, 2), quorum="deadline", **SHORT)
    with field.slow:
        field.ready_s[0].update(dict.fromkeys((0, 2, 4), time.monotonic()))  # neither 1, of this site, nor 3
        assert field.fails(30.0)
    assert field.late == [frozenset({2})] and isinstance(field.board.failure, PeerLost) and field.board.failure.worker == 3


@pytest.mark.parametrize(
    ("changes", "ready"),
    [
        ({"quorum": "all"}, (0, 1)),
        ({"quorum": "deadline", "min_sites": 3}, (0, 1)),  # without it they would be too few
        ({"quorum": "deadline"}, (1, 2)),  # this site is the slow one: it has nothing to say of others
        ({"quorum": "deadline"}, (0,)),  # two are slow: the rest is too few
        ({"quorum": "deadline"}, (0, 1, 2)),
        ({"quorum": "deadline"}, ()),
    ],
)
def test_who_may_not_be_left_behind_is_waited_for(changes: dict[str, object], ready: tuple[int, ...]) -> None:
    field = Field(**(SHORT | changes))
    threads = threading.active_count()
    with field.slow:
        field.ready_s[0].update({j: time.monotonic() for j in ready})
        assert not field.fails(0.8)
    assert field.late == [] and threading.active_count() <= threads


def test_the_deadline_follows_what_was_seen() -> None:
    field = Field(quorum="deadline", **SHORT)
    with field.slow:
        for round in range(8):
            field.board.round = round
            now_s = time.monotonic()
            field.ready_s[round].update({0: now_s - 3.0, 1: now_s, 2: now_s - 1.5})
            time.sleep(0.15)
        assert field.deadline.seconds > 1.5, "that is how long they take"
        field.board.round = 8
        field.ready_s[8].update({0: time.monotonic() - 1.0, 1: time.monotonic() - 1.0})
        assert not field.fails(0.4), "and nothing is late yet"


@pytest.mark.parametrize("late", ["drop", "keep"])
def test_late_work_is_kept_or_dropped(late: str) -> None:
    """With `keep`, what a site has done since the boundary that it had is in the first mean after its return."""
    m = diloco(Setting(uniform(3, steps=2, batch=2, sequence=ToyBody.LENGTH), rounds=4, seed=3), outer_lr=1.0, outer_momentum=0.0)
    world = Lockstep(m)
    world.run()
    at: list[Any] = world.snapshots[2]
    donor, body = at[0]
    mine, late_body = world.snapshots[1][2]
    y = {name: x - 0.01 for name, x in mine.x.items()}  # where it had come to, a round late
    keeps = late == "keep"
    back = Lockstep(m)
    import copy

    state = copy.deepcopy(donor)
    taken(state, mine, master(y) if keeps else {}, 16)
    for i, one in ((0, at[0][0]), (1, at[1][0]), (2, state)):
        regroup(Seat(i, m, back.layout, run_id=7), one, [0, 1, 2], [0, 1])
    start = {name: (state.local or state.x)[name] for name in state.x}
    assert all(torch.allclose(start[name], x - 0.01 * keeps, atol=1e-6) for name, x in donor.x.items())
    assert [s.tokens for s in state.streams] == [16 if keeps else 0]
    final = back.run(resume=[at[0], at[1], (state, late_body)])
    assert all(torch.equal(final[0].x[name], final[2].x[name]) for name in final[0].x)
    assert body is not None


@pytest.mark.parametrize(
    ("late", "session", "after", "kept"),
    [
        ("keep", 1, 3, True),  # the others went on from the boundary that it has
        ("keep", 1, 2, True),  # or from an earlier one: its last round is nobody else's
        ("keep", 1, 4, False),  # they have completed its round: what it said in it is in their state
        ("keep", 1, None, False),
        ("keep", 0, 3, False),  # it never had the state of the run
        ("drop", 1, 3, False),
    ],
)
def test_work_that_the_others_have_already_is_not_said_again(late: str, session: int, after: int | None, kept: bool) -> None:
    held: Any = SimpleNamespace(state=SimpleNamespace(round=3), session=session)
    opened: Any = None if after is None else SimpleNamespace(round=after)
    assert keeps(spec(late=late), held, opened) is kept


@pytest.mark.parametrize(
    "more",
    [{"method__name": '"gasloc"', "method__topology": '"one_peer"'}, {"method__name": '"diloco"', "method__overlap": 1.0}],
)
def test_late_work_is_kept_only_where_it_can_be(more: dict[str, object], tmp_path: Path) -> None:
    sets = settings(tmp_path, fleet__name='"uniform-4"', wan__late='"keep"', **more)
    with pytest.raises(BadInput, match=r"wan\.late = 'keep' is for synchronous methods without overlap"):
        spec_of(resolve(load([], sets)), SimpleNamespace(content_hash="0"))  # type: ignore[arg-type]
    assert spec_of(resolve(load([], [*sets, 'wan.late="drop"'])), SimpleNamespace(content_hash="0")).late == "drop"  # type: ignore[arg-type]
