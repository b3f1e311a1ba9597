"""What the library tells a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gossamer.worker.effects import Addr


class Work(NamedTuple):
    """What this worker is to do in the round it is in, and where the run stands."""

    steps: int
    """H_i: optimizer steps of the round."""
    batch: int
    """B_i: sequences of a step, all its micro-batches together."""
    sequence: int
    """L: tokens of a sequence."""
    round: int
    """Rounds completed."""
    rounds: int
    """Rounds of the run."""
    step: int
    """Optimizer steps of the round that are taken."""
    tokens: float
    """Planned tokens of all workers before the next optimizer step: what a learning-rate schedule follows."""
    total_tokens: int
    """Planned tokens of all workers in the whole run."""


@dataclass(frozen=True)
class Record:
    """What one call of `Outer.step` did."""

    round: int
    """Rounds completed."""
    step: int
    """Optimizer steps of the next round that are taken."""
    counted: bool = True
    """Whether the optimizer has stepped since the last call. Where not (gradient accumulation, a step that AMP skipped) the tokens count,
    and no step."""
    exchanged: bool = False
    """Whether something was sent or taken in."""
    completed: bool = False
    """Whether this call completed a round."""
    waited_s: float = 0.0
    """Seconds of waiting for messages."""
    bytes_sent: int = 0
    """Packet bytes, headers included."""
    bytes_received: int = 0
    peers: tuple[Addr, ...] = ()
    """The workers that were heard, without this one."""
    refused: tuple[Addr, ...] = ()
    """Of a completed round: the workers whose contribution carried no weight (not finite, far too large, or of no token)."""
    absent: tuple[Addr, ...] = ()
    """Of a completed round: the workers that were to be heard, and were not."""
    lost: tuple[Addr, ...] = ()
    """All workers that are gone (on_lost = "record")."""
    over: bool = False
    """The run has come to its end, here and everywhere: what is stepped from now on is never exchanged."""
    stopped: bool = False
    """It has come to it before its last round, since a worker has called `ask_stop`; it can be resumed from here."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of a completed round: what `gossamer train` would write of it in metrics.jsonl; empty in between."""

    @property
    def bytes(self) -> int:
        """Sent and received."""
        return self.bytes_sent + self.bytes_received


class Closed(NamedTuple):
    """How a worker's part of a run has ended."""

    round: int
    """Rounds completed."""
    partial: Literal["none", "sent", "dropped"]
    """What became of the steps after the last complete block."""
    steps: int
    """How many they were."""
    idle_rounds: int
    """Rounds in which this worker stayed without work, since the others went on."""
