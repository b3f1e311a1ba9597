"""A worker that slows down in the middle of a run: what re-planning is tried on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.core.errors import BadInput


@dataclass(frozen=True)
class Slowdown:
    """From a share `at` of the run's rounds on, an inner step of `worker` takes `factor` times as long.

    A share of the rounds, not a time: methods of unlike speed then meet it at the same point of their training.

    >>> Slowdown(worker=2, factor=3.0, at=0.5).of(2, round=5, rounds=10), Slowdown(2, 3.0, 0.5).of(2, round=4, rounds=10)
    (3.0, 1.0)

    Raises:
        BadInput: a factor that is not a finite number above 0, or a share below 0 or not below 1.
    """

    worker: int
    factor: float
    at: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.factor < math.inf:
            raise BadInput(f"a slow-down by {self.factor}: expected a finite factor above 0 (2 doubles the time of a step)")
        if not 0.0 <= self.at < 1.0:
            raise BadInput(f"a slow-down at {self.at} of the run: expected a share from 0 to below 1")

    def first_round(self, rounds: int) -> int:
        """The first slow round (the first of a run is 0)."""
        return math.ceil(self.at * rounds)

    def of(self, worker: int, round: int, rounds: int) -> float:
        """What multiplies the time of a step of `worker` in `round` of `rounds`."""
        return self.factor if worker == self.worker and round >= self.first_round(rounds) else 1.0
