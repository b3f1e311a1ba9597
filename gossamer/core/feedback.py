"""Error feedback: what a lossy codec drops is kept and said again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, Tree, flat

Ends: TypeAlias = Literal["worker", "mean", "both"]


@dataclass(frozen=True)
class Feedback:
    """e <- decay * e + D is what is encoded; then e <- e - decoded (Seide et al. 2014; SparseLoCo, arXiv 2508.15706, with decay b < 1).

    With decay 1 nothing is lost: the sum of what was decoded plus e equals the sum of what was to be said.

    Raises:
        BadInput: a decay outside 0 to 1, unknown ends.
    """

    decay: float = 1.0
    ends: Ends = "worker"
    """Whose errors are fed back: the `worker`'s own, in what it says (one more copy of the model is held); those of the `mean` of a slice,
    which its owner encodes a second time (shard; one more slice); or `both`."""

    @property
    def at_worker(self) -> bool:
        """What a worker says is fed back."""
        return self.ends != "mean"

    @property
    def at_mean(self) -> bool:
        """What the owner of a slice sends on is fed back."""
        return self.ends != "worker"

    def __post_init__(self) -> None:
        if self.ends not in ("worker", "mean", "both"):
            raise BadInput(f"error feedback is at {self.ends!r}: expected 'worker', 'mean' or 'both'")
        if not 0.0 < self.decay <= 1.0:
            raise BadInput(f"error-feedback decay {self.decay} must be above 0 and at most 1 (leave feedback out to have none)")

    def absorb(self, residual: Tree, said: Tree) -> Tree:
        """e <- decay * e + D, in place."""
        for k, e in residual.items():
            e.mul_(self.decay).add_(said[k])
        return residual

    def absorb_slice(self, residual: Tree, mean: Tree, slice: Layout) -> Tree:
        """A copy of the mean of a slice (full shapes, one part a tensor) with decay * e added, e flat and only as long as the part."""
        fed = {part.name: mean[part.name].clone() for part in slice}
        for part in slice:
            flat(fed, part).add_(residual[part.name], alpha=self.decay)
        return fed
