"""The agreement on a last round: all stop at one boundary, however far ahead some are."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from net_toys import Body, Hooks, all_but, in_threads, talk

from gossamer.real import Group, run
from gossamer.real.board import Board
from gossamer.real.notes import Notes
from gossamer.worker.effects import Stop


def ring(me: int, n: int) -> Sequence[int]:
    return sorted({(me - 1) % n, (me + 1) % n})


@pytest.mark.parametrize("seed", range(6))
def test_all_stop_at_one_boundary_of_gossip(seed: int) -> None:
    """On a ring with one slow worker, those across are several rounds ahead when a worker asks."""
    n, rng = 6, random.Random(seed)
    asker, at = rng.randrange(n), rng.randrange(1, 8)

    def job(group: Group) -> tuple[int, list[int], int | None, int | None]:
        hooks = Hooks(lambda round: group.ask_stop(15) if group.me == asker and round == at else None)
        state, _ = run(talk(group.me, lambda _: ring(group.me, n), 10_000), Body(0.01 if group.me == 0 else 0.0), hooks, group)
        return state.round, hooks.rounds, group.last_round, group.stopped_by

    results = in_threads(n, job)
    last = results[0][0]
    assert last > at
    for state_round, rounds, agreed, signal in results:
        assert (state_round, agreed, signal) == (last, last, 15)
        assert rounds == list(range(1, last + 1))


def test_all_ask_at_once() -> None:
    def job(group: Group) -> int:
        hooks = Hooks(lambda round: group.ask_stop() if round == 3 else None)
        return run(talk(group.me, lambda _: all_but(group.me, 4), 10_000), Body(), hooks, group)[0].round

    assert len(set(in_threads(4, job))) == 1


def test_a_stop_of_the_hooks_is_a_request_that_the_hooks_see_granted() -> None:
    """Only worker 1's hooks say Stop; every worker's hooks know the last boundary when they are at it, so that they can save."""
    saved: dict[int, int] = {}

    def job(group: Group) -> int:
        def at_boundary(round: int) -> Stop | None:
            if group.last_round == round:
                saved[group.me] = round
            return Stop() if group.me == 1 and round >= 4 else None

        return run(talk(group.me, lambda _: all_but(group.me, 3), 10_000), Body(0.001), Hooks(at_boundary), group)[0].round

    rounds = in_threads(3, job)
    assert len(set(rounds)) == 1 and rounds[0] > 4
    assert saved == dict.fromkeys(range(3), rounds[0])


def test_a_request_after_the_last_round_changes_nothing() -> None:
    def job(group: Group) -> tuple[int, int | None]:
        hooks = Hooks(lambda round: group.ask_stop(2) if round == 5 else None)
        state, _ = run(talk(group.me, lambda _: all_but(group.me, 2), 5), Body(), hooks, group)
        return state.round, group.stopped_by

    assert in_threads(2, job) == [(5, None)] * 2


class Lonely:
    """A wire to workers that never say anything."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def close(self) -> None: ...


def test_no_boundary_is_passed_between_publishing_and_knowing() -> None:
    """The step of the proof that a race would break: once p is published, boundary p waits for the agreement."""
    notes = Notes(Lonely(), Board())  # type: ignore[arg-type]
    notes.others = (1,)  # a second worker, whose p is put in by hand
    notes._send = lambda *a, **k: None  # type: ignore[method-assign]
    notes.start_at(10)
    assert not notes.cross(11)
    notes.ask_stop(2)
    while not notes._last:
        time.sleep(0.001)
    assert notes._last == {0: 12} and notes.last_round is None
    notes._last[1] = 14
    assert [notes.cross(r) for r in (12, 13, 14)] == [False, False, True]
    assert notes.last_round == 14
    notes.others = ()
    notes.hang_up()
