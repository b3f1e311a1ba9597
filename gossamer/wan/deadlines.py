"""One deadline, from what was observed; every other time-out derives from it.

    deadline = max(floor, median + k * MAD)

of the last arrivals, in seconds since a site began to wait: MAD is the median of their distances from the median. Both are robust: a few
slow sites do not stretch it, a few quick ones do not shrink it. What has not come in time counts as twice the wait until it does come, so
that a deadline that is too short for everybody grows instead of cutting everybody off for good.

The time-outs of the control messages derive from the floor, not from the moving deadline, so that all sites have the same ones, and a lease
granted in one round is not too short for the next:

>>> print(Timeouts.of(30.0).table())
time-out         seconds  what
deadline          30.000  of a round, at least; more where arrivals take longer
lease             10.000  without a sign of life for so long, a site is out of the roster
beat               2.500  between two signs of life: three may get lost
call               5.000  one message to the coordinator and its answer
grace              2.500  left of the lease when a site's standing stream breaks
keepalive          2.500  a quiet connection is asked whether it is there
keepalive_wait     2.500  and is dead without an answer
backoff            0.250  before the first new attempt at a lost coordinator, doubled each time, up to a beat
elect             12.500  without the coordinator for so long, sites elect one among themselves
connect           60.000  for the other sites, at the start
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import median

from gossamer.core.errors import BadInput

_KEPT = 128
"""Arrivals that count."""
_ENOUGH = 5
"""Arrivals before the deadline moves."""


class Deadline:
    """The deadline of a round, from the arrivals that one site (or the coordinator) has seen.

    Args:
        floor_s: the least it can be, and what it is at the start.
        spread: k.
    """

    def __init__(self, floor_s: float, spread: float = 6.0) -> None:
        if not (math.isfinite(floor_s) and floor_s > 0):
            raise BadInput(f"the floor of the deadline is {floor_s} s: expected a number above 0")
        if not (math.isfinite(spread) and spread >= 0):
            raise BadInput(f"the deadline's k is {spread}: expected a number of at least 0 (6 is usual)")
        self.floor_s, self.spread = floor_s, spread
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self._now_s: float | None = floor_s

    def arrived(self, waited_s: float) -> None:
        """Something came after so many seconds, in time or late."""
        if math.isfinite(waited_s):
            self._seen.append(max(0.0, waited_s))
            self._now_s = None

    def missed(self, waited_s: float) -> None:
        """Something has not come in so many seconds."""
        self.arrived(2.0 * waited_s)

    @property
    def seconds(self) -> float:
        """The deadline as it is now."""
        if self._now_s is None:
            middle = median(self._seen)
            spread_s = median(abs(s - middle) for s in self._seen)
            self._now_s = max(self.floor_s, middle + self.spread * spread_s) if len(self._seen) >= _ENOUGH else self.floor_s
        return self._now_s


@dataclass(frozen=True)
class Timeouts:
    """All time-outs, in seconds. `of` derives them; one that is given by hand is checked against the others."""

    deadline: float
    lease: float
    beat: float
    call: float
    grace: float
    keepalive: float
    keepalive_wait: float
    backoff: float
    elect: float
    connect: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (math.isfinite(value) and value > 0):
                raise BadInput(
                    f"time-out {f.name} is {value} s: expected a number above 0; leave it out to have it derived from the deadline"
                )
        for holds, what, remedy in _RULES:
            if not holds(self):
                raise BadInput(f"inconsistent time-outs: {what(self)}; {remedy}, or leave it out to have it derived from the deadline")

    @classmethod
    def of(
        cls,
        floor_s: float,
        *,
        lease_s: float | None = None,
        beat_s: float | None = None,
        call_s: float | None = None,
        connect_s: float | None = None,
    ) -> Timeouts:
        """The time-outs that go with a deadline of at least `floor_s`.

        Raises:
            BadInput: those given do not go together.
        """
        lease = floor_s / 3 if lease_s is None else lease_s
        beat = lease / 4 if beat_s is None else beat_s
        return cls(
            deadline=floor_s,
            lease=lease,
            beat=beat,
            call=lease / 2 if call_s is None else call_s,
            grace=lease / 4,
            keepalive=lease / 4,
            keepalive_wait=lease / 4,
            backoff=beat / 10,
            elect=lease + beat,
            connect=2 * floor_s if connect_s is None else connect_s,
        )

    def line(self) -> str:
        """The ones that people ask for, in a line."""
        return f"deadline of a round {self.deadline:.4g} s at least, lease {self.lease:.4g} s, a sign of life every {self.beat:.4g} s"

    def table(self) -> str:
        """For the start of a run."""
        width = max(len(f.name) for f in fields(self))
        rows = [f"{f.name:<{width}} {getattr(self, f.name):9.3f}  {_WORDS[f.name]}" for f in fields(self)]
        return "\n".join([f"{'time-out':<{width}}   seconds  what", *rows])


_WORDS = {
    "deadline": "of a round, at least; more where arrivals take longer",
    "lease": "without a sign of life for so long, a site is out of the roster",
    "beat": "between two signs of life: three may get lost",
    "call": "one message to the coordinator and its answer",
    "grace": "left of the lease when a site's standing stream breaks",
    "keepalive": "a quiet connection is asked whether it is there",
    "keepalive_wait": "and is dead without an answer",
    "backoff": "before the first new attempt at a lost coordinator, doubled each time, up to a beat",
    "elect": "without the coordinator for so long, sites elect one among themselves",
    "connect": "for the other sites, at the start",
}

_Rule = tuple[Callable[[Timeouts], bool], Callable[[Timeouts], str], str]
_RULES: tuple[_Rule, ...] = (
    (
        lambda t: 2 * t.lease <= t.deadline,
        lambda t: (
            f"the lease of {t.lease:.4g} s is more than half of the deadline of {t.deadline:.4g} s, "
            "which would be over before a dead site is known to be dead"
        ),
        "shorten wan.lease_s or raise wan.deadline_s",
    ),
    (
        lambda t: 3 * t.beat <= t.lease,
        lambda t: f"with a beat every {t.beat:.4g} s, two lost ones end a lease of {t.lease:.4g} s",
        "shorten beat_s or raise wan.lease_s",
    ),
    (
        lambda t: t.call <= t.lease,
        lambda t: f"a call may take {t.call:.4g} s, longer than the lease of {t.lease:.4g} s that it renews",
        "shorten call_s or raise wan.lease_s",
    ),
    (
        lambda t: t.connect >= t.lease,
        lambda t: f"connect is {t.connect:.4g} s, less than the lease of {t.lease:.4g} s: a site that restarts would not be waited for",
        "raise connect_s",
    ),
)
