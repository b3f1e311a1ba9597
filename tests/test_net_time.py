"""Where the time of a real worker goes: idle split by READY notes, accounts that add up, boundaries outside the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise

import pytest
from net_toys import SAY, Body, Hooks, all_but, in_threads, talk

from gossamer.real import Group, RealWorld
from gossamer.real.ledger import Ledger
from gossamer.worker.account import Account
from gossamer.worker.effects import Tag

TAG = Tag.of(0, SAY)


def watched(n: int, step_s: list[float], hooks: list[Hooks], rounds: int = 6) -> list[tuple[Account, float]]:
    def job(group: Group) -> tuple[Account, float]:
        world = RealWorld(hooks[group.me], group, start_s=100.0)
        _, account = world.run(talk(group.me, lambda _: all_but(group.me, n), rounds), Body(step_s[group.me]))
        return account, world.paused_s

    return in_threads(n, job)


def test_waiting_for_a_slow_worker_is_straggler_idle() -> None:
    hooks = [Hooks() for _ in range(3)]
    (a, _), (slow, _), (b, _) = watched(3, [0.0, 0.15, 0.0], hooks, rounds=4)
    for account in (a, b):
        waits = account.seconds["straggler_idle"] + account.seconds["network_idle"]
        assert waits > account.wall_s / 2
        assert account.seconds["straggler_idle"] > 0.7 * waits
    assert slow.seconds["straggler_idle"] < 0.2 * a.seconds["straggler_idle"]
    assert slow.share("compute") > 0.5
    for i in (0, 2):
        assert [n["waited_for"] for n in hooks[i].notes] == [1] * 4


def test_the_seconds_add_up_to_the_wall_time() -> None:
    hooks = [Hooks(lambda round: time.sleep(0.02)) for _ in range(2)]
    started_s = time.monotonic()
    results = watched(2, [0.01, 0.002], hooks)
    elapsed_s = time.monotonic() - started_s
    for (account, paused_s), h in zip(results, hooks, strict=True):
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-9)
        assert account.wall_s + paused_s <= elapsed_s
        assert paused_s >= 6 * 0.02  # what the boundaries slept, and none of it in the clock:
        spans = sorted(h.spans, key=lambda s: s[2])
        assert spans[0][2] >= 100.0 and spans[-1][3] <= 100.0 + account.wall_s + 1e-9
        assert all(x[3] <= y[2] + 1e-9 for x, y in pairwise(spans)), "spans overlap"
        assert sum(s[3] - s[2] for s in spans) == pytest.approx(account.wall_s, rel=1e-6)
        for n in h.notes:
            parts = ("compute", "encode", "decode", "outer", "send", "straggler_idle", "network_idle")
            assert sum(n[f"{kind}_s"] for kind in parts) == pytest.approx(n["wall_s"], rel=1e-6)
            assert n["bytes_sent"] == n["bytes_received"] == 1064
        assert sum(n["wall_s"] for n in h.notes) <= account.wall_s
        assert h.notes[-1]["time_s"] <= 100.0 + account.wall_s


class Clock:
    """A monotonic clock set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 50.0
        monkeypatch.setattr("gossamer.real.ledger.time.monotonic", lambda: self.now_s)


def booked(monkeypatch: pytest.MonkeyPatch, ready: Mapping[int, float]) -> tuple[float, float]:
    """(straggler, network) of worker 0's wait from 50 to 60 for worker 1, whose message carries workers 1 and 2."""
    clock = Clock(monkeypatch)
    ledger = Ledger(0, None, lambda round, fragment: ready, 0.0, 0)
    clock.now_s = 60.0
    ledger.wait({1: 60.0}, {1: (1, 2)}, 0)
    clock.now_s = 61.0
    ledger.spend("decode")
    note = ledger.record({"kind": "round"})
    assert note["wall_s"] == 11.0 and note["decode_s"] == 1.0
    return note["straggler_idle_s"], note["network_idle_s"]


@pytest.mark.parametrize(
    "ready, want",
    [
        ({0: 49.0, 1: 53.0, 2: 54.0}, (4.0, 6.0)),
        ({0: 49.0, 1: 53.0, 2: 49.0}, (3.0, 7.0)),
        ({0: 49.0, 1: 48.0, 2: 49.0}, (0.0, 10.0)),  # equally ready workers: the network
        ({0: 49.0, 1: 53.0}, (10.0, 0.0)),  # 2's note is on its way, later than its data
        ({0: 49.0}, (10.0, 0.0)),
        ({1: 53.0}, (3.0, 7.0)),  # this worker has not said READY: whether 2 has is not known
        ({}, (0.0, 10.0)),
    ],
)
def test_waits_are_split_at_the_latest_ready(
    monkeypatch: pytest.MonkeyPatch, ready: Mapping[int, float], want: tuple[float, float]
) -> None:
    assert booked(monkeypatch, ready) == want


def test_what_had_arrived_before_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ledger = Ledger(0, None, lambda round, fragment: {}, 0.0, 0)
    clock.now_s = 50.25
    ledger.wait({1: 49.0}, None, 0)
    note = ledger.record({"kind": "round"})
    assert (note["send_s"], note["network_idle_s"], note["waited_for"]) == (0.25, 0.0, None)
