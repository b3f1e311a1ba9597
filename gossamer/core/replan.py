"""Re-planning while running: a new plan from measured step times, when it is worth it.

    s_i  <- (1 - smoothing) s_i + smoothing * measured_i       seconds per inner step; the first measurement as it is
    T(p)  = max_i (H_i s_i + c_i) / (tokens of a round)        predicted seconds per token of plan p; c_i: exchange that is not hidden
    gain  = 1 - T(best) / T(present)                           best: `gossamer.core.awb.balance` at the present B_i, tokens as planned

A new plan is taken when the gain is at least `threshold` for `patience` rounds running. Workers that do not take part
are left out, of the measurements and of the tokens that are aimed at, and keep their H_i. There is no coordinator: in a synchronous method
every worker hears every other's measurement in the packets of the round, rounded to float32, so all compute one plan from one set of
numbers at one round boundary.

>>> from gossamer.core.plan import uniform
>>> first, rule = uniform(2, steps=30, batch=8, sequence=512), Replan(threshold=0.05)
>>> decision = rule.decide(Planned(), first, {0: 1.0, 1: 2.0}, since=1)
>>> decision.planned.at(1, first).steps, decision.gain > 0.3, decision.planned.version
((40, 20), True, 1)
>>> rule.decide(decision.planned, first, {0: 1.0, 1: 2.0}, since=2).planned.version
1
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gossamer.core.awb import balance, real_steps
from gossamer.core.errors import BadInput
from gossamer.core.plan import Plan


@dataclass(frozen=True)
class Planned:
    """What re-planning has come to so far: a part of a worker's state, equal on all workers of a run."""

    version: int = 0
    """Plans taken up so far; 0: the method's own is in force."""
    since: int = 0
    """The round (the first is 0) from which `plan` holds."""
    plan: Plan | None = None
    """None: the method's own."""
    previous: Plan | None = None
    """What held before `since`, for an exchange that was under way then. None: the method's own."""
    step_s: tuple[float, ...] = ()
    """s_i, smoothed seconds per inner step; 0 where nothing was measured yet."""
    insisted: int = 0
    """Rounds running in which a new plan promised enough."""

    def at(self, round: int, first: Plan) -> Plan:
        """The plan of `round`, the present one or the one before; `first` is the method's own."""
        return (self.plan if round >= self.since else self.previous) or first

    @property
    def mark(self) -> int:
        """64 bits that tell unlike states apart; 0 before the first measurement."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=8).digest(), "little") if self.step_s else 0


class Decision(NamedTuple):
    """What came of a round's measurements."""

    planned: Planned
    """Its version is higher if there is a new plan."""
    gain: float | None
    """Predicted gain of the best plan over the one in force; None while a worker's step time is not known."""


@dataclass(frozen=True)
class Replan:
    """When to plan anew.

    Raises:
        BadInput: a value out of range.
    """

    threshold: float = 0.05
    """Predicted gain from which a new plan is taken, a share of the time of a round; above 0 and below 1."""
    smoothing: float = 0.3
    """Weight of the newest measurement, above 0; 1: no smoothing."""
    patience: int = 1
    """Rounds running in which the gain must be that high."""
    unhidden_s: tuple[float, ...] = ()
    """c_i: seconds of worker i's exchange that no compute hides, worked out once from the fleet's links; empty: 0 for all."""

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < 1.0:
            raise BadInput(f"the threshold of re-planning is {self.threshold}: expected a share above 0 and below 1 (0.05 for 5 %)")
        if not 0.0 < self.smoothing <= 1.0:
            raise BadInput(
                f"the smoothing of re-planning is {self.smoothing}: expected the newest measurement's weight, above 0, at most 1"
            )
        if self.patience < 1:
            raise BadInput(f"the patience of re-planning is {self.patience} rounds: expected 1 or more")

    def decide(
        self, planned: Planned, first: Plan, measured: Mapping[int, float], since: int, there: Sequence[int] | None = None
    ) -> Decision:
        """Takes in the measurements of a round.

        Args:
            first: the method's own plan: its B_i stay, and its tokens per round are what a new plan aims at.
            measured: worker -> seconds per inner step, numbers that float32 holds; absent or 0: not known.
            since: the round from which a new plan would hold; nothing under way may be planned again by an earlier one.
            there: who takes part, in rising order; None: all.
        """
        step_s = tuple(self._smoothed(s, measured.get(i, 0.0)) for i, s in enumerate(planned.step_s or (0.0,) * first.n))
        few = tuple(range(first.n)) if there is None else tuple(there)
        if not all(step_s[i] for i in few):
            return Decision(replace(planned, step_s=step_s), None)
        whole, unhidden_s = planned.at(since, first), self.unhidden_s or (0.0,) * first.n
        present, those_s, waits_s = whole.among(few), tuple(step_s[i] for i in few), tuple(unhidden_s[i] for i in few)
        asked = those_s, present.batch, waits_s, first.among(few).usual_tokens, present.sequence
        best = balance(*asked)
        if first.exact:
            best = replace(best, exact=real_steps(*asked))
        gain = 1.0 - _seconds_per_token(best, those_s, waits_s) / _seconds_per_token(present, those_s, waits_s)
        insisted = planned.insisted + 1 if gain >= self.threshold else 0
        if insisted < self.patience:
            return Decision(replace(planned, step_s=step_s, insisted=insisted), gain)
        return Decision(Planned(planned.version + 1, since, _with(whole, best, few), whole, step_s), gain)

    def _smoothed(self, before_s: float, now_s: float) -> float:
        if not 0.0 < now_s < math.inf:
            return before_s
        return (1.0 - self.smoothing) * before_s + self.smoothing * now_s if before_s else now_s


def _seconds_per_token(plan: Plan, step_s: Sequence[float], unhidden_s: Sequence[float]) -> float:
    """T(plan), in seconds per token of all its workers."""
    return max(h * s + c for h, s, c in zip(plan.mean_steps, step_s, unhidden_s, strict=True)) / plan.mean_tokens


def _with(whole: Plan, best: Plan, workers: Sequence[int]) -> Plan:
    """`whole` with the steps of `best` for these workers, the only ones in it."""
    if len(workers) == whole.n:
        return best
    steps, exact = list(whole.steps), list(whole.exact)
    for k, i in enumerate(workers):
        steps[i] = best.steps[k]
        if exact:
            exact[i] = best.exact[k]
    return replace(whole, steps=tuple(steps), exact=tuple(exact))
