"""Refusing a pseudo-gradient that would wreck the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Guard:
    """A worker's own contribution is refused when it is not finite, or its norm is above `ratio` times the median of the norms of its
    last `window` accepted ones (once there are `after` of them). A refused contribution carries no weight anywhere, the worker starts
    the next round from the agreed parameters with a fresh inner state, and every worker notes who was refused.
    """

    ratio: float = 30.0
    window: int = 16
    after: int = 4

    def refuses(self, norm: float, accepted: Sequence[float]) -> bool:
        """Whether a contribution of this norm is refused."""
        if not math.isfinite(norm):
            return True
        return len(accepted) >= self.after and norm > self.ratio * median(accepted)

    def remember(self, norm: float, accepted: list[float]) -> list[float]:
        """The norms to keep after accepting one."""
        return [*accepted, norm][-self.window :]
