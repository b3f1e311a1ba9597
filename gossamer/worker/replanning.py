"""The plan in force, and how a worker comes to another one while running (`gossamer.core.replan`).

The decision is made in the worker's program, where the headers of a round have been heard, and holds from the next round on. Nobody is
asked: the same numbers have reached every worker at the same point of its program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gossamer.core.outer import OuterSGD, OuterState
from gossamer.core.plan import Plan
from gossamer.core.tree import Tree
from gossamer.core.work import drift_scale, outer_step, round_work
from gossamer.worker.effects import Addr, Done, Note
from gossamer.worker.packet import Packet
from gossamer.worker.seat import Seat
from gossamer.worker.state import State


def plan_at(seat: Seat, state: State, round: int | None = None) -> Plan:
    """The plan of `round`; of the round that the worker is in by default. Its H_i are whole."""
    t = state.round if round is None else round
    return state.planned.at(t, seat.method.plan).at(t)


class Clocked(NamedTuple):
    """Inner steps and the seconds that they took."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, done: Done) -> Clocked:
        """With another stretch."""
        return Clocked(self.steps + steps, self.seconds + done.seconds)

    @property
    def step_s(self) -> float:
        """Seconds per inner step, rounded to float32 as they travel; 0: not known."""
        return float(np.float32(self.seconds / self.steps)) if self.steps else 0.0


def times_of(packets: Mapping[Addr, Packet]) -> dict[Addr, float]:
    """Who says which seconds per inner step in the headers of a round."""
    return {j: packets[j].header.step_s for j in sorted(packets)}


def replan(seat: Seat, state: State, step_s: Mapping[Addr, float]) -> Iterator[Note]:
    """Takes in what was heard; a new plan holds from the next round on, and the lowest worker notes it."""
    rule, since = seat.method.replan, state.round + 1
    if rule is None or since >= seat.method.rounds:
        return
    before, first = state.planned, seat.method.plan
    state.planned, gain = rule.decide(before, first, step_s, since, seat.everybody)
    if state.planned.version != before.version and seat.me == seat.everybody[0]:
        plan = state.planned.at(since, first)
        yield Note(
            {
                "kind": "plan",
                "round": since,
                "worker": seat.me,
                "version": state.planned.version,
                "steps": list(plan.steps),
                "batch": list(plan.batch),
                "predicted_gain": gain,
                "step_s": list(state.planned.step_s),
            }
        )


def scaled(seat: Seat, state: State, D: Tree, tokens: int, round: int | None = None) -> Tree:
    """D times Hbar / H_i where the outer rule corrects for unequal work, and times tokens / mean tokens where a pair codec counts by them
    (in place; the mean over those who take part in the round); D itself elsewhere. `round`: that the worker is in by default."""
    outer, pair = seat.method.outer, seat.method.pair
    if pair and pair.by_tokens and (scale := _share(seat, state, tokens)) != 1.0:
        for d in D.values():
            d.mul_(scale)
    if isinstance(outer, OuterSGD) and outer.correction == "work":
        scale = drift_scale(plan_at(seat, state, round), seat.me, seat.method.weights == "tokens", seat.everybody)
        if scale != 1.0:
            for d in D.values():
                d.mul_(scale)
    return D


def _share(seat: Seat, state: State, tokens: int) -> float:
    """`tokens` in units of the planned mean over those who take part in the round."""
    plan, absent = plan_at(seat, state), state.roll.absent(state.round)
    missed = sum(plan.tokens(j) for j in absent)
    return tokens * (seat.method.n - len(absent)) / (plan.tokens_per_round - missed)


def outer_step_of(
    seat: Seat, state: State, round: int, x: Tree, s: OuterState, D: Tree, said: Tree, mixed: Tree
) -> tuple[Tree, OuterState]:
    """The outer step from (x, s) on the mean of `round`, corrected for its work where the outer rule says so."""
    outer = seat.method.outer
    if isinstance(outer, OuterSGD) and outer.correction == "work":
        work = round_work(plan_at(seat, state, round), seat.method.plan, seat.method.weights == "tokens", seat.everybody)
        return outer_step(outer, work, x, mixed, s)
    return outer.step(x, D, said, mixed, s)
