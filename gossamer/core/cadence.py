"""When what was said lands: the timeline of a round.

A round has events, in one order on all workers: fragment p is *launched* (said), its exchange *meets* halfway where it has two phases
(shard: the mean of the own slice is formed and sent), and it *lands*. Where an event stands is a share of a round, so that workers with
unlike numbers of inner steps come by the same events in the same order.

>>> for event in Cadence(overlap=0.3, fragments=2).timeline(meets=False):
...     print(event.fragment, event.kind, event.share, event.step(10))
1 land 3/10 3
0 launch 1/2 5
0 land 4/5 8
1 launch 1 10
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

from gossamer.core.errors import BadInput

_ORDER = ("launch", "meet", "land")
_LATE = ("meet", "land", "launch")
"""Where an exchange travels for a whole round: it lands right before the next is launched."""


class Event(NamedTuple):
    """Something that happens to a fragment in every round."""

    share: Fraction
    """Where in the round: above 0, and at most 1, its end."""
    kind: Literal["launch", "meet", "land"]
    fragment: int

    def step(self, steps: int) -> int:
        """How many of a round's `steps` inner steps come before it: at least one."""
        return min(steps, max(1, round(self.share * steps)))


@dataclass(frozen=True)
class Cadence:
    """Fragment p of F is launched after (p + 1) / F of each round's inner steps, and lands `overlap` of a round later.

    F = 1 and overlap 0: everything is exchanged at the end of the round, and the worker waits. With overlap the exchange travels under
    inner steps; with fragments it is spread over the round (Streaming DiLoCo, arXiv 2501.18512, sections 3.1 to 3.3). On landing the
    worker's own block is replaced by the agreed one, local += x_{t+1} - y_t, and its next drift is taken from x_{t+1}, so that nothing
    counts twice.

    Raises:
        BadInput: overlap outside 0 to 1, no fragments, eager without overlap.
    """

    overlap: float = 0.0
    """Share of a round's inner steps under which an exchange travels; 0: it lands where it is launched; 1: a whole block late, right
    before the next launch."""
    fragments: int = 1
    """F: parts of the model, whole tensors each, that travel apart."""
    eager: bool = False
    """While an exchange travels, go on from the outer step on the worker's own part of now and the others' part as last heard, and not
    from the worker's own parameters (arXiv 2502.12996, "eager updates"). The agreed parameters are formed as without."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap <= 1.0:
            raise BadInput(f"cadence overlap {self.overlap} must be from 0 to 1: a share of the next round's inner steps")
        if self.fragments < 1:
            raise BadInput(f"cadence fragments is {self.fragments}: expected 1 (the whole model at once) or more")
        if self.eager and not self.overlap:
            raise BadInput("cadence eager bridges the time in which an exchange travels, and without overlap there is none: set overlap")

    def timeline(self, meets: bool) -> tuple[Event, ...]:
        """The events of a round in order; those of an exchange launched in the round before come first. `meets`: an exchange has two
        phases, the second of which starts half of the way."""
        return _timeline(self.overlap, self.fragments, meets)

    def landing_step(self, steps: int) -> int:
        """How many of a round's `steps` inner steps are taken before what was launched at the end of the round before lands; 0 without
        overlap."""
        return Event(_lag(self.overlap), "land", self.fragments - 1).step(steps) if self.overlap else 0


@lru_cache(maxsize=64)
def _timeline(overlap: float, fragments: int, meets: bool) -> tuple[Event, ...]:
    lag = _lag(overlap)
    events = []
    for p in range(fragments):
        start = Fraction(p + 1, fragments)
        events.append(Event(start, "launch", p))
        if lag and meets:
            events.append(Event(_within(start + lag / 2), "meet", p))
        if lag:
            events.append(Event(_within(start + lag), "land", p))
    order = _LATE if lag == 1 else _ORDER
    return tuple(sorted(events, key=lambda e: (e.share, order.index(e.kind), e.fragment)))


def _lag(overlap: float) -> Fraction:
    """The number as written: 0.3 of 5 steps is one and a half."""
    return Fraction(str(float(overlap)))


def _within(share: Fraction) -> Fraction:
    return share - 1 if share > 1 else share
