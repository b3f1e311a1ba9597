"""A relay, for sites that can only dial out: they meet at it, and it passes on bytes that it cannot read.

    relay = RelayServer("0.0.0.0:7401", AioGuard("hub", find, identity))      # where others can dial
    client = RelayClient(Dial(party, "oslo", "203.0.113.5:7401", "hub", identity), local=links.port)      # gossamer.wan.relay.client
    links.add(2, Peer(client.address_of("lyon")))

A site *stands* at the relay with one long call of gRPC. Whoever stands may ask for a *pipe* to another that stands in the same run. The
relay gives a token to each of the two; they connect to the same port, say their tokens, and from then on bytes pass between the two
connections. What passes is the sites' own connection, TLS with each other's certificates inside: the relay is trusted with who speaks to
whom, and with nothing else. The connections of pipes are TCP alone, so a token can be seen on the way. It is good once, and whoever takes
it gets to knock at a site's TLS. A site stands under the name in its certificate: nobody takes another's name.

A pipe ends, at both ends and at once, with either of its connections, or when either site no longer stands: with its process, or after
`silent_s` without a sign of life. A side that does not read stops the other one from writing: of each direction of a pipe the relay holds
about a megabyte at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import grpc.aio

from gossamer.core.errors import BadInput
from gossamer.wan.links.pacing import Bucket
from gossamer.wan.loop import in_loop, spawn
from gossamer.wan.relay.messages import (
    GREET_S,
    MAGIC,
    PIECE_BYTES,
    SERVICE,
    TOKEN_BYTES,
    Announced,
    Count,
    Counters,
    Open,
    Opened,
    RelaySettings,
    Stand,
    Stands,
    keep_alive,
    splice,
)
from gossamer.wan.roster.messages import Refused, pack, unpack
from gossamer.wan.trust.guard import AioGuard, caller_of
from gossamer.wan.trust.terms import check_plain, place_of

log = logging.getLogger(__name__)

_MAX_COUNTED = 4096
_MAX_LOGGED = 1024
_MAX_STRANGERS = 256
"""Connections that have not said yet what they are."""
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Key = tuple[str, str]


@dataclass(eq=False)
class _Site:
    """One that stands."""

    key: _Key
    boot: str
    takes: bool
    over: asyncio.Future[tuple[grpc.StatusCode, str]]
    bucket: Bucket
    may_open: float
    pipes: set[_Pipe] = field(default_factory=set)
    quiet: int = 0
    said: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(1024))

    def end(self, code: grpc.StatusCode, why: str) -> None:
        if not self.over.done():
            self.over.set_result((code, why))
        for pipe in list(self.pipes):
            pipe.end()

    def say(self, data: bytes) -> None:
        try:
            self.said.put_nowait(data)
        except asyncio.QueueFull:
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "it does not read what is announced to it")


@dataclass(eq=False)
class _Pipe:
    ends: tuple[_Site, _Site]
    """Who opened it, to whom."""
    met: tuple[asyncio.Future[_Stream], asyncio.Future[_Stream]]
    """Their connections."""
    task: asyncio.Task[None] | None = None

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()


class RelayServer:
    """A relay that listens.

    Args:
        bind: host:port; port 0 takes a free one.
        guard: checks every call; its runs are those that the relay serves.

    Raises:
        BadInput: the address cannot be bound, or is not loopback and there is no certificate.
    """

    def __init__(self, bind: str, guard: AioGuard, settings: RelaySettings | None = None) -> None:
        self.settings = settings or RelaySettings()
        self._guard = guard
        self._sites: dict[_Key, _Site] = {}
        self._tokens: dict[bytes, asyncio.Future[_Stream]] = {}
        self._counts: dict[_Key, Count] = {}
        self._logged: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._pipes: set[_Pipe] = set()
        self._taken: set[asyncio.StreamWriter] = set()  # connections that belong to a pipe
        self._shut = False
        if guard.plain:
            check_plain(bind)
        self.port = in_loop(self._start(bind))

    def counters(self) -> dict[tuple[str, str], Counters]:
        """By run and site."""

        async def read() -> dict[_Key, Counters]:
            return {key: self._counters(key, count) for key, count in self._counts.items()}

        return in_loop(read())

    def close(self) -> None:
        """Ends all pipes and stops listening. May be called again."""
        if not self._shut:
            self._shut = True
            in_loop(self._close())

    # ---- life

    async def _start(self, bind: str) -> int:
        handlers = {
            "Stand": grpc.stream_stream_rpc_method_handler(self._stand),
            "Open": grpc.unary_unary_rpc_method_handler(self._open),
        }
        self._calls = grpc.aio.server(options=_OPTIONS, interceptors=(self._guard,), maximum_concurrent_rpcs=2 * self.settings.sites + 64)
        self._calls.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._calls_port = self._guard.listen(self._calls, "127.0.0.1:0")
        await self._calls.start()
        try:
            host, port = place_of(bind)
            self._server = await asyncio.start_server(self._connected, host or None, port, limit=PIECE_BYTES)
        except (OSError, ValueError, OverflowError) as error:
            await self._calls.stop(None)
            raise BadInput(f"{bind}: cannot be bound ({error}): give an address of this machine, and a port that is free") from None
        self._ticker = spawn(self._tick(), "the tick of the relay")
        found = int(self._server.sockets[0].getsockname()[1])
        log.info("relay listening=%s port=%d", bind, found)
        return found

    async def _close(self) -> None:
        self._server.close()
        self._ticker.cancel()
        for site in list(self._sites.values()):
            site.end(grpc.StatusCode.UNAVAILABLE, "the relay ends")
        await self._calls.stop(0.2)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def _tick(self) -> None:
        """Counted in ticks that this process has lived through: one that was stopped does not take its own sleep for others' silence."""
        s = self.settings
        while True:
            await asyncio.sleep(s.beat_s)
            for site in list(self._sites.values()):
                site.quiet += 1
                site.may_open = min(10 * s.opens_s, site.may_open + s.opens_s * s.beat_s)
                if site.quiet > s.silent_s / s.beat_s:
                    site.end(grpc.StatusCode.UNAVAILABLE, f"nothing came from it for {s.silent_s:g} s")

    def _do(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                await job

        task = spawn(guarded(), "a connection of the relay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: job.close())
        return task

    # ---- connections

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._shut or self._strangers >= _MAX_STRANGERS:
            writer.transport.abort()
        else:
            self._do(self._sort((reader, writer))).add_done_callback(lambda _: self._let_go(writer))

    def _let_go(self, writer: asyncio.StreamWriter) -> None:
        if writer not in self._taken:
            writer.transport.abort()

    async def _sort(self, stream: _Stream) -> None:
        """Side of a pipe, or a call."""
        reader, writer = stream
        self._strangers += 1
        try:
            async with asyncio.timeout(GREET_S):
                head = await reader.readexactly(len(MAGIC))
                token = await reader.readexactly(TOKEN_BYTES) if head == MAGIC else b""
        finally:
            self._strangers -= 1
        keep_alive(writer)
        if head == MAGIC:
            waiting = self._tokens.pop(token, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(stream)
                self._taken.add(writer)
        else:
            inner = await asyncio.open_connection("127.0.0.1", self._calls_port, limit=PIECE_BYTES)
            inner[1].write(head)
            await splice(stream, inner)

    # ---- standing

    async def _stand(self, _: Any, context: Any) -> None:
        key = self._who(context)
        try:
            async with asyncio.timeout(GREET_S):
                first = await context.read()
        except TimeoutError:
            await self._refuse(context, key, grpc.StatusCode.DEADLINE_EXCEEDED, "a call that says nothing")
        site = await self._take_in(key, await self._understood(Stand, first, key, context), context)
        tasks = [spawn(self._say(site, context), f"what site {site.key[1]} is told"), spawn(self._hear(site, context), "its signs of life")]
        try:
            code, why = await asyncio.shield(site.over)
            await context.abort(code, why)
        finally:
            site.end(grpc.StatusCode.UNAVAILABLE, "its connection to the relay has ended")
            if self._sites.get(key) is site:
                del self._sites[key]
            for task in tasks:
                task.cancel()

    async def _take_in(self, key: _Key, asked: Stand, context: Any) -> _Site:
        old, s = self._sites.get(key), self.settings
        if old is None and len(self._sites) >= s.sites:
            await self._refuse(context, key, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{s.sites} sites stand at this relay: it takes no more")
        if old is not None:
            if old.boot == asked.boot:
                old.end(grpc.StatusCode.UNAVAILABLE, "it has connected anew")
            else:
                old.end(
                    grpc.StatusCode.FAILED_PRECONDITION, f"another process of site {key[1]} stands at the relay since: two cannot be one"
                )
        over: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        bucket = Bucket(s.most_mbps * 125_000 if s.most_mbps else None)
        # How much of its allowance is left does not begin anew with every connection.
        may_open = old.may_open if old is not None else 10 * s.opens_s
        site = self._sites[key] = _Site(key, asked.boot, asked.takes, over, bucket, may_open)
        self._count(key)
        site.say(pack(Stands(beat_s=s.beat_s, silent_s=s.silent_s)))
        log.info("relay run=%s site=%s stands", *key)
        return site

    async def _say(self, site: _Site, context: Any) -> None:
        with contextlib.suppress(Exception):  # gRPC has several for a call that has ended
            while True:
                await context.write(await site.said.get())
        site.end(grpc.StatusCode.UNAVAILABLE, "its connection to the relay has ended")

    async def _hear(self, site: _Site, context: Any) -> None:
        with contextlib.suppress(Exception):
            while (data := await context.read()) is not grpc.aio.EOF:
                if data:
                    site.end(grpc.StatusCode.INVALID_ARGUMENT, "a message that is no sign of life")
                    return
                site.quiet = 0
                if site.said.empty():
                    site.say(b"")
        site.end(grpc.StatusCode.UNAVAILABLE, "its connection to the relay has ended")

    # ---- pipes

    async def _open(self, data: bytes, context: Any) -> bytes:
        key = self._who(context)
        asked = await self._understood(Open, data, key, context)
        ends = await self._both(key, asked.to, context)
        loop = asyncio.get_running_loop()
        pipe = _Pipe(ends, (loop.create_future(), loop.create_future()))
        self._pipes.add(pipe)
        tokens = [secrets.token_bytes(TOKEN_BYTES) for _ in ends]
        for site, token, met in zip(ends, tokens, pipe.met, strict=True):
            site.pipes.add(pipe)
            self._count(site.key).opened += 1
            self._tokens[token] = met
        pipe.task = self._do(self._run(pipe))

        def over(_: Any) -> None:
            for site, token, met in zip(ends, tokens, pipe.met, strict=True):
                site.pipes.discard(pipe)
                self._tokens.pop(token, None)
                if met.done() and not met.cancelled():
                    self._taken.discard(met.result()[1])
                    met.result()[1].transport.abort()
                met.cancel()
            self._pipes.discard(pipe)

        pipe.task.add_done_callback(over)
        ends[1].say(pack(Announced(token=tokens[1].hex(), source=key[1])))
        return pack(Opened(token=tokens[0].hex()))

    async def _run(self, pipe: _Pipe) -> None:
        """The life of a pipe."""
        async with asyncio.timeout(GREET_S):
            one, other = await asyncio.gather(*pipe.met)
        buckets = [site.bucket for site in pipe.ends]
        counts = [self._count(site.key) for site in pipe.ends]

        def passed(direction: int, nbytes: int) -> Coroutine[Any, Any, None] | None:
            counts[direction].sent_bytes += nbytes
            counts[1 - direction].received_bytes += nbytes
            bucket = buckets[direction]
            wait_s = bucket.wait_s(time.monotonic(), 0.0, PIECE_BYTES)
            bucket.spend(nbytes)
            return asyncio.sleep(wait_s) if wait_s > 0 else None

        await splice(one, other, passed)

    async def _both(self, key: _Key, to: str, context: Any) -> tuple[_Site, _Site]:
        """The two sites of a pipe, if there may be one."""
        here, there, s = self._sites.get(key), self._sites.get((key[0], to)), self.settings
        later, much = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
        if here is None:
            await self._refuse(context, key, later, f"site {key[1]} does not stand at this relay: it stands first")
        if there is None or not there.takes or there is here:
            why = f"site {to} does not stand at this relay for run {key[0]}: is it started, with this relay?"
            await self._refuse(context, key, grpc.StatusCode.NOT_FOUND, why)
        for site in (here, there):
            if len(site.pipes) >= s.pipes_each:
                await self._refuse(
                    context, key, much, f"site {site.key[1]} has {s.pipes_each} pipes at this relay: it has room for no more"
                )
        if len(self._pipes) >= s.pipes:
            await self._refuse(context, key, much, f"this relay has {s.pipes} pipes: that is the most")
        if here.may_open < 1:
            await self._refuse(context, key, much, f"site {key[1]} opens more than {s.opens_s:g} pipes a second")
        here.may_open -= 1
        return here, there

    # ---- within

    def _who(self, context: Any) -> _Key:
        found = caller_of(context)
        return found.run, found.site

    async def _understood(self, kind: type[Any], data: Any, key: _Key, context: Any) -> Any:
        try:
            return unpack(kind, data if isinstance(data, bytes) else b"")
        except Refused as error:
            await self._refuse(context, key, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _refuse(self, context: Any, key: _Key, code: grpc.StatusCode, why: str) -> NoReturn:
        self._count(key).refused += 1
        if (key[1], why) not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add((key[1], why))
            level = logging.INFO if code == grpc.StatusCode.NOT_FOUND else logging.WARNING
            log.log(level, "relay run=%s site=%s refused: %s", *key, why)
        await context.abort(code, why)
        raise AssertionError("abort raises")

    def _count(self, key: _Key) -> Count:
        if key not in self._counts and len(self._counts) >= _MAX_COUNTED:
            return Count()
        return self._counts.setdefault(key, Count())

    def _counters(self, key: _Key, count: Count) -> Counters:
        site = self._sites.get(key)
        pipes = len(site.pipes) if site else 0
        return Counters(count.sent_bytes, count.received_bytes, pipes, count.opened, count.refused, site is not None)
