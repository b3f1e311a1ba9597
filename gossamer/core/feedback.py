"""Error feedback: what a lossy codec drops is kept and said again."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.core.errors import BadInput
from gossamer.core.tree import Tree


@dataclass(frozen=True)
class Feedback:
    """e <- decay * e + D is what is encoded; then e <- e - decoded (Seide et al. 2014; SparseLoCo, arXiv 2508.15706, with decay b < 1).

    With decay 1 nothing is lost: the sum of what was decoded plus e equals the sum of what was to be said. One more copy of the model
    is held.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise BadInput(f"error-feedback decay {self.decay} must be above 0 and at most 1 (leave feedback out to have none)")

    def absorb(self, residual: Tree, said: Tree) -> Tree:
        """e <- decay * e + D, in place."""
        for k, e in residual.items():
            e.mul_(self.decay).add_(said[k])
        return residual
