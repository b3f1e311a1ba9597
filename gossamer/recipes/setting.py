"""What a run fixes whatever the method: who works how much, for how long, from which seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gossamer.core.errors import BadInput
from gossamer.core.inner import AdamW, Inner
from gossamer.core.matching import Rates
from gossamer.core.plan import Plan
from gossamer.core.schedule import Cosine, Schedule


@dataclass(frozen=True)
class Setting:
    """The common arguments of all recipes."""

    plan: Plan
    """H_i inner steps and B_i sequences of L tokens per step, for every worker i."""
    rounds: int
    """Outer rounds."""
    seed: int = 0
    """Of the random topologies; equal on all workers."""
    inner: Inner | None = None
    """None: the method's own."""
    schedule: Schedule = field(default_factory=Cosine)
    speeds: tuple[float, ...] = ()
    """Steps per second of each worker at its batch; empty: all alike. For methods that divide the work themselves."""
    regions: tuple[int, ...] = ()
    """The region of each worker, numbered in the order in which they first occur; empty: one region."""
    rates: Callable[[], Rates] | None = None
    """What messages get between the workers, worked out when a method asks for it (peers drawn by link). None: not known."""

    def __post_init__(self) -> None:
        for what, given in (("speeds", self.speeds), ("regions", self.regions)):
            if given and len(given) != self.plan.n:
                raise BadInput(f"a setting has {len(given)} {what} for {self.plan.n} workers: give one each, or none")
        if not all(0 < v < math.inf for v in self.speeds):
            raise BadInput(f"the workers' speeds are {self.speeds} steps/s: expected finite numbers above 0")

    @property
    def n(self) -> int:
        """Workers."""
        return self.plan.n

    def inner_or(self, default: Inner) -> Inner:
        """The inner optimizer asked for, or the method's own."""
        return self.inner or default

    def one_step(self, method: str) -> Setting:
        """The same tokens with one inner step a round, for methods that exchange at every step: H rounds for each of these.

        Raises:
            BadInput: the workers have unlike numbers of steps.
        """
        steps = self.plan.steps[0]
        if any(h != steps for h in self.plan.steps):
            raise BadInput(f"{method} exchanges at every step, so all workers take equally many: use plan 'uniform', not {self.plan.steps}")
        return replace(self, plan=replace(self.plan, steps=(1,) * self.n, exact=()), rounds=self.rounds * steps)


ADAMW = AdamW(lr=2e-3)
"""The default inner optimizer."""
