"""The virtual clock: an event queue with a total order.

Events are taken by time, and in the order of their arrival in the queue where times are equal, so that a run is a pure function of its
inputs.

>>> queue = EventQueue()
>>> for when_s, key in ((2.0, 7), (1.0, 8), (2.0, 9)):
...     queue.push(when_s, key, 0)
>>> [queue.pop()[:2] for _ in range(len(queue))], queue.now_s
([(1.0, 8), (2.0, 7), (2.0, 9)], 2.0)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush

from gossamer.core.errors import RunFailed

_NEVER_S = float("inf")


class EventQueue:
    """A heap of (time in seconds, sequence number, key, version). Time never runs backwards."""

    __slots__ = ("_heap", "_pushed", "now_s")

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        """The time of the event taken last."""
        self._heap: list[tuple[float, int, int, int]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, when_s: float, key: int, version: int) -> None:
        """Schedules an event. What key and version mean is the caller's business.

        Raises:
            RunFailed: `when_s` is in the past, infinite or not a number: a model of time or network is wrong.
        """
        if not self.now_s <= when_s < _NEVER_S:
            raise RunFailed(
                f"an event was scheduled for {when_s!r} s while the clock stands at {self.now_s!r} s: "
                "a time or network model gave a time that is past, infinite or not a number"
            )
        self._pushed = pushed = self._pushed + 1
        heappush(self._heap, (when_s, pushed, key, version))

    def pop(self) -> tuple[float, int, int]:
        """Takes the next event (time in seconds, key, version) and moves the clock to it."""
        when_s, _, key, version = heappop(self._heap)
        self.now_s = when_s
        return when_s, key, version


@contextmanager
def collector_off(off: bool) -> Iterator[None]:
    """A run without tensors makes millions of small objects and no cycles: searching for some took a quarter of its time."""
    on = gc.isenabled()
    if off:
        gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
