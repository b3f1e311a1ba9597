"""What a server holds between two messages: enough to go on from in another process, or in the next session of a wide-area run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gossamer.core.tiers import DelayedNesterov, DelayedState
from gossamer.core.tree import Tree, master
from gossamer.worker.effects import Addr
from gossamer.worker.state import State


@dataclass
class ServerState:
    """Of one server. Its program changes it in place, and all of a change at once: between two effects it is whole."""

    x: Tree
    memory: DelayedState
    merged: Tree
    """M: x after the last merge (local servers)."""
    unmerged: int = 0
    """Updates accepted since then."""
    reports: int = 0
    """Of a local server: those that are through. Of the global one: the updates of its x."""
    taken: dict[Addr, int] = field(default_factory=dict)
    """Client -> the block (of a local server: the report) up to which all has been taken in. One that comes again is not taken twice."""
    fresh: bool = True
    """The run began with it: its clients must have begun with the same x."""

    @classmethod
    def begin(cls, rule: DelayedNesterov, x: Tree, *, local: bool, fresh: bool = True) -> ServerState:
        """Before the first message. `x` becomes its own."""
        return cls(x, rule.init(x), master(x) if local else {}, fresh=fresh)

    def forget(self) -> None:
        """What was not reported will not be: whoever would hear of it has it already."""
        self.unmerged = 0
        for k, v in self.merged.items():
            v.copy_(self.x[k])

    def pack(self) -> tuple[State, dict[str, Any]]:
        """As a part of a checkpoint has it: the state, which shares the tensors, and the rest."""
        outer = {"momentum": self.memory.momentum, "total": self.memory.total, "merged": self.merged}
        taken = {str(j): t for j, t in self.taken.items()}
        return State(x=self.x, round=self.reports, outer=outer), {
            "arrivals": self.memory.arrivals, "unmerged": self.unmerged, "taken": taken,
        }  # fmt: skip

    @classmethod
    def unpack(cls, state: State, extra: dict[str, Any]) -> ServerState:
        """From what `pack` gave."""
        memory = DelayedState(state.outer["momentum"], state.outer["total"], int(extra["arrivals"]))
        taken = {int(j): int(t) for j, t in extra["taken"].items()}
        return cls(state.x, memory, state.outer["merged"], int(extra["unmerged"]), state.round, taken, fresh=False)
