"""Everything a worker must remember between rounds, apart from what its body keeps (inner optimizer, data cursor)."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.core.tree import Tree
from gossamer.worker.packet import Packet


@dataclass
class Pending:
    """An exchange in flight across a round boundary (overlap)."""

    round: int
    """The round whose work it carries."""
    own: dict[int, Packet]
    """The packets said, by slice (one slice, 0, when everything goes to everybody)."""
    y: Tree
    """The parameters at launch: replaced by the agreed ones on landing, local += x_next - y."""


@dataclass
class State:
    """One worker at a round boundary. The world checkpoints it whole; a run resumed from it goes on bit for bit."""

    x: Tree
    """Anchor: float32 parameters at the start of the round."""
    round: int = 0
    """Rounds completed."""
    tokens: int = 0
    """Planned global tokens of the completed rounds."""
    outer: dict[str, Tree] = field(default_factory=dict)
    """Outer optimizer state by name (momentum, previous iterate)."""
    residual: Tree | None = None
    """Error feedback: what was said and not heard."""
    pending: Pending | None = None
    norms: list[float] = field(default_factory=list)
    """Norms of the last accepted pseudo-gradients (guard)."""
