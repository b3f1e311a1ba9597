"""Who does how much in a round: H_i inner steps of B_i sequences of L tokens for worker i.

Here B_i is given and only H_i follows the speed of the worker. Batch sizes chosen to fit memory and step time, together with H_i, are the
business of AWB (adaptive workload balancing), a planner of its own that returns the same `Plan`.

>>> uniform(2, steps=30, batch=8, sequence=512).tokens_per_round
245760
>>> proportional([2.0, 1.0, 1.0], steps=30, batch=8, sequence=512).steps
(45, 23, 22)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from gossamer.core.errors import BadInput


@dataclass(frozen=True)
class Plan:
    """The work of every worker in one round. All workers hold the same plan.

    Raises:
        BadInput: no workers, unequal lengths, or an H_i, B_i or L below 1.
    """

    steps: tuple[int, ...]
    """H_i."""
    batch: tuple[int, ...]
    """B_i, sequences per step."""
    sequence: int
    """L, tokens per sequence."""
    exact: tuple[float, ...] = ()
    """The H_i that balance best, not rounded: what is left of a step is carried from round to round, see `at`. Empty: H_i every round."""

    def __post_init__(self) -> None:
        if self.exact and (len(self.exact) != len(self.steps) or any(not 1.0 <= h < math.inf for h in self.exact)):
            raise BadInput(f"the exact step counts of a plan are {self.exact}: expected one per worker, each a finite number of 1 or more")
        if not self.steps or len(self.steps) != len(self.batch):
            raise BadInput(f"a plan has {len(self.steps)} step counts and {len(self.batch)} batch sizes: give one of each per worker")
        for i, (h, b) in enumerate(zip(self.steps, self.batch, strict=True)):
            if h < 1 or b < 1:
                raise BadInput(
                    f"worker {i} has H = {h} steps of B = {b} sequences: both must be 1 or more (take an idle worker out of the fleet)"
                )
        if self.sequence < 1:
            raise BadInput(f"a sequence has {self.sequence} tokens: expected 1 or more")

    @property
    def n(self) -> int:
        """Workers."""
        return len(self.steps)

    def at(self, round: int) -> Plan:
        """The whole steps of `round`: H_i, or with exact step counts h_i the steps that bring worker i to round(h_i (round + 1)) in all.

        >>> [Plan((2, 1), (8, 8), 64, exact=(1.75, 1.25)).at(t).steps for t in range(4)]
        [(2, 1), (2, 2), (1, 1), (2, 1)]
        """
        if not self.exact:
            return self
        done, after = ([math.floor(h * t + 0.5) for h in self.exact] for t in (round, round + 1))
        return replace(self, steps=tuple(b - a for a, b in zip(done, after, strict=True)), exact=())

    def among(self, workers: Sequence[int]) -> Plan:
        """The share of some workers, in their order.

        >>> Plan((3, 2, 1), (8, 8, 4), 64).among((0, 2)).steps
        (3, 1)
        """
        if len(workers) == self.n:
            return self
        exact = tuple(self.exact[i] for i in workers) if self.exact else ()
        return replace(self, steps=tuple(self.steps[i] for i in workers), batch=tuple(self.batch[i] for i in workers), exact=exact)

    @property
    def mean_steps(self) -> tuple[float, ...]:
        """Steps of a round in the mean over rounds."""
        return self.exact or tuple(map(float, self.steps))

    @property
    def mean_tokens(self) -> float:
        """Tokens of a round of all workers, in the mean over rounds."""
        return sum(h * b for h, b in zip(self.mean_steps, self.batch, strict=True)) * self.sequence

    @property
    def usual_tokens(self) -> int:
        """`mean_tokens` to the nearest whole token: `tokens_per_round`, unless what is left of steps is carried.

        >>> plan = Plan((2, 1), (8, 4), 64, exact=(1.75, 1.25))
        >>> plan.tokens_per_round, plan.usual_tokens
        (1280, 1216)
        """
        return round(self.mean_tokens) if self.exact else self.tokens_per_round

    def rounds_of(self, tokens: int) -> int:
        """The rounds that it takes to come to `tokens` tokens of all workers, the last one whole.

        >>> [Plan((2, 1), (8, 8), 64).rounds_of(tokens) for tokens in (1536, 1537)]
        [1, 2]
        """
        return -(-tokens // self.usual_tokens)

    def tokens_before(self, round: int) -> int:
        """Tokens of all workers in the rounds before `round`."""
        if not self.exact:
            return round * self.tokens_per_round
        return sum(math.floor(h * round + 0.5) * b for h, b in zip(self.exact, self.batch, strict=True)) * self.sequence

    def tokens(self, i: int) -> int:
        """n_i = H_i * B_i * L: tokens that worker i consumes in a round."""
        return self.steps[i] * self.batch[i] * self.sequence

    @cached_property
    def tokens_per_round(self) -> int:
        """sum_i n_i. Worked out once: each worker asks for it in each round."""
        return sum(h * b for h, b in zip(self.steps, self.batch, strict=True)) * self.sequence


def uniform(n: int, steps: int, batch: int, sequence: int) -> Plan:
    """H_i = steps and B_i = batch for all n workers."""
    return Plan((steps,) * n, (batch,) * n, sequence)


def proportional(speeds: Sequence[float], steps: int, batch: int, sequence: int) -> Plan:
    """H_i in proportion to the speed of worker i, sum H_i = n * steps, H_i >= 1, B_i = batch.

    speeds: steps per second at that batch. Whole numbers by largest remainder (the lower id on a tie), in exact arithmetic: equal speeds
    give the uniform plan. A worker whose share is below one step gets one, and the others share the rest.

    Raises:
        BadInput: a speed that is not a finite number above 0, or steps, batch or sequence below 1.
    """
    n = len(speeds)
    for i, v in enumerate(speeds):
        if not 0 < v < math.inf:
            raise BadInput(f"the speed of worker {i} is {v} steps/s: expected a finite number above 0")
    even = uniform(n, steps, batch, sequence)
    exact = [Fraction(v) for v in speeds]
    free, total = list(range(n)), n * steps
    while True:
        scale = total / sum((exact[i] for i in free), Fraction(0))
        slow = {i for i in free if exact[i] * scale < 1}
        if not slow:
            break
        free = [i for i in free if i not in slow]
        total -= len(slow)
    planned = [1] * n
    for i in free:
        planned[i] = math.floor(exact[i] * scale)
    order = sorted(free, key=lambda i: (planned[i] - exact[i] * scale, i))
    for i in order[: total - sum(planned[i] for i in free)]:
        planned[i] += 1
    return Plan(tuple(planned), even.batch, sequence)
