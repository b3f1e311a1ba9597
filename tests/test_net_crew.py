"""The ranks of one worker: gates that all pass or none, orders, and the end of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from gossamer.core.errors import BadInput, RunFailed
from gossamer.net.crew import Ended, Follow, Lead, RankLost
from gossamer.net.start import world_of
from gossamer.real.board import Board, PeerLost

SIZE = 3


@contextmanager
def crew(orphaned: Callable[[], None] = lambda: None):
    """All sides of a crew in this process."""
    store: Any = HashStore()
    found: dict[int, Any] = {}
    lead = threading.Thread(target=lambda: found.update({0: Lead(store, SIZE, local=True, timeout_s=20)}))
    lead.start()
    for rank in range(1, SIZE):
        found[rank] = Follow(store, rank, {"name": f"rank {rank}"}, orphaned=orphaned)
    lead.join(20)
    try:
        yield [found[rank] for rank in range(SIZE)]
    finally:
        for side in found.values():
            side.close()


def through(sides: list[Any], fails: dict[int, int], gates: int) -> list[tuple[int, BaseException | None]]:
    """All ranks go through so many gates; those in `fails` fail before theirs. Gates that each has passed, and what stopped it."""
    ends: list[Any] = [None] * SIZE

    def one(rank: int) -> None:
        side, passed = sides[rank], 0
        try:
            for k in range(gates):
                if fails.get(rank) == k:
                    side.board.fail(PeerLost(7, 4, f"rank {rank} lost it"))
                side.cross()
                passed += 1
            ends[rank] = passed, None
        except RunFailed as error:
            ends[rank] = passed, error

    for side in sides:
        side.begin(side.epoch + 1)
        side.attach(Board())
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert None not in ends, "somebody waits for ever"
    return ends


def test_all_ranks_pass_a_gate_or_none_and_know_why() -> None:
    with crew() as sides:

        @settings(max_examples=60, deadline=None)
        @given(fails=st.dictionaries(st.integers(0, SIZE - 1), st.integers(0, 5), max_size=SIZE), gates=st.integers(1, 6))
        def check(fails: dict[int, int], gates: int) -> None:
            ends = through(sides, fails, gates)
            first = min([gates, *fails.values()])
            passed = {n for n, _ in ends}
            assert passed == {first}, ends
            for _, error in ends:
                assert (error is None) == (first == gates)
                assert error is None or (isinstance(error, PeerLost) and error.worker == 7)

        check()


def test_orders_are_answered_by_all_in_turn() -> None:
    with crew() as sides:
        lead, *others = sides

        def work(side: Follow, rank: int) -> None:
            for order in side.orders():
                side.answer(order, {"what": f"{order['do']} by {rank}"})

        threads = [threading.Thread(target=work, args=(side, rank)) for rank, side in enumerate(others, 1)]
        for thread in threads:
            thread.start()
        assert lead.greetings[2]["name"] == "rank 2"
        asked = [lead.ask({"do": what}) for what in ("one", "two")]
        assert [[a["what"] for a in one.wait().values()] for one in reversed(asked)] == [["two by 1", "two by 2"], ["one by 1", "one by 2"]]
        lead.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_an_end_that_comes_before_its_beginning_counts() -> None:
    with crew() as sides:
        lead, other, third = sides
        for side in (lead, other, third):
            side.begin(1)
        lead.begin(2)
        lead.end(RunFailed("there is no such session"))
        until = threading.Event()
        for side in (other, third):
            while 2 not in side._ended:
                assert not until.wait(0.01)
            side.begin(2)
            with pytest.raises(Ended, match="no such session"):
                side.check()


def test_who_waits_for_a_rank_that_ends_learns_of_it() -> None:
    gone = threading.Event()
    with crew(gone.set) as sides:
        lead, other, _ = sides
        lead._doomed = lambda why: None
        asked = lead.ask({"do": "nothing"})
        other.close()
        with pytest.raises(RankLost, match="rank 1 of this site is gone"):
            asked.wait()
        board = Board()
        lead.begin(1)
        lead.attach(board)
        with pytest.raises(RankLost):
            lead.check_ranks()
        lead._lines[2].close()
        assert gone.wait(10), "the last rank has noticed that the first is gone"


@pytest.mark.parametrize(
    ("env", "found"),
    [({}, (0, False)), ({"RANK": "1", "WORLD_SIZE": "2"}, (1, True)), ({"RANK": "0", "WORLD_SIZE": "1"}, "1 processes were started")],
)
def test_who_starts_the_ranks(env: dict[str, str], found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, str):
        with pytest.raises(BadInput, match=found):
            world_of(2, "oslo")
    else:
        assert world_of(2, "oslo") == found


def test_a_rank_that_does_not_answer_is_taken_for_gone() -> None:
    with crew() as sides:
        lead, other, _ = sides
        threading.Thread(target=lambda: other.answer(other.next_order(), {}), daemon=True).start()
        with pytest.raises(RankLost, match="rank 2 of this site has not answered for 1 s"):
            lead.ask({"do": "held"}).wait(limit_s=1.0)
        with pytest.raises(RankLost):
            lead.check_ranks()
