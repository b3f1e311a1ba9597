"""Workers that learn nothing: whatever moves their parameters is the exchange. For tests of who is heard, and of what stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.core.tree import Layout, Tree, layout_of
from gossamer.recipes import Setting
from gossamer.worker.effects import Done, Program, Work
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat
from gossamer.worker.state import State

SIZE = 12


def setting(n: int, rounds: int, seed: int = 3) -> Setting:
    return Setting(Plan((3,) * n, (1,) * n, 4), rounds=rounds, seed=seed, schedule=Constant())


def first(worker: int) -> Tree:
    return {"w": torch.randn(SIZE, generator=torch.Generator().manual_seed(worker)) * 4}


def layout() -> Layout:
    return layout_of(first(0))


class StillBody:
    """Steps change nothing. It counts the Loads that forget the inner optimizer."""

    def __init__(self, worker: int) -> None:
        self.w = first(worker)["w"]
        self.resets = 0

    def compute(self, work: Work) -> Done:
        return Done({"w": self.w}, work.steps * work.batch * 4, 0.0)

    def load(self, tree: Mapping[str, torch.Tensor], reset_inner: bool = False) -> None:
        self.w.copy_(tree["w"])
        self.resets += reset_inner

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def seat_of(worker: int, method: Method) -> Seat:
    return Seat(worker, method, layout(), run_id=7)


def state_of(worker: int, method: Method) -> State:
    """Parameters of its own from the start: so it starts after round 1, since in round 0 all must be equal."""
    state = start(seat_of(worker, method), first(worker))
    state.round = 1
    return state


def still(worker: int, method: Method) -> Program:
    return peer(seat_of(worker, method), state_of(worker, method))


def mean_of(trees: list[Tree]) -> torch.Tensor:
    return torch.stack([tree["w"].double() for tree in trees]).mean(0)
