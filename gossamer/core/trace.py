"""Rates that change over time, and the range in which the numbers of a fleet lie."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from gossamer.core.errors import BadInput

SMALLEST, LARGEST = 1e-12, 1e15
"""Between these lies every number of a fleet that is not 0: products and quotients of a few of them stay finite and above 0."""
_RANGE = f"from {SMALLEST:g} to {LARGEST:g}"


def above_zero(value: float, what: str, *, finite: bool = True) -> None:
    """Refuses a number that is not above 0, or not in range."""
    if not SMALLEST <= value <= LARGEST and (finite or value != math.inf):
        raise BadInput(f"{what} is {value}: expected a {'finite ' if finite else ''}number above 0 ({_RANGE})")


def not_negative(value: float, what: str) -> None:
    """Refuses a number below 0, or not in range."""
    if value != 0 and not SMALLEST <= value <= LARGEST:
        raise BadInput(f"{what} is {value}: expected a finite number, 0 or more ({_RANGE})")


def rising(points: tuple[tuple[int, float], ...], what: str, unit: str) -> None:
    """Refuses pairs (tokens, value) whose tokens do not rise."""
    if any(not 1 <= t <= LARGEST or not SMALLEST <= v <= LARGEST for t, v in points) or any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise BadInput(
            f"{what} is {list(points)}: expected pairs (tokens of a step, {unit}), both above 0 and at most {LARGEST:g} "
            f"({unit} {SMALLEST:g} or more), tokens rising"
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """A factor on a rate that changes over time: factors[k] holds from times_s[k] to times_s[k+1], the last one for good.

    >>> trace = Trace((0.0, 10.0), (1.0, 0.5))
    >>> trace.factor(10.0), trace.next_change(3.0), trace.finish(8.0, work_s=4.0)
    (0.5, 10.0, 14.0)
    """

    times_s: tuple[float, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        times, factors = self.times_s, self.factors
        if not times or len(times) != len(factors):
            raise BadInput(f"a trace has {len(times)} times and {len(factors)} factors: give one factor for each time, at least one")
        if times[0] != 0 or any(not a < b <= LARGEST for a, b in pairwise(times)):
            raise BadInput(f"the times of a trace are {list(times)}: they must start at 0 and rise, to {LARGEST:g} at most")
        if any(not 0 <= f <= LARGEST for f in factors) or factors[-1] < SMALLEST:
            raise BadInput(f"the factors of a trace are {list(factors)}: expected 0 (an outage) or more, and the last one {_RANGE}")

    def factor(self, at_s: float) -> float:
        """The factor that holds at `at_s` (seconds, 0 or more)."""
        return self.factors[bisect_right(self.times_s, at_s) - 1]

    def next_change(self, at_s: float) -> float:
        """The first change after `at_s`; infinity when there is none."""
        k = bisect_right(self.times_s, at_s)
        return self.times_s[k] if k < len(self.times_s) else math.inf

    def finish(self, start_s: float, work_s: float) -> float:
        """When work that takes `work_s` seconds at factor 1 ends, begun at `start_s`: the e with integral of the factor from start to e
        equal to work_s."""
        now_s = start_s
        while True:
            factor, change_s = self.factor(now_s), self.next_change(now_s)
            if factor * (change_s - now_s) >= work_s:
                return now_s + work_s / factor if work_s else now_s
            work_s -= factor * (change_s - now_s)
            now_s = change_s
