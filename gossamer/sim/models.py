"""What a simulation is given and what it gives: models of network and time, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from gossamer.worker.account import Account
from gossamer.worker.effects import Addr, SpanKind
from gossamer.worker.state import State

Event: TypeAlias = tuple[float, int, int]
"""(time in seconds, message key, version)."""


class NetworkModel(Protocol):
    """Moves messages through virtual time."""

    def launch(self, now_s: float, key: int, src: Addr, dst: Addr, nbytes: int) -> Sequence[Event]:
        """Message `key` leaves. Returns events to schedule."""

    def finish(self, when_s: float, key: int, version: int) -> tuple[bool, Sequence[Event]]:
        """A scheduled event is due. Returns (message `key` is delivered now, events to schedule); (False, []) when it is out of date."""


class TimeModel(Protocol):
    """What work costs."""

    def steps_s(self, worker: Addr, round: int, first_step: int, steps: int, batch: int) -> float:
        """Seconds of `steps` inner steps of `batch` sequences, the first being step `first_step` of the round."""

    def span_s(self, kind: SpanKind, nbytes: int) -> float:
        """Seconds of encoding, decoding or an outer step over `nbytes`."""


class SimResult(NamedTuple):
    """What a simulated run ended with."""

    final: list[State | None]
    """Each seat's last state, workers first."""
    accounts: list[Account]
    """Each seat's seconds and bytes, workers first. `wall_s` counts from its start. A server's waits count as network idle."""
    events: int
    """Events taken from the queue."""
