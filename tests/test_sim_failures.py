"""The virtual-clock world: queues at their boundaries, and how runs die."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from sim_toys import SAY, Body, Links, Times, gossip, packet, ring, simulate, uneven, waiter

from gossamer.core.errors import BadInput, RunFailed
from gossamer.sim.clock import EventQueue
from gossamer.sim.driver import Simulation
from gossamer.sim.mailbox import Flight, Message, Slots
from gossamer.worker.effects import (
    Addr,
    Boundary,
    Compute,
    Done,
    Gather,
    Load,
    Program,
    Send,
    Tag,
    Work,
)
from gossamer.worker.state import State


def test_flight_lands_every_message_once_and_in_order_of_its_lane():
    random = Random(1)
    flight, landed = Flight(), []
    keys = [Message(0, 1, 0, packet(0, key, 10), key % 3) for key in range(60)]
    for key, message in enumerate(keys):
        flight.start(key, message)
    for key in random.sample(range(60), 60):
        landed += flight.land(key)
    assert len(flight) == 0
    for lane in range(3):
        assert [m.packet.header.round for m in landed if m.lane == lane] == list(range(lane, 60, 3))
    flight.start(60, keys[0])
    assert flight.land(60) == [keys[0]]


def test_slots_keep_equal_values_apart():
    slots = Slots[int]()
    for value in (7, 7, 7, 8):
        slots.put(1, value)
    assert [slots.take(1) for _ in range(4)] == [7, 7, 7, 8]
    assert not slots.held


@pytest.mark.parametrize("when_s", [0.5, float("nan"), float("inf")])
def test_the_clock_refuses_times_that_cannot_be(when_s: float):
    with pytest.raises(RunFailed, match=str(when_s)):
        EventQueue(1.0).push(when_s, 0, 0)


# --- runs that die


def test_deadlock_names_who_waits_for_whom_and_the_cycle():
    programs = [waiter(0, (1, 4)), waiter(1, (2,)), waiter(2, (0,)), waiter(3, (4, 0)), waiter(4, (), (3,))]
    with pytest.raises(RunFailed) as caught:
        simulate(programs, Links(uneven), Times(*[1.0] * 5))
    text = str(caught.value)
    assert "4 of 5 workers wait" in text
    assert "worker 0, in round 3, lacks SAY of round 3 from worker 1, 4 (finished)" in text
    assert "worker 3, in round 3, lacks SAY of round 3 from worker 0\n" in text, "what has arrived is not lacking"
    assert "cycle: 0 waits for 1 waits for 2 waits for 0" in text
    assert text.index("worker 0, in") < text.index("worker 1, in"), "a cause comes first"


def test_deadlock_of_many_is_cut_short_with_the_count():
    n = 200
    with pytest.raises(RunFailed) as caught:
        simulate([waiter(i, ((i + 1) % n,)) for i in range(n)], Links(uneven), Times(*[1.0] * n))
    lines = str(caught.value).splitlines()
    assert "200 of 200" in lines[0]
    assert len(lines) <= 12
    assert any("and 192 more" in line for line in lines)


def test_a_program_that_raises_is_named_and_the_others_are_closed():
    closed = []

    def bad() -> Program:
        yield Compute(Work(1, 1, 0.0, 0.0))
        yield Boundary(7, State(x={}))
        raise ZeroDivisionError("no tokens")

    def good(me: Addr) -> Program:
        try:
            yield from waiter(me, (0,))
        finally:
            closed.append(me)
        return State(x={})

    with pytest.raises(RunFailed, match=r"worker 0, round 7: ZeroDivisionError: no tokens") as caught:
        simulate([bad(), good(1), good(2)], Links(uneven), Times(1.0, 1.0, 1.0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert closed == [1, 2]


@pytest.mark.parametrize("effect", [Compute(Work(1, 1, 0.0, 0.0)), Load({"wrong": torch.zeros(1)})])
def test_a_body_that_raises_is_named(effect: Compute | Load):
    class Broken(Body):
        def compute(self, work: Work) -> Done:
            raise KeyError("wrong")

    def program() -> Program:
        yield effect
        return State(x={})

    with pytest.raises(RunFailed, match=r"worker 1, round 0: KeyError: 'w"):
        Simulation([waiter(0, ()), program()], [Body(), Broken()], Links(uneven), Times(1.0, 1.0), None).run()


def test_a_message_of_another_size_is_refused_with_both_sides():
    programs = [gossip(0, lambda t: (1,), 1, nbytes=1000), gossip(1, lambda t: (0,), 1, nbytes=999)]
    with pytest.raises(RunFailed, match="worker 1, round 0: expects 999 bytes of SAY of round 0 from worker 0, which sent 1000"):
        simulate(programs, Links(uneven), Times(1.0, 1.0))


def test_a_gather_without_expect_is_refused():
    def program() -> Program:
        yield Gather(Tag.of(2, Tag.MEAN), (0,), 2)
        return State(x={})

    with pytest.raises(RunFailed, match="worker 1, round 0: gathers MEAN of round 2 from worker 0 without an Expect"):
        simulate([waiter(0, ()), program()], Links(uneven), Times(1.0, 1.0))


@pytest.mark.parametrize("to", [-1, 0, 2])
def test_a_send_to_nobody_or_oneself_is_refused(to: int):
    def program() -> Program:
        yield Send((to,), SAY, packet(0, 0, 10))
        return State(x={})

    with pytest.raises(RunFailed, match=f"worker 0, round 0: sends SAY of round 0 to worker {to}"):
        simulate([program(), waiter(1, ())], Links(uneven), Times(1.0, 1.0))


@pytest.mark.parametrize(
    "options",
    [{"charge": 0.0}, {"charge": float("nan")}, {"sequence": 0}, {"start_s": [0.0]}, {"rounds0": [0, 0, 0]}, {"bodies": [Body()]}],
)
def test_bad_arguments_are_refused(options: dict[str, Any]):
    with pytest.raises(BadInput):
        Simulation(ring(2), **({"bodies": None, "network": Links(uneven), "timing": Times(1.0), "hooks": None, "sequence": 8} | options))
