"""When gossip's session ends for a site that has lost others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.app.wan_apart import Apart


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


def made(*, synchronous: bool = False) -> tuple[Apart, Others, Any]:
    others, group = Others(), SimpleNamespace(members=(0, 1, 2, 3), living=(0, 1, 2, 3))
    spec: Any = SimpleNamespace(synchronous=synchronous, min_sites=2)
    return Apart(spec, others, group, {0: "lyon", 1: "oslo"}.get), others, group  # type: ignore[arg-type]


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
