"""Signs of life. A peer's end shows in three ways:

- its process ends: the operating system closes its connections, and where it listened a new connection is refused, in milliseconds;
- the line goes dark: nothing comes, not even the answers to beats. After `silent_s` the connection is given up and made anew, and when
  the peer has not come back within `patience_s` it is held for gone;
- another process answers in its place: the one that was known is gone.

Time is counted in ticks that this process has lived through, so one that was stopped for a while does not take its own sleep for the
silence of others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

from gossamer.wan.trust.terms import place_of

_KEPT_RTTS = 10


class Watch:
    """What is known of one peer's life. `tick` is called every `tick_s` seconds."""

    def __init__(self, tick_s: float, silent_s: float, patience_s: float) -> None:
        self._silent = max(2, round(silent_s / tick_s))
        self._patience = max(self._silent, round(patience_s / tick_s))
        self._quiet = self._away = 0
        self._beats: dict[int, float] = {}
        self._number = 0
        self._rtts_s: deque[float] = deque(maxlen=_KEPT_RTTS)

    def heard(self) -> None:
        """Something came."""
        self._quiet = 0

    def connected(self) -> None:
        """A connection begins."""
        self._quiet = self._away = 0
        self._beats.clear()

    def tick(self, connected: bool) -> Literal["well", "silent", "lost"]:
        """A tick has passed. `silent`: give the connection up. `lost`: give the peer up."""
        if connected:
            self._quiet += 1
            return "silent" if self._quiet > self._silent else "well"
        self._away += 1
        return "lost" if self._quiet + self._away > self._patience else "well"

    def beat(self, now_s: float) -> int:
        """The number of a beat that is sent now."""
        self._number += 1
        self._beats[self._number] = now_s
        for old in [n for n in self._beats if n <= self._number - _KEPT_RTTS]:
            del self._beats[old]
        return self._number

    def echoed(self, number: int, now_s: float) -> None:
        """The answer to a beat."""
        if (sent_s := self._beats.pop(number, None)) is not None:
            self._rtts_s.append(now_s - sent_s)

    @property
    def rtt_s(self) -> float | None:
        """The shortest round trip of late."""
        return min(self._rtts_s, default=None)


async def knock(address: str, timeout_s: float) -> Literal["open", "refused", "unreachable"]:
    """What a new connection to `address` (host:port) meets. `refused`: the host is there, and no process listens."""
    opening = asyncio.ensure_future(asyncio.open_connection(*place_of(address)))
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(opening)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError):
        return "unreachable"
    finally:  # also where this is cancelled just as the connection comes about
        opening.cancel()
        opening.add_done_callback(_closed)
    return "open"


def _closed(opening: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()
