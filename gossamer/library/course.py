"""What stands between a worker's program and its world: it pauses the program at boundaries, and counts what passes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.library.records import Record
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Addr, Body, Boundary, Compute, Gather, Go, Program, Reply, Send, Stop, Work
from gossamer.worker.state import State

_PAUSE = Compute(Work(0, 0, 0.0, 0.0))


@dataclass
class Seen:
    """What has passed since somebody looked."""

    sent: bool = False
    bytes_sent: int = 0
    bytes_received: int = 0
    waited_s: float = 0.0
    peers: set[Addr] = field(default_factory=set)
    metrics: dict[str, Any] = field(default_factory=dict)

    def on(self, record: Record) -> Record:
        """`record` with what was seen."""
        return replace(
            record,
            exchanged=self.sent or bool(self.peers),
            completed=bool(self.metrics),
            waited_s=self.waited_s,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            peers=tuple(sorted(self.peers)),
            refused=tuple(self.metrics.get("refused", ())),
            absent=tuple(self.metrics.get("absent", ())),
            metrics=self.metrics,
        )


class Course:
    """The course of one program. It is also the hooks of its world, for the metrics.

    After a boundary before the last the program pauses: its world hands out a Compute of no steps. So nothing of the next round is
    done, said or awaited before it is known that there is one, and in between the state is whole.
    """

    def __init__(self, program: Program, rounds: int) -> None:
        self._inner, self._rounds, self._seen = program, rounds, Seen()
        self.end_here = False
        """The run is over at the boundary at which the program pauses."""

    def take(self) -> Seen:
        """What has passed since the last call."""
        seen, self._seen = self._seen, Seen()
        return seen

    def program(self) -> Program:
        """The program, with pauses."""
        reply: Reply = None
        try:
            while True:
                try:
                    effect = self._inner.send(reply)
                except StopIteration as end:
                    state: State = end.value
                    return state
                begin_s = time.monotonic()
                reply = yield effect
                if isinstance(effect, Send):
                    self._seen.sent = self._seen.sent or bool(effect.to)
                    self._seen.bytes_sent += effect.packet.nbytes * len(effect.to)
                elif isinstance(effect, Gather):
                    self._seen.waited_s += time.monotonic() - begin_s
                    self._seen.peers |= set(reply)
                    self._seen.bytes_received += sum(packet.nbytes for packet in reply.values())
                elif isinstance(effect, Boundary) and isinstance(reply, Go) and effect.round < self._rounds:
                    yield _PAUSE
                    reply = Stop(over=True) if self.end_here else reply
        finally:
            self._inner.close()

    # ---- hooks

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        return Go()

    def note(self, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            unknown = record["loss"] is not None and math.isnan(record["loss"])
            self._seen.metrics = {**record, "loss": None} if unknown else record

    def span(self, worker: Addr, kind: TraceKind, start_s: float, end_s: float, round: int) -> None: ...
