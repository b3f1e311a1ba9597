"""The quick program of runs without tensors is the round loop, effect by effect."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gossamer.core.method import Method
from gossamer.core.plan import Plan, uniform
from gossamer.core.replan import Planned
from gossamer.core.tree import layout_of
from gossamer.recipes import Setting, dadam, ddp, diloco, gasloc, geomesh, local_dadam, local_sgd, noloco, sparse_loco
from gossamer.worker.effects import Boundary, Compute, Done, Effect, Gather, Go, Program, Stop
from gossamer.worker.pace import paced, program, simple
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
    assert program(seat, start(seat, {})).__name__ == "peer"


def test_so_do_tensors_new_plans_carried_steps_and_gradients() -> None:
    method = gasloc(Setting(UNEVEN, rounds=3))
    seat, x = Seat(0, method, LAYOUT), {"a": torch.zeros(7, 5), "b": torch.zeros(11)}
    assert program(seat, start(seat, {})).__name__ == "paced"
    assert program(seat, start(seat, x)).__name__ == "peer"
    assert program(seat, dataclasses.replace(start(seat, {}), planned=Planned(1, 0, UNEVEN))).__name__ == "peer"
    assert not simple(dataclasses.replace(method, plan=dataclasses.replace(UNEVEN, exact=(3.0, 5.0, 4.0, 9.5, 1.0))))
    assert not simple(ddp(Setting(uniform(4, 1, 2, 8), rounds=3))) and not simple(dadam(Setting(uniform(4, 1, 2, 8), rounds=3)))
