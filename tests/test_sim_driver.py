"""The virtual-clock world: where time and bytes go, and in which order things happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from sim_toys import SAY, Body, Hooks, Links, Times, cycle_of, gossip, packet, ring, simulate, uneven

from gossamer.sim.driver import Simulation
from gossamer.worker.effects import (
    Addr,
    Boundary,
    Compute,
    Expect,
    Gather,
    Load,
    Program,
    Ready,
    Send,
    SiteSum,
    Tag,
    Work,
)
from gossamer.worker.state import State

# --- where time and bytes go


def test_seconds_and_spans_and_round_notes_each_add_up_to_wall():
    n, rounds = 6, 8
    hooks, starts = Hooks(), [0.25 * i for i in range(n)]
    programs = [gossip(i, lambda t, i=i: cycle_of(n, t)[i], rounds) for i in range(n)]
    result = simulate(programs, Links(uneven), Times(*(0.1 + 0.03 * i for i in range(n))), hooks, start_s=starts)
    for i, account in enumerate(result.accounts):
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-12)
        mine = [span for span in hooks.spans if span[0] == i]
        assert mine[0][2] == starts[i]
        assert mine[-1][3] == pytest.approx(starts[i] + account.wall_s, rel=1e-12)
        assert all(a[3] == pytest.approx(b[2], rel=1e-12) for a, b in pairwise(mine)), "spans leave no gap"
        for kind, seconds in account.seconds.items():
            assert sum(s[3] - s[2] for s in mine if s[1] == kind) == pytest.approx(seconds, rel=1e-9, abs=1e-12)
        notes = [note for note in hooks.notes if note["worker"] == i]
        assert [note["round"] for note in notes] == list(range(1, rounds + 1))
        assert sum(note["wall_s"] for note in notes) == pytest.approx(account.wall_s, rel=1e-12)
        for note in notes:
            kinds = ("compute_s", "straggler_idle_s", "network_idle_s", "encode_s", "decode_s", "outer_s")
            assert sum(note[kind] for kind in kinds) == pytest.approx(note["wall_s"], rel=1e-12)
        assert sum(note["bytes_sent"] for note in notes) == account.bytes_sent == rounds * 2 * 1000
        assert account.bytes_received == account.bytes_sent
        assert account.seconds["compute"] == pytest.approx(rounds * 3 * (0.1 + 0.03 * i))


def hops(me: Addr, n: int) -> Program:
    """A ring collective: n - 1 hops, each message carrying what all its earlier senders computed."""
    left, right = (me - 1) % n, (me + 1) % n
    for _ in range(n - 1):
        yield Expect(Tag.REDUCE, {left: 10})
    yield Compute(Work(1, 1, 0.0, 0.0))
    yield Ready([j for j in range(n) if j != me], 0)
    for hop in range(n - 1):
        yield Send((right,), Tag.REDUCE, packet(me, 0, 10))
        yield Gather(Tag.REDUCE, (left,), 0, {left: [(left - back) % n for back in range(hop + 1)]})
    return State(x={})


@pytest.mark.parametrize("kind", ["gossip", "hops"])
def test_ring_of_equally_ready_workers_with_one_slow_link_has_no_straggler_idle(kind: str):
    n = 5
    programs = ring(n, rounds=1) if kind == "gossip" else [hops(i, n) for i in range(n)]
    result = simulate(programs, Links(lambda src, dst, _: 9.0 if (src, dst) == (1, 2) else 0.1), Times(*[1.0] * n))
    assert [account.seconds["straggler_idle"] for account in result.accounts] == [0.0] * n
    assert result.accounts[2].seconds["network_idle"] >= 8.9


def test_a_slow_worker_on_a_fast_network_is_all_straggler_idle():
    hooks = Hooks()
    result = simulate(ring(3, 4), Links(lambda *_: 0.0), Times(1.0, 1.0, 5.0), hooks)
    for i in (0, 1):
        assert result.accounts[i].seconds["straggler_idle"] == pytest.approx(4 * 3 * 4.0)
        assert result.accounts[i].seconds["network_idle"] == pytest.approx(4 * 1e-6)  # the slow worker's encoding
    assert result.accounts[2].seconds["straggler_idle"] == result.accounts[2].seconds["network_idle"] == 0.0
    assert {note["worker"]: note["waited_for"] for note in hooks.notes} == {0: 2, 1: 2, 2: None}


@pytest.mark.parametrize("carries, straggler_s", [({1: (1, 2)}, 9.0), (None, 0.0)])
def test_two_hops_blame_the_slow_origin_only_where_carries_names_it(carries: Mapping[Addr, Sequence[Addr]] | None, straggler_s: float):
    """Worker 2 computes 10 s, sends to 1 (2 s), which passes it on to 0 (3 s). Worker 0 waits from 1 s to 15 s."""

    def relay(me: Addr) -> Program:
        yield Expect(SAY, {1: 10} if me == 0 else {2: 10} if me == 1 else {})
        yield Compute(Work(1, 1, 0.0, 0.0))
        yield Ready((0,), 0)
        if me == 1:
            yield Gather(SAY, (2,), 0)
        if me:
            yield Send((me - 1,), SAY, packet(me, 0, 10))
        else:
            yield Gather(SAY, (1,), 0, carries)
        return State(x={})

    result = simulate([relay(i) for i in range(3)], Links(lambda src, *_: {2: 2.0, 1: 3.0}[src]), Times(1.0, 1.0, 10.0))
    seconds = result.accounts[0].seconds
    assert (seconds["straggler_idle"], seconds["network_idle"]) == pytest.approx((straggler_s, 14.0 - straggler_s))


def test_ready_stamps_outlive_a_worker_that_runs_rounds_ahead():
    """Worker 1 is five rounds further when its first message ends the wait of worker 0; the wait is still split by its first stamp."""

    def ahead() -> Program:
        for t in range(5):
            yield Compute(Work(1, 1, 0.0, 0.0))
            yield Ready((0,), t)
            yield Send((0,), Tag.of(t, SAY), packet(1, t, 10))
            yield Boundary(t + 1, State(x={}))
        return State(x={})

    def waits() -> Program:
        yield Expect(SAY, {1: 10})
        yield Gather(SAY, (1,), 0)
        return State(x={})

    result = simulate([waits(), ahead()], Links(lambda *_: 100.0), Times(1.0, 2.0))
    assert result.accounts[0].seconds["straggler_idle"] == 2.0
    assert result.accounts[0].seconds["network_idle"] == 100.0


def test_an_exchange_that_lands_a_round_late_is_still_split_by_its_own_round():
    """Both have crossed the boundary when worker 0 hears at 7 s what worker 1 had computed at 5 s; worker 0 waits from 1 s on."""

    def late(me: Addr) -> Program:
        yield Expect(SAY, {1 - me: 10})
        yield Compute(Work(1, 1, 0.0, 0.0))
        yield Ready((1 - me,), 0)
        yield Send((1 - me,), SAY, packet(me, 0, 10))
        yield Boundary(1, State(x={}))
        yield Gather(SAY, (1 - me,), 0)
        return State(x={})

    result = simulate([late(0), late(1)], Links(lambda *_: 2.0), Times(1.0, 5.0))
    assert (result.accounts[0].seconds["straggler_idle"], result.accounts[0].seconds["network_idle"]) == (4.0, 2.0)


def test_ready_stamps_of_old_rounds_are_forgotten():
    simulation = Simulation(ring(4, 50), None, Links(uneven), Times(*[1.0] * 4), None, sequence=1)
    simulation.run()
    assert len(simulation._rounds.ready_s) <= 5


def test_charge_scales_the_clock_and_not_the_counted_bytes():
    links, times = Links(lambda src, dst, nbytes: nbytes / 1e3), Times(1.0, 1.0)
    result = simulate(ring(2, 1), links, times, charge=2.5)
    assert {launch[3] for launch in links.launched} == {2500}
    assert result.accounts[0].bytes_sent == result.accounts[0].bytes_received == 1000
    assert result.accounts[0].seconds["encode"] == pytest.approx(2500e-9)
    assert result.accounts[0].seconds["network_idle"] == pytest.approx(2.5)


def test_steps_are_numbered_within_the_round_and_apply_is_free():
    def program() -> Program:
        for t in (4, 5):
            a = yield Compute(Work(3, 2, 0.0, 0.0))
            b = yield Compute(Work(1, 2, 0.0, 0.0, "grad"))
            c = yield Compute(Work(1, 0, 0.0, 0.0, "apply", {}))
            d = yield Compute(Work(2, 5, 0.0, 0.0))
            assert [done.tokens for done in (a, b, c, d)] == [96, 32, 0, 160]
            assert all(done.tree is None for done in (a, b, c, d))
            yield Boundary(t + 1, State(x={}))
        return State(x={})

    times = Times(1.0)
    result = simulate([program()], Links(uneven), times, rounds0=[4])
    assert times.asked == [(0, t, *call) for t in (4, 5) for call in ((0, 3, 2), (3, 1, 2), (4, 2, 5))]
    assert result.accounts[0].wall_s == 12.0


# --- order


def test_two_runs_give_one_trace():
    def trace() -> tuple[Any, ...]:
        n, hooks = 7, Hooks()
        programs = [gossip(i, lambda t, i=i: cycle_of(n, t)[i], 6) for i in range(n)]
        links = Links(uneven)
        result = simulate(programs, links, Times(*[0.5] * n), hooks)
        return hooks.spans, hooks.notes, hooks.crossed, links.launched, result.accounts, result.events

    assert trace() == trace()


def test_accounts_do_not_depend_on_how_ties_fall():
    """All workers and links are alike, so that nearly every event ties; the order in which peers are addressed must not matter."""
    n = 8

    def accounts(flip: bool) -> Any:
        def peers(i: Addr) -> Callable[[int], Sequence[Addr]]:
            return lambda t: cycle_of(n, t)[i][:: -1 if flip else 1]

        times = Times(*[0.5, 1.0] * (n // 2))
        result = simulate([gossip(i, peers(i), 10) for i in range(n)], Links(lambda *_: 0.5), times)
        return [(a.seconds, a.wall_s, a.bytes_received) for a in result.accounts]

    assert accounts(False) == accounts(True)


def test_what_others_see_happens_in_the_order_of_the_clock():
    hooks, links = Hooks(), Links(uneven)
    simulate(ring(6, 5), links, Times(0.9, 0.1, 0.5, 1.3, 0.2, 0.7), hooks)
    for times in ([at for at, *_ in links.launched], [at for *_, at in hooks.crossed], [note["time_s"] for note in hooks.notes]):
        assert times == sorted(times)


def test_messages_of_one_tag_are_read_in_the_order_sent_even_if_one_overtakes():
    sizes = (300, 100, 200)  # the second and third arrive before the first

    def sends() -> Program:
        for k, size in enumerate(sizes):
            yield Send((1,), SAY, packet(0, k, size))
        return State(x={})

    def hears() -> Program:
        for size in sizes:
            yield Expect(SAY, {0: size})
        rounds = []
        for _ in sizes:
            heard = yield Gather(SAY, (0,), 0)
            rounds.append(heard[0].header.round)
        assert rounds == [0, 1, 2]
        return State(x={})

    result = simulate([sends(), hears()], Links(lambda src, dst, nbytes: nbytes / 100), Times(1.0, 1.0))
    assert result.accounts[1].bytes_received == 600
    assert result.accounts[1].wall_s == 3.0


# --- bodies, stops


def test_bodies_compute_and_load_and_a_site_of_one_rank_sums_to_itself():
    def program() -> Program:
        x = torch.zeros(1)
        for _ in range(2):
            done = yield Compute(Work(3, 1, 0.0, 0.0))
            x = x + 10 * done.tree["w"]
            value = torch.tensor([1.5], dtype=torch.float64)
            assert (yield SiteSum(value)) is value
            yield Load({"w": x})
        return State(x={"w": x})

    bodies = [Body(), Body()]
    result = Simulation([program(), program()], bodies, Links(uneven), Times(1.0, 2.0), None).run()
    assert [float(state.x["w"]) for state in result.final if state] == [360.0, 360.0]
    assert bodies[0].loaded == [30.0, 360.0]
    assert [account.wall_s for account in result.accounts] == [6.0, 12.0]


def test_stop_ends_every_program_at_its_boundary_with_its_state():
    hooks = Hooks(last_round=2)
    result = simulate(ring(4, 100), Links(uneven), Times(*[1.0] * 4), hooks)
    assert [state.round for state in result.final if state] == [2, 2, 2, 2]
    assert sum(a.bytes_sent for a in result.accounts) == sum(a.bytes_received for a in result.accounts) == 4 * 2 * 2 * 1000
