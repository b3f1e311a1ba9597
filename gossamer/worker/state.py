"""Everything a worker must remember between rounds, apart from what its body keeps (inner optimizer, data cursor)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gossamer.core.members import Roll
from gossamer.core.replan import Planned
from gossamer.core.tree import Tree
from gossamer.worker.effects import Addr
from gossamer.worker.packet import Packet


class Met(NamedTuple):
    """What has been done in the first phase of an exchange: by the owner of a slice (shard), or by the hub."""

    mean: Packet | None
    """The mean of the own slice, as sent to the others. Of a hub: that of everything, where it sends one."""
    weights: dict[Addr, float]
    """Who took part, with what weight."""
    refused: tuple[Addr, ...]
    """Whose contribution was refused by its sender's guard."""
    step_s: dict[Addr, float]
    """Seconds per inner step that each says it took."""
    handed: tuple[Packet, ...] = ()
    """Of a hub: what all have said, in id order, as it hands it on."""


@dataclass
class Pending:
    """An exchange in flight: said, and not landed."""

    round: int
    """The round whose work it carries."""
    own: dict[int, Packet]
    """The packets said, by slice (one slice, 0, when everything goes to everybody)."""
    y: Tree
    """The parameters that the worker went on from: replaced by the agreed ones on landing, local += x_next - y."""
    met: Met | None = None
    """None before the first phase is over, and where there is only one."""


@dataclass
class Stream:
    """The course of one fragment; the whole model is one where it is not cut."""

    norms: list[float] = field(default_factory=list)
    """Norms of its last accepted pseudo-gradients (guard)."""
    tokens: int = 0
    """Tokens that this worker has consumed since the last launch: the weight of the next."""
    pending: Pending | None = None


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
    mean_residual: Tree | None = None
    """Error feedback of the means that this worker sends on: of its slice alone, flat."""
    others: Tree = field(default_factory=dict)
    """The others' part of the means that landed last, weights included (eager); empty before."""
    local: Tree = field(default_factory=dict)
    """The worker's own parameters, where the anchor and what is pending do not tell them (fragments). May be live views."""
    streams: list[Stream] = field(default_factory=lambda: [Stream()])
    """One per fragment."""
    planned: Planned = field(default_factory=Planned)
    """The plan in force and the measurements behind it (re-planning)."""
    roll: Roll = field(default_factory=Roll)
    """Who takes part in which round."""
    said: Tree = field(default_factory=dict)
    """z, as it was said and is not mixed yet (pair codecs)."""
    memory: Tree = field(default_factory=dict)
    """What the pair codec remembers from round to round."""
