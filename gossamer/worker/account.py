"""Where a worker's time and bytes went: one definition for all worlds (design: time, idle, bytes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from gossamer.worker.effects import Addr, Body, Go, Stop
from gossamer.worker.state import State

TraceKind: TypeAlias = Literal["compute", "encode", "send", "straggler_idle", "network_idle", "decode", "outer"]


@dataclass
class Account:
    """Seconds by kind and packet bytes (headers included) of one worker. The seconds add up to the wall time."""

    seconds: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, kind: TraceKind, seconds: float) -> None:
        """Adds `seconds` to `kind`."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def share(self, kind: TraceKind) -> float:
        """The fraction of the wall time spent on `kind`."""
        return self.seconds.get(kind, 0.0) / self.wall_s if self.wall_s else 0.0


MOST_LINKS = 64
"""Of a wait for more messages than this no links are told."""


def landed(links: dict[Addr, list[float]], src: Addr, nbytes: int, seconds: float) -> None:
    """Adds a message of `nbytes` from `src`, which took `seconds` from its sender's READY until it was here, to {src: [bytes, seconds]}.

    >>> links: dict[Addr, list[float]] = {}
    >>> for nbytes in (100, 300):
    ...     landed(links, 2, nbytes, 0.5)
    >>> links
    {2: [400, 1.0]}
    """
    if seconds > 0.0:
        found = links.setdefault(src, [0, 0.0])
        found[0] += nbytes
        found[1] += seconds


def split_wait(
    begin_s: float,
    arrivals_s: Mapping[Addr, float],
    carries: Mapping[Addr, Sequence[Addr]] | None,
    ready_s: Mapping[Addr, float],
) -> tuple[float, float]:
    """Splits a wait in Gather into (straggler idle, network idle), in seconds.

    Of several messages the last to arrive decides (a tie goes to the lowest address). The part of the wait before the latest moment at
    which any worker whose data that message carries finished its own compute is straggler idle, the rest network idle.

    >>> split_wait(1.0, {1: 3.0, 2: 6.0}, None, {1: 2.5, 2: 5.0})
    (4.0, 1.0)
    """
    if not arrivals_s:
        return 0.0, 0.0
    last = min(arrivals_s, key=lambda j: (-arrivals_s[j], j))
    end_s = max(begin_s, arrivals_s[last])
    origins = (last,) if carries is None else carries[last]
    latest_s = max((ready_s[j] for j in origins if j in ready_s), default=begin_s)
    return split_at(begin_s, end_s, latest_s)


def split_at(begin_s: float, end_s: float, ready_s: float) -> tuple[float, float]:
    """The wait from begin_s to end_s, split at the moment at which those awaited were ready."""
    middle_s = min(max(begin_s, ready_s), end_s)
    return middle_s - begin_s, end_s - middle_s


class Hooks(Protocol):
    """What a world tells its surroundings (metrics, traces, checkpoints, evaluation)."""

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        """`worker` has completed `round` rounds; `state` is whole and may be copied, not kept."""

    def note(self, record: dict[str, Any]) -> None:
        """A record with "kind", "worker" and "time_s"; round records also carry seconds by kind and bytes."""

    def span(self, worker: Addr, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        """A stretch of the worker's time."""
