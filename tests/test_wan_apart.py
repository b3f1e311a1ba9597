"""When gossip's session ends for a site that has lost others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.app.wan.apart import Apart, Missing
from gossamer.core.ranges import Ranges
from gossamer.real.board import Board


class Others:
    """Those whom the site reaches beside its session."""

    def __init__(self) -> None:
        self.reached: set[int] = {0, 1, 2}
        self.doubted: list[int] = []

    def lost(self, seat: int) -> None:
        self.doubted.append(seat)
        self.reached.discard(seat)

    def alive(self) -> frozenset[int]:
        return frozenset(self.reached)


NAMES = {0: "lyon", 1: "oslo", 2: "porto"}


def called(seat: int) -> str:
    return f"site {NAMES[seat]}"


def made(*, synchronous: bool = False, missing: Missing | None = None, ranks: tuple[int, ...] | None = None) -> tuple[Apart, Others, Any]:
    board = Board(survives=True, me=3)
    everybody = tuple(range(4 if ranks is None else sum(ranks)))
    others, group = Others(), SimpleNamespace(members=everybody, living=everybody, board=board)
    spec: Any = SimpleNamespace(synchronous=synchronous, min_sites=2)
    places = Ranges(ranks or (1,) * 4, {})
    apart = Apart(spec, others, group, NAMES.get, missing or Missing(lambda text: None, called), places)  # type: ignore[arg-type]
    return apart, others, group


def test_a_loss_ends_nothing_as_long_as_enough_are_left() -> None:
    apart, others, group = made()
    assert not apart.why()
    group.living = (2, 3)
    assert not apart.why()
    assert not apart.why()
    assert sorted(others.doubted) == [0, 1]  # once each, so that only an answer from now on counts


def test_who_is_there_again_is_gone_for() -> None:
    apart, others, group = made()
    group.living = (1, 2, 3)
    assert not apart.why()
    others.reached.add(0)
    assert apart.why() == "there again: lyon"


def test_sites_of_several_ranks_are_lost_and_back_as_one() -> None:
    apart, others, group = made(ranks=(2, 3, 1))
    group.living = (2, 3, 4, 5)
    assert not apart.why() and others.doubted == [0]
    group.living = (5,)
    assert "1 of the sites of this session are left" in apart.why() and others.doubted == [0, 1]


def test_servers_are_no_sites() -> None:
    """They have higher numbers, and are in the processes of sites."""
    said: list[str] = []
    board = Board(survives=True, me=3)
    others, group = Others(), SimpleNamespace(members=(0, 1, 2, 3, 4, 5), living=(3, 4), board=board)
    spec: Any = SimpleNamespace(synchronous=False, min_sites=2)
    apart = Apart(spec, others, group, NAMES.get, Missing(said.append, called), Ranges((1,) * 4, {}))  # type: ignore[arg-type]
    assert "1 of the sites" in apart.why() and sorted(others.doubted) == [0, 1, 2]
    board.gone(5, "it failed")
    assert not said
    board.gone(1, "it failed")
    assert said == ["site oslo is gone (it failed): the others go on without it"]


def test_nobody_trains_below_the_least_number_of_sites() -> None:
    apart, _, group = made()
    group.living = (3,)
    assert "needs 2" in apart.why()


@pytest.mark.parametrize("living", [(3,), (0, 1, 2, 3)])
def test_synchronous_sessions_end_by_the_loss_itself(living: tuple[int, ...]) -> None:
    apart, others, group = made(synchronous=True)
    group.living = living
    assert not apart.why()
    assert not others.doubted


def test_each_loss_and_each_return_is_said_once_and_at_once() -> None:
    said: list[str] = []
    missing = Missing(said.append, called)
    apart, _, group = made(missing=missing)
    group.board.gone(0, "its process has ended")
    group.board.gone(0, "again")
    assert said == ["site lyon is gone (its process has ended): the others go on without it"]
    group.living = (1, 2, 3)
    assert not apart.why() and len(said) == 1
    missing.met((1, 2, 3))
    assert len(said) == 1
    missing.met((0, 1, 2, 3))
    missing.met((0, 1, 2, 3))
    assert said[1:] == ["site lyon is back"]
    apart, _, group = made(missing=missing)  # the next session
    group.board.gone(1, "it failed")
    group.board.gone(0, "its process has ended")
    assert said[2:] == [
        f"site {name} is gone ({why}): the others go on without it"
        for name, why in (("oslo", "it failed"), ("lyon", "its process has ended"))
    ]


def test_who_was_lost_before_anybody_looked_is_said_too() -> None:
    said: list[str] = []
    board = Board(survives=True, me=3)
    board.gone(1, "it failed")
    group: Any = SimpleNamespace(members=(0, 1, 2), living=(0, 2), board=board)
    Apart(SimpleNamespace(synchronous=False, min_sites=2), Others(), group, NAMES.get, Missing(said.append, called), Ranges((1,) * 3, {}))  # type: ignore[arg-type]
    assert said == ["site oslo is gone (it failed): the others go on without it"]


def test_what_the_group_does_about_a_death_it_still_does() -> None:
    learned: list[frozenset[int]] = []
    board = Board(survives=True, me=3)
    board.on_death = learned.append
    group: Any = SimpleNamespace(members=(0, 1, 2), living=(0, 1, 2), board=board)
    spec: Any = SimpleNamespace(synchronous=False, min_sites=2)
    Apart(spec, Others(), group, NAMES.get, Missing(lambda text: None, called), Ranges((1,) * 3, {}))  # type: ignore[arg-type]
    board.gone(2, "it failed")
    assert learned == [frozenset({2})]


def test_who_leaves_dies_and_comes_back_is_said_once_each() -> None:
    said: list[str] = []
    missing = Missing(said.append, called)
    missing.met((0, 1))
    missing.met((0, 1, 2))
    missing.met((0, 2))  # oslo has left
    missing.lost(2, "round 7: cut", "the others go on")
    missing.met((0,))
    missing.met((0, 1, 2))
    missing.met((0, 1, 2))
    assert said == ["site oslo has left", "site porto is gone (round 7: cut): the others go on", "site oslo is back", "site porto is back"]
