"""Which of the other sites this one reaches, asked between sessions and beside them, and questions from site to site.

    neighbours = Neighbours("lyon", doors, lambda: client.roster)
    port = Port(bind, access, [neighbours.handlers()]) ...
    neighbours.begin(client.caller.boot, client.timeouts)
    Sessions(client, alive=neighbours.alive, gone=neighbours.gone, ask=neighbours.ask)

Every site pings every other one that has an address, twice a beat. A site counts as gone when a connection to it is refused, when nothing
has come for a lease, when it says that it ends, or when somebody has said so (`lost`) and it has not answered since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from gossamer.core.errors import RunFailed
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.links.lines import ended
from gossamer.wan.links.watch import knock
from gossamer.wan.loop import in_loop, io_loop, spawn
from gossamer.wan.roster.messages import Name, Record, Refused, unpack
from gossamer.wan.roster.records import Boot, Member, Roster
from gossamer.wan.trust.doors import QUIET, Doors
from gossamer.wan.trust.terms import Distrusted

log = logging.getLogger(__name__)

SERVICE = "gossamer.Site"
_LOOK_S = 0.1
_ENDS = grpc.StatusCode.ABORTED
"""gRPC itself never says so."""


class Ping(Record):
    """A site shows itself to another."""

    site: Name
    boot: Boot


class _Known:
    """What is known of one process of another site."""

    def __init__(self, member: Member, now_s: float) -> None:
        self.member = member
        self.heard_s: float | None = None
        """It answered, or asked."""
        self.since_s = now_s
        self.refused = False
        self.doubted = self.lost = False
        """Somebody says that it is gone; and it has not answered since."""
        self.task: asyncio.Task[None] | None = None
        self.hurry = asyncio.Event()


class Neighbours:
    """The other sites of a run, as site `me` reaches them.

    Args:
        roster: the latest; None before this site has joined.
    """

    def __init__(self, me: str, doors: Doors, roster: Callable[[], Roster | None]) -> None:
        self.me, self._doors, self._roster = me, doors, roster
        self._boot: str
        self._timeouts: Timeouts
        self.on_ask: Callable[[bytes], bytes] | None = None
        """Answers the questions of other sites; any thread."""
        self.ends: Callable[[], bool] = lambda: False
        """Whether this site is about to end for a fault. Then it shows itself to nobody any more: whoever has lost it would take it for
        returned as long as its end takes."""
        self._known: dict[int, _Known] = {}
        self._late: set[int] = set()
        self._channels: dict[tuple[str, str], Any] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._over = False

    def begin(self, boot: str, timeouts: Timeouts) -> None:
        """Begins to look after the others, as this process of its site."""
        self._boot, self._timeouts = boot, timeouts

        def keep() -> None:
            self._keeper = spawn(self._keep(), f"site {self.me}, looking after the others")

        io_loop().call_soon_threadsafe(keep)

    def handlers(self) -> Any:
        """For this site's Port."""
        one = {"Ping": grpc.unary_unary_rpc_method_handler(self._pinged), "Ask": grpc.unary_unary_rpc_method_handler(self._asked)}
        return grpc.method_handlers_generic_handler(SERVICE, one)

    # ---- who is there

    def alive(self) -> frozenset[int]:
        """Seats that this site reaches now."""
        now_s = time.monotonic()
        return frozenset(seat for seat, known in self._known.items() if not self._gone(known, now_s) and known.heard_s is not None)

    def gone(self) -> frozenset[int]:
        """Seats that it has lost, could not reach, or will not wait for."""
        now_s = time.monotonic()
        return frozenset(seat for seat, known in self._known.items() if self._gone(known, now_s)) | self._late

    def lost(self, seat: int) -> None:
        """The connection to this seat broke, or somebody says that it is gone: it is, unless it answers from now on."""

        if known := self._known.get(seat):
            known.heard_s, known.doubted, known.since_s = None, True, time.monotonic()
            io_loop().call_soon_threadsafe(known.hurry.set)

    def late(self, seats: frozenset[int]) -> None:
        """These are not waited for in the next opening, whoever it lets in; none: they are again."""
        self._late = set(seats)

    def _gone(self, known: _Known, now_s: float) -> bool:
        return known.refused or known.lost or now_s - (known.heard_s or known.since_s) > self._timeouts.lease

    # ---- questions

    def ask(self, seat: int, data: bytes) -> bytes:
        """What another site answers.

        Raises:
            RunFailed: it does not.
        """
        known = self._known.get(seat)
        if known is None or known.member.card.address is None:
            raise RunFailed(f"seat {seat} cannot be asked: it has no address")
        return in_loop(self._ask(known.member, data))

    def channel(self, member: Member) -> Any:
        """A channel to another site, kept (in the event loop)."""
        assert member.card.address is not None
        key = (member.site, member.card.address)
        found = self._channels.get(key)
        if found is None or ended(found):  # its certificate was not good any more; it may have another
            found = self._channels[key] = self._doors.channel(*key, tuple(QUIET))
        return found

    async def _ask(self, member: Member, data: bytes) -> bytes:
        try:
            return bytes(await self.channel(member).unary_unary(f"/{SERVICE}/Ask")(data, timeout=self._timeouts.call))
        except grpc.RpcError as error:
            raise RunFailed(f"site {member.site}: {error.details() or error.code()}") from None
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:  # of a channel that is closed; and one that is being closed
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise RunFailed(f"site {member.site}: the connection was closed") from error

    async def _asked(self, data: bytes, context: Any) -> bytes:
        answer = self.on_ask
        if answer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this site answers no questions yet")
            raise AssertionError
        try:
            return await asyncio.to_thread(answer, data)
        except Refused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise

    async def _pinged(self, data: bytes, context: Any) -> bytes:
        try:
            ping = unpack(Ping, data)
        except Refused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        if self.ends():
            await context.abort(_ENDS, f"site {self.me} is about to end")
            raise AssertionError
        if self._doors.caller(context) in (None, ping.site):
            for known in self._known.values():
                if known.member.site == ping.site and known.member.boot == ping.boot:
                    if known.doubted and known.task is not None:
                        known.hurry.set()  # it may have said so before it went
                    else:
                        self._heard(known)
        return self._mine()

    def _mine(self) -> bytes:
        return Ping(site=self.me, boot=self._boot).model_dump_json().encode()

    # ---- in the event loop

    async def _keep(self) -> None:
        seen = -1
        while not self._over:
            if (roster := self._roster()) is not None and roster.revision != seen:
                seen = roster.revision
                self._doors.sweep()
                there = {m.seat: m for m in roster.members if m.there and m.site != self.me}
                for seat in list(self._known):
                    if seat not in there or there[seat].boot != self._known[seat].member.boot:
                        self._drop(self._known.pop(seat))
                for seat, member in there.items():
                    if seat not in self._known:
                        known = self._known[seat] = _Known(member, time.monotonic())
                        if member.card.address is not None:
                            known.task = spawn(self._watch(known), f"looking after site {member.site}")
            await asyncio.sleep(_LOOK_S)

    async def _watch(self, known: _Known) -> None:
        address = known.member.card.address
        assert address is not None
        while not self._over:
            sent_s = time.monotonic()
            try:
                data = await self.channel(known.member).unary_unary(f"/{SERVICE}/Ping")(self._mine(), timeout=self._timeouts.call)
                pong = unpack(Ping, bytes(data))
                if pong.site == known.member.site and pong.boot == known.member.boot:
                    if not known.doubted or sent_s > known.since_s:
                        self._heard(known)
                else:
                    known.refused = True  # another process answers in its place
            except Exception as error:  # of gRPC, which has several for a connection that was closed
                log.debug("site %s: %s: %s", known.member.site, type(error).__name__, error)
                known.lost = known.doubted
                if isinstance(error, Distrusted) and error.of_peer:
                    if not known.refused:
                        log.warning("site %s counts as gone: %s", known.member.site, error)
                    known.refused = True
                    if error.reason == "revoked":
                        return  # for good: another certificate comes with another process
                elif not self._over and await self._ended(error, address):
                    known.refused = True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.beat / 2 if known.heard_s else _LOOK_S):
                    await known.hurry.wait()
            known.hurry.clear()

    async def _ended(self, error: Exception, address: str) -> bool:
        """Whether a process that has not answered says that it is about to end, or is not there any more."""
        says_so = isinstance(error, grpc.RpcError) and error.code() is _ENDS
        return says_so or await knock(address, self._timeouts.call) == "refused"

    @staticmethod
    def _heard(known: _Known) -> None:
        known.heard_s, known.doubted, known.lost, known.refused = time.monotonic(), False, False, False

    @staticmethod
    def _drop(known: _Known) -> None:
        if known.task is not None:
            known.task.cancel()

    def close(self) -> None:
        """Ends it."""

        async def end() -> None:
            self._over = True
            tasks = [known.task for known in self._known.values() if known.task is not None]
            tasks += [self._keeper] if self._keeper is not None else []
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
            for channel in self._channels.values():
                with suppress(Exception):
                    await channel.close()

        in_loop(end())
