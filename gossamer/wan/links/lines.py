"""Connections that stay up from one session of a run to the next. A new one costs several round trips; one that is up costs none.

Everything runs in the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import grpc


class Lines:
    """Channels of grpc.aio (or what behaves like one) that nobody uses at the moment. By key: which peer, where, which of its channels."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, Any] = {}
        self._closed = False

    def take(self, key: Hashable, make: Callable[[], Any]) -> Line:
        """The channel of that key: the one that was given back, or a new one."""
        found = self._idle.pop(key, None)
        return Line(self, key, make() if found is None or ended(found) else found)

    async def give(self, key: Hashable, channel: Any) -> None:
        """Back, for the next."""
        if self._closed or key in self._idle or ended(channel) or not _connected(channel):
            await channel.close()
        else:
            self._idle[key] = channel

    async def drop(self, which: Callable[[Any], bool]) -> None:
        """Closes those whose key is such a one."""
        for key in [key for key in self._idle if which(key)]:
            with suppress(Exception):
                await self._idle.pop(key).close()

    async def close(self) -> None:
        """Closes all, and keeps none from now on."""
        self._closed = True
        await self.drop(lambda key: True)


class Line:
    """A channel in use. It goes back once, and is not to be used after that."""

    def __init__(self, lines: Lines, key: Hashable, channel: Any) -> None:
        self._lines, self._key, self._channel = lines, key, channel

    def stream_stream(self, method: str) -> Any:
        """As of the channel."""
        return self._channel.stream_stream(method)

    def get_state(self, try_to_connect: bool = False) -> Any:
        """As of the channel."""
        return self._channel.get_state(try_to_connect)

    async def close(self, *, keep: bool = False) -> None:
        """Ends the connection, or gives it back (`keep`), which is for one whose peer has just been heard."""
        if keep:
            await self._lines.give(self._key, self._channel)
        else:
            await self._channel.close()


def ended(channel: Any) -> bool:
    """Whether it was closed, since its peer's certificate was not good any more."""
    return getattr(channel, "ended", None) is not None


def _connected(channel: Any) -> bool:
    return bool(channel.get_state() == grpc.ChannelConnectivity.READY)
