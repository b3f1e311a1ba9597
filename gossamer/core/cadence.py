"""When what was said lands."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.core.errors import BadInput


@dataclass(frozen=True)
class Cadence:
    """The exchange of a round lands `overlap` of a round later.

    0: at the end of its own round; the worker waits. Between 0 and 1: during the next round, after that share of its inner steps, so
    that the exchange travels under them (Streaming DiLoCo, arXiv 2501.18512, sec. 3.3, with one fragment). On landing the worker's own
    block is replaced by the agreed one, local += x_{t+1} - y_t, and its next drift is taken from x_{t+1}, so that nothing counts twice.
    """

    overlap: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap < 1.0:
            raise BadInput(f"cadence overlap {self.overlap} must be at least 0 and below 1: a share of the next round's inner steps")

    def landing_step(self, steps: int) -> int:
        """How many of the next round's `steps` inner steps are taken before the landing: at least one, if there is overlap."""
        return min(steps, max(1, round(self.overlap * steps))) if self.overlap else 0
