"""What a worker has done so far in a round."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from gossamer.core.sketch import sketch, sketch_of_ranges, write
from gossamer.core.tree import Tree
from gossamer.worker.effects import Effect, Reply, SiteSum
from gossamer.worker.exchange import Heard, Own
from gossamer.worker.replanning import Clocked
from gossamer.worker.seat import Seat
from gossamer.worker.state import State


@dataclass
class Tally:
    """Filled as the round goes, and forgotten at its end."""

    early: Own = field(default_factory=dict)
    """What was said before the inner steps (outer rules with `before`)."""
    clocked: Clocked = field(default_factory=Clocked)
    """Inner steps taken, and their seconds."""
    tokens: int = 0
    loss_sum: float = 0.0
    local: Tree = field(default_factory=dict)
    """The worker's own parameters (gradients, for ddp); live views where the body gave them."""
    heard: list[Heard] = field(default_factory=list)
    """The exchanges that landed."""
    norm: float = 0.0
    """Of the pseudo-gradients said, all fragments together."""
    zeros: int = 0
    """Exact zeros that the codec could not say."""
    refused: bool = False
    """This worker's guard refused something."""
    drift: str = ""
    """Sketch of the pseudo-gradient, where replicas may differ."""
    anchor: str = ""
    """Sketch of the anchor, then."""

    def put(self, tree: Tree) -> None:
        """Parameters that were loaded into the body."""
        self.local |= {name: v.to(self.local[name].dtype) for name, v in tree.items() if name in self.local}

    def judged(self, norm: float, refused: bool) -> None:
        """The guard has looked at a pseudo-gradient."""
        self.norm = math.hypot(self.norm, norm)
        self.refused |= refused

    def sketch(self, seat: Seat, state: State) -> Generator[Effect, Reply, None]:
        """Sketches the anchor, where a drift was sketched."""
        if self.drift:
            self.anchor = yield from sketched(seat, state.x)

    def record(self, seat: Seat, state: State) -> dict[str, Any]:
        """The note of a completed round."""
        record: dict[str, Any] = {
            "kind": "round",
            "round": state.round,
            "worker": seat.me,
            "tokens": self.tokens,
            "tokens_total": state.tokens,
            "steps": self.clocked.steps,
            "loss": self.loss_sum / self.tokens if self.tokens else None,
            "drift_norm": self.norm,
        }
        if self.zeros:
            record["exact_zeros"] = self.zeros / seat.elements
        if full := sum(heard.full for heard in self.heard):
            record["sent_in_full"] = full / seat.elements
        if self.heard and state.x:
            record["weights"] = {str(j): w for j, w in self.heard[-1].weights.items() if w}
            # With overlap this round's own refusal is in what lands next.
            mine = [seat.me] if self.refused and not seat.method.cadence.overlap else []
            record["refused"] = sorted({*mine, *(j for heard in self.heard for j in heard.refused)})
        if self.drift:
            record["sketch"] = {"x": self.anchor, "drift": self.drift}
        if absent := sorted({j for heard in self.heard for j in heard.absent}):
            record["absent"] = absent
        return record


def sketched(seat: Seat, tree: Tree) -> Generator[Effect, Reply, str]:
    """The sketch of a tree of the worker, as text."""
    if seat.ranges is None:
        return write(sketch(tree))
    mine = torch.from_numpy(sketch_of_ranges(tree, seat.layout, seat.whole))
    total = yield SiteSum(mine)
    return write(total.numpy())
