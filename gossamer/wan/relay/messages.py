"""What sites and a relay say to each other, and how bytes are passed on. See `gossamer.wan.relay.server`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import StringConstraints

from gossamer.core.errors import BadInput
from gossamer.wan.roster.messages import Name, Record
from gossamer.wan.roster.records import Boot

SERVICE = "gossamer.Relay"
MAGIC = b"GWP1"
"""A connection that begins so is one side of a pipe; its token follows, and then the bytes. Neither TLS nor HTTP/2 begins so."""
TOKEN_BYTES = 16
PIECE_BYTES = 1 << 18
"""The most that is read at a time."""
GREET_S = 10.0
"""For a connection to say what it is, and for the other side to come to a pipe."""
STALL_S = 30.0
"""A pipe whose one side takes nothing for so long is ended: who waits to write does not see that the other side has gone. Links send no
more than was asked for, so that what arrives is taken."""

Token = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class Stand(Record):
    """The first message of a site that comes to stand. Empty messages follow, as signs of life."""

    boot: Boot
    """Which process of the site. A later one takes the place of an earlier one."""
    takes: bool
    """Whether pipes may be opened to it."""


class Stands(Record):
    """The answer: the site stands. Announcements follow, and an empty message for each empty message."""

    beat_s: float
    """How often to send a sign of life."""
    silent_s: float
    """So long without one, the site no longer stands."""


class Announced(Record):
    """A pipe to this site: it connects, and says the token."""

    token: Token
    source: Name


class Open(Record):
    """Asks for a pipe to a site."""

    to: Name


class Opened(Record):
    """The answer: the token of this side, good once and for `GREET_S`."""

    token: Token


@dataclass(frozen=True)
class RelaySettings:
    """What a relay allows."""

    pipes_each: int = 256
    """Pipes of one site in one run at a time, both of its own and to it. Two sites use five: one for control, four for payload."""
    pipes: int = 4096
    sites: int = 512
    """Sites that stand, in all runs."""
    opens_s: float = 20.0
    """Pipes that a site may open each second; ten times as many at once."""
    most_mbps: float | None = None
    """What one site may send through the relay; None: what the line takes."""
    beat_s: float = 1.0
    silent_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("pipes_each", "pipes", "sites", "opens_s", "beat_s"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} of a relay is {getattr(self, name)}: expected more than 0")
        if self.silent_s < 2 * self.beat_s:
            raise BadInput(f"silent_s of a relay is {self.silent_s:g}: expected at least two beats of {self.beat_s:g} s")


class Counters(NamedTuple):
    """What a relay has done for one site of one run, since the relay's start."""

    sent_bytes: int
    """By the site, into pipes."""
    received_bytes: int
    pipes: int
    """That are open now."""
    opened: int
    """By the site, or to it."""
    refused: int
    stands: bool


@dataclass
class Count:
    """The part of these that only grows."""

    sent_bytes: int = 0
    received_bytes: int = 0
    opened: int = 0
    refused: int = 0


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    passed: Callable[[int, int], Awaitable[None] | None] = lambda direction, nbytes: None,
) -> None:
    """Passes bytes between two connections, both ways, until one side ends or takes nothing for `STALL_S`. Then both are closed.

    Args:
        passed: told of bytes that were read, before they are written: direction (0: from `one`) and number. May wait.
    """

    async def move(direction: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE_BYTES):
            if (wait := passed(direction, len(data))) is not None:
                await wait
            writer.write(data)
            async with asyncio.timeout(STALL_S):
                await writer.drain()

    moves = ((0, one[0], other[1]), (1, other[0], one[1]))
    tasks = [asyncio.ensure_future(move(*args)) for args in moves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for k, (_, _, writer) in enumerate(moves):
            if tasks[k] in done and tasks[k].exception() is None:  # an end, not a break: what was passed on is still delivered
                writer.close()
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(writer.wait_closed(), 1.0)
    finally:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also where this is cancelled once more meanwhile
            for _, writer in (one, other):
                writer.transport.abort()


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Has the system look after a connection on which nothing may pass for long, so that routers on the way do not forget it."""
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
