"""The quick program of runs without tensors is the round loop, effect by effect, and its quick loop the driver, event by event."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gossamer.core.errors import RunFailed
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.method import Method
from gossamer.core.plan import Plan, uniform
from gossamer.core.replan import Planned
from gossamer.core.tree import layout_of
from gossamer.recipes import Setting, dadam, ddp, diloco, gasloc, geomesh, local_dadam, local_sgd, noloco, sparse_loco
from gossamer.sim.absence import Absences
from gossamer.sim.driver import Simulation
from gossamer.sim.network import Network
from gossamer.sim.timing import ComputeTime
from gossamer.worker.effects import Boundary, Compute, Done, Effect, Gather, Go, Program, Stop
from gossamer.worker.pace import Paced, paced, program, simple
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat
from gossamer.worker.state import State

LAYOUT = layout_of({"a": torch.empty(7, 5, device="meta"), "b": torch.empty(11, device="meta")})
UNEVEN = Plan((3, 5, 4, 9, 1), (2, 1, 4, 2, 3), 8)

SIMPLE: dict[str, Callable[[Setting], Method]] = {
    "two peers": lambda s: gasloc(s),
    "pairs, one sits out": lambda s: gasloc(s, topology="one_peer"),
    "ring, form local": lambda s: gasloc(s, topology="ring", momentum="local", outer_momentum=0.3),
    "directed": lambda s: gasloc(s, topology="one_peer_exp"),
    "complete": lambda s: gasloc(s, topology="complete"),
    "noloco": lambda s: noloco(s),
    "diloco": lambda s: diloco(s, exchange="gather"),
    "local_sgd": lambda s: dataclasses.replace(local_sgd(s), exchange=gasloc(s).exchange),
    "geomesh": lambda s: geomesh(s, exchange="gather"),
    "sparse_loco": lambda s: sparse_loco(s),
}
OTHER: dict[str, Callable[[Setting], Method]] = {
    "said before": lambda s: local_dadam(s),
    "overlap": lambda s: diloco(s, exchange="gather", overlap=0.5),
    "fragments": lambda s: dataclasses.replace(diloco(s, exchange="gather"), cadence=diloco(s, fragments=2).cadence),
    "shard": lambda s: diloco(s, exchange="shard"),
    "ring": lambda s: diloco(s, exchange="ring"),
    "re-planned": lambda s: geomesh(s, exchange="gather", replan=0.1),
    "first parameters from one": lambda s: dataclasses.replace(gasloc(s), sync_from=0),
}


def effects(run: Program, stop: int | None = None) -> tuple[list[Effect], State]:
    """All that a program asks for, as it is when it asks, and its last state."""
    asked: list[Effect] = []
    reply: Any = None
    packet = None
    try:
        while True:
            e = run.send(reply)
            asked.append(copy.deepcopy(e))
            reply = None
            match e:
                case Compute(work):
                    tokens = work.steps * work.batch * 8
                    reply = Done(None, tokens, 1.5 * tokens, 0.1 * work.steps)
                case Gather(frm=frm):
                    reply = dict.fromkeys(frm, packet)
                case Boundary(round):
                    reply = Stop() if round == stop else Go()
            packet = getattr(e, "packet", packet)
    except StopIteration as end:
        return asked, end.value


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("stop", [None, 2])
def test_effects_are_those_of_the_round_loop(name: str, stop: int | None) -> None:
    method = SIMPLE[name](Setting(UNEVEN, rounds=5, seed=2))
    assert simple(method)
    for i in range(method.n):
        seat = Seat(i, method, LAYOUT, run_id=4)
        quick, state = effects(program(seat, start(seat, {})), stop)
        want, last = effects(peer(seat, start(seat, {})), stop)
        assert quick == want
        assert [type(e) for e in quick] == [type(e) for e in want]  # named tuples of unlike kinds may be equal
        assert state == last


def test_it_goes_on_from_a_boundary() -> None:
    method = gasloc(Setting(UNEVEN, rounds=6))
    seat = Seat(3, method, LAYOUT)
    at = dataclasses.replace(start(seat, {}), round=4, tokens=4 * UNEVEN.tokens_per_round)
    assert effects(paced(seat, copy.deepcopy(at))) == effects(peer(seat, copy.deepcopy(at)))


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_takes_the_round_loop_itself(name: str) -> None:
    method = OTHER[name](Setting(UNEVEN, rounds=3))
    seat = Seat(0, method, LAYOUT)
    assert not simple(method)
    assert not isinstance(program(seat, start(seat, {})), Paced)


def test_so_do_tensors_new_plans_carried_steps_and_gradients() -> None:
    method = gasloc(Setting(UNEVEN, rounds=3))
    seat, x = Seat(0, method, LAYOUT), {"a": torch.zeros(7, 5), "b": torch.zeros(11)}
    assert isinstance(program(seat, start(seat, {})), Paced)
    assert not isinstance(program(seat, start(seat, x)), Paced)
    assert not isinstance(program(seat, dataclasses.replace(start(seat, {}), planned=Planned(1, 0, UNEVEN))), Paced)
    assert not simple(dataclasses.replace(method, plan=dataclasses.replace(UNEVEN, exact=(3.0, 5.0, 4.0, 9.5, 1.0))))
    assert not simple(ddp(Setting(uniform(4, 1, 2, 8), rounds=3))) and not simple(dadam(Setting(uniform(4, 1, 2, 8), rounds=3)))


class Witness:
    """Hooks that write down all they are told; `stop`: worker -> the boundary at which it is told to stop."""

    def __init__(self, stop: dict[int, int] | None = None) -> None:
        self.told: list[Any] = []
        self._stop = stop or {}

    def boundary(self, worker: int, round: int, time_s: float, state: State, body: object) -> Go | Stop:
        self.told.append(("boundary", worker, round, time_s, copy.deepcopy(state)))
        return Stop() if self._stop.get(worker) == round else Go()

    def note(self, record: dict[str, Any]) -> None:
        self.told.append(("note", list(record.items())))

    def span(self, *what: Any) -> None:
        self.told.append(("span", what))


def simulated(method: Method, make: Callable[[Seat, State], Program], hooks: Witness | None, **options: Any) -> tuple[Any, ...]:
    """All that a run tells, and its result."""
    n = method.n
    link = Link(200.0, 30.0, options.pop("jitter_ms", 0.0))
    card = Gpu("card", 100.0, 16.0)
    sites = tuple(Site(f"s{k}", "here", card, 300.0 + 100 * k, 200.0 + 50 * k, workers=n // 2 + k * (n % 2)) for k in range(2))
    fleet = Fleet("two", sites, {("here", "here"): link}, local=Link(1000.0, 1.0), message_s=1e-4)
    timing = ComputeTime(fleet, sequence=8, flops_per_token=2e9, codec_gbytes_per_s=1e-3)
    seats = [Seat(i, method, LAYOUT) for i in range(n)]
    programs = [make(seat, start(seat, {})) for seat in seats]
    network = Network(fleet, 5, options.pop("sharing", "queue"))
    result = Simulation(programs, None, network, timing, hooks, sequence=8, charge=1e4, **options).run()
    return hooks and hooks.told, result.final, result.accounts, result.events


@pytest.mark.parametrize("name", SIMPLE)
def test_the_quick_loop_is_the_driver_event_by_event(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SIMPLE[name](Setting(UNEVEN, rounds=12, seed=2))
    asked = 0

    def counted(self: Paced, value: Any, send: Any = Paced.send) -> Effect:
        nonlocal asked
        asked += 1
        return send(self, value)

    monkeypatch.setattr(Paced, "send", counted)
    for options in ({}, {"sharing": "fair"}, {"jitter_ms": 20.0}, {"start_s": [0.0, 3.0, 1.0, 0.5, 9.0]}):
        for hooks in (True, False):
            quick = simulated(method, program, Witness() if hooks else None, **options)
            assert not asked  # it went the quick way
            assert quick == simulated(method, peer, Witness() if hooks else None, **options)
    stopped = [simulated(method, make, Witness(dict.fromkeys(range(5), 4))) for make in (program, peer)]
    assert stopped[0] == stopped[1] and stopped[0][1][0].round == 4


def test_a_deadlock_is_told_in_the_same_words() -> None:
    method = gasloc(Setting(UNEVEN, rounds=6))
    said = []
    for make in (program, peer):
        with pytest.raises(RunFailed) as failed:
            simulated(method, make, Witness({2: 3}))
        said.append(str(failed.value))
    assert said[0] == said[1] and "2 (finished)" in said[0]


def test_workers_that_may_die_or_are_held_take_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    method = gasloc(Setting(UNEVEN, rounds=8))
    for options in ({"ahead": 1}, {"absences": {1: 3}}):
        told = []
        for make in (program, peer):
            given = {k: Absences(kills=v) if k == "absences" else v for k, v in options.items()}
            told.append(simulated(method, make, Witness(), **given))
        assert told[0][0] == told[1][0] and told[0][2:] == told[1][2:]
    assert any(record[1][0] == ("worker", 0) and ("kind", "members") in record[1] for record in told[0][0] if record[0] == "note")
