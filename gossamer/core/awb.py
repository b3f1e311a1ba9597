"""Adaptive workload balancing (AWB): how many sequences B_i and how many inner steps H_i each of unlike workers takes in a round.

    B_i = a batch within memory at the knee of tokens a second
    H_i = max(1, round((T - c_i) / t_i)),  T such that sum_i H_i B_i L is as near as can be to the tokens asked for

t_i: seconds of a step of B_i sequences; c_i: seconds of worker i's exchange that are not hidden under its steps. Then compute plus
exchange takes T for everybody, to half a step. Shin et al. 2026 (GeoMesh) balance compute so; with equal B_i and c_i from the link it is
the compensation for a slow link of Cagnasso et al. 2026 (GASLoC, sec. 4).

Whole numbers are found in exact arithmetic, so that every worker that knows the same numbers finds the same plan.

>>> balance([1.0, 2.0, 4.0], [8, 8, 8], [0.0, 0.0, 0.0], tokens=8 * 42 * 16, sequence=16).steps
(24, 12, 6)
>>> balance([1.0, 1.0], [8, 8], [0.0, 10.0], tokens=8 * 50 * 16, sequence=16).steps
(30, 20)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gossamer.core.errors import BadInput
from gossamer.core.plan import Plan


@dataclass(frozen=True)
class Balance:
    """What the workers of a plan take, and how far whole steps are from the best that fractions of a step could do."""

    step_s: tuple[float, ...]
    """t_i at the plan's B_i."""
    unhidden_s: tuple[float, ...]
    """c_i."""
    plan: Plan
    tokens: int
    """Tokens a round that were asked for."""

    @cached_property
    def round_s(self) -> float:
        """max_i (c_i + H_i t_i): the round's length, apart from what is common to all."""
        return max(c + h * t for c, h, t in zip(self.unhidden_s, self.plan.steps, self.step_s, strict=True))

    @cached_property
    def spread_s(self) -> float:
        """max_i (c_i + H_i t_i) - min_i (c_i + H_i t_i): how long the first waits for the last."""
        return self.round_s - min(c + h * t for c, h, t in zip(self.unhidden_s, self.plan.steps, self.step_s, strict=True))

    @cached_property
    def ideal_s(self) -> float:
        """The length of a round of the plan's tokens with H_i any real number of 1 or more: the T of the continuous problem, sum_i
        max(1, (T - c_i) / t_i) B_i L = tokens, or the longest single step with its exchange where that is later."""
        at_s = continuous(self.step_s, self.plan.batch, self.unhidden_s, self.plan.tokens_per_round / self.plan.sequence)
        return max(at_s, *(c + t for c, t in zip(self.unhidden_s, self.step_s, strict=True)))

    @property
    def loss(self) -> float:
        """What whole steps cost: the round's length over that of the continuous optimum for the same tokens, minus 1; 0 or more."""
        return max(0.0, self.round_s / self.ideal_s - 1.0)

    @property
    def tokens_off(self) -> int:
        """Planned tokens a round (in the mean, where steps are carried), less those asked for."""
        return self.plan.usual_tokens - self.tokens


def balance(step_s: Sequence[float], batch: Sequence[int], unhidden_s: Sequence[float], tokens: int, sequence: int) -> Plan:
    """H_i for given B_i.

    All workers begin with one step. Worker i is due its step h + 1 at time c_i + (h + 1/2) t_i; steps are dealt out in the order of those
    times (the lower id on a tie) until the tokens are as near as can be to `tokens` (the fewer on a tie). That is
    H_i = max(1, round((T - c_i) / t_i)) with T the time of the last step dealt out. With equal B_i the tokens are met exactly when they
    are a multiple of B L of at least n. A greater c_i never gives a greater H_i.

    Args:
        step_s: t_i, seconds of an inner step of worker i at its B_i.
        batch: B_i.
        unhidden_s: c_i, seconds. Only their differences matter.
        tokens: asked for in a round, by all workers together.
        sequence: L.

    Raises:
        BadInput: lists of unlike lengths, a time that is not finite and above 0 (c_i: 0 or more), tokens below 1, a B_i or L below 1.
    """
    n = len(step_s)
    if not n == len(batch) == len(unhidden_s):
        raise BadInput(
            f"a plan was asked for with {n} step times, {len(batch)} batch sizes and {len(unhidden_s)} exchange times: give one of each "
            "per worker"
        )
    Plan((1,) * n, tuple(batch), sequence)
    for i, (t, c) in enumerate(zip(step_s, unhidden_s, strict=True)):
        if not 0 < t < math.inf:
            raise BadInput(f"a step of worker {i} takes {t} s: expected a finite number above 0")
        if not 0 <= c < math.inf:
            raise BadInput(f"the exchange of worker {i} takes {c} s: expected a finite number, 0 or more")
    if tokens < 1:
        raise BadInput(f"a plan was asked for with {tokens} tokens a round: expected 1 or more")
    # Binary fractions over one denominator: whole numbers from here on.
    ratios = [x.as_integer_ratio() for x in map(float, (*step_s, *unhidden_s))]
    unit = max(d for _, d in ratios)
    scaled = [p * (unit // d) for p, d in ratios]
    step, wait = scaled[:n], scaled[n:]

    def due(i: int, h: int) -> int:
        """Twice the time at which worker i, with h steps, is due one more."""
        return 2 * wait[i] + (2 * h + 1) * step[i]

    p, q = continuous(step_s, batch, unhidden_s, tokens / sequence).as_integer_ratio()
    guess = p * unit // q  # where to begin; the outcome does not depend on it
    steps = [max(1, (2 * (guess - wait[i]) + step[i]) // (2 * step[i])) for i in range(n)]
    total = sum(h * b for h, b in zip(steps, batch, strict=True)) * sequence
    if total < tokens:
        later = [(due(i, steps[i]), i) for i in range(n)]
        heapq.heapify(later)
        while total < tokens:
            i = later[0][1]
            more = total + batch[i] * sequence
            if more - tokens >= tokens - total:
                break
            steps[i], total = steps[i] + 1, more
            heapq.heapreplace(later, (due(i, steps[i]), i))
    else:
        earlier = [(-due(i, steps[i] - 1), -i) for i in range(n) if steps[i] > 1]
        heapq.heapify(earlier)
        while earlier and total > tokens:
            i = -earlier[0][1]
            less = total - batch[i] * sequence
            if tokens - less > total - tokens:
                break
            steps[i], total = steps[i] - 1, less
            if steps[i] > 1:
                heapq.heapreplace(earlier, (-due(i, steps[i] - 1), -i))
            else:
                heapq.heappop(earlier)
    return Plan(tuple(steps), tuple(batch), sequence)


def real_steps(step_s: Sequence[float], batch: Sequence[int], unhidden_s: Sequence[float], tokens: int, sequence: int) -> tuple[float, ...]:
    """H_i = max(1, (T - c_i) / t_i), not rounded: what `Plan.exact` carries from round to round. Arguments as for `balance`.

    >>> real_steps([1.0, 2.0], [8, 8], [0.0, 0.0], tokens=8 * 4 * 16, sequence=16)
    (2.6666666666666665, 1.3333333333333333)
    """
    T = continuous(step_s, batch, unhidden_s, tokens / sequence)
    return tuple(max(1.0, (T - c) / t) for t, c in zip(step_s, unhidden_s, strict=True))


def continuous(step_s: Sequence[float], batch: Sequence[int], unhidden_s: Sequence[float], sequences: float) -> float:
    """The T of sum_i max(1, (T - c_i) / t_i) B_i = sequences, in seconds; the latest T with one step each where that is already more.

    The sum is linear between the times c_i + t_i at which worker i leaves its one step, so they are passed in order.
    """
    order = sorted(range(len(step_s)), key=lambda i: unhidden_s[i] + step_s[i])
    held = float(sum(batch))  # sequences of the workers that take one step
    rate = offset = 0.0  # of the others: sum B / t and sum B c / t
    for k, i in enumerate(order):
        held -= batch[i]
        rate += batch[i] / step_s[i]
        offset += batch[i] * unhidden_s[i] / step_s[i]
        at_s = (sequences - held + offset) / rate
        if k + 1 == len(order) or at_s <= unhidden_s[order[k + 1]] + step_s[order[k + 1]]:
            return max(at_s, unhidden_s[i] + step_s[i])
    raise AssertionError("unreachable: the last worker returns")


def knee(step_s: Callable[[int], float], least: int, most: int, share: float) -> int:
    """The smallest batch from `least` to `most` with at least `share` of the best tokens a second in that range.

    step_s: seconds of a step of that many sequences.

    >>> knee(lambda batch: 1.0 + 0.1 * batch, 1, 100, 0.8)
    27
    >>> knee(lambda batch: 0.5 * batch, 8, 8, 0.95)
    8
    """
    rates = [b / step_s(b) for b in range(least, most + 1)]
    floor = share * max(rates)
    return least + next(k for k, rate in enumerate(rates) if rate >= floor)
