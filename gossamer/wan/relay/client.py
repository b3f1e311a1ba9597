"""A site's side of a relay: it stands there, takes the pipes that are announced to it, and has an address for each site behind the relay.

    links = Links(me, n, run, bind="127.0.0.1:0", access=access)
    client = RelayClient(Dial(party, "oslo", "203.0.113.5:7401", "hub", identity), local=links.port)
    client.wait(timeout_s=30)
    links.add(2, peer_of(None, None, "lyon", client))

`address_of(site)` is a port of loopback: what connects to it gets a pipe to that site, whose other end connects to the port where that
site's own connections are let in. So gRPC, with TLS, runs from site to site as if there were no relay. A site with certificates loses
nothing by this: whoever comes through a pipe shows a certificate as any other caller does. (A site without, which believes callers of
loopback, can only use a relay that is on loopback too.)

When the relay is away its pipes end, the client tries again, first soon and then every second, and the links connect anew when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.links.channel import words
from gossamer.wan.loop import in_loop, io_loop, spawn
from gossamer.wan.relay.messages import GREET_S, MAGIC, PIECE_BYTES, SERVICE, Announced, Open, Opened, Stand, Stands, keep_alive, splice
from gossamer.wan.roster.messages import pack, unpack
from gossamer.wan.roster.records import Card, Roster
from gossamer.wan.trust.access import Peer
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.terms import Distrusted, place_of

log = logging.getLogger(__name__)

_FIRST_BYTE_S = 60.0
_BACKOFF_S, _MOST_BACKOFF_S = 0.05, 1.0
BACK_S = 1.5
"""After so long a site that had lost its connection to a relay stands there again, if it can."""
_FOR_GOOD = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class RelayClient:
    """One site at one relay, for as long as the object is open.

    Args:
        dial: to the relay.
        local: port of loopback where pipes to this site end; None: it opens pipes, and takes none.
        begin: stand there at once; else when `begin` is called.
        patience_s: that there is no pipe to a site is said when it has lasted so long,
        there: and the site is one that should be there.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        local: int | None,
        begin: bool = True,
        patience_s: float = 0.0,
        there: Callable[[str], bool] = lambda site: True,
    ) -> None:
        self.failure: RunFailed | None = None
        """Why this client has given up: it is refused, or another process of its site stands at the relay."""
        self.trouble: str | None = "the relay has not answered yet"
        """Why it does not stand; None: it does."""
        self._dial, self._local = dial, local
        self._boot = secrets.token_hex(16)
        self._addresses: dict[str, str] = {}
        self._servers: list[asyncio.Server] = []
        self._pipes: set[asyncio.Task[None]] = set()
        self._patience_s, self._there = patience_s, there
        self._lacks: dict[str, tuple[float, bool]] = {}
        """Sites to which there is no pipe: since when, and whether that was said."""
        self._absent_s: dict[str, float] = {}
        """Sites that do not stand at the relay, since when this is known."""
        self._channel: Any = None
        self._shut = False
        self._away_s: float | None = None
        """Since when it is away, after it had been there."""
        self._lock = threading.Lock()
        self._settled = asyncio.Event()
        self._standing: asyncio.Task[None] | None = None
        if begin:
            self.begin()

    def begin(self) -> None:
        """Stands at the relay from now on, and takes the place of another process of this site that does."""
        in_loop(self._start())

    @property
    def stands(self) -> bool:
        """Whether the relay knows this site."""
        return self.trouble is None

    def wait(self, timeout_s: float) -> None:
        """Until it stands.

        Raises:
            RunFailed: it is refused, or the relay does not answer in time.
        """

        async def ready() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), timeout_s)

        in_loop(ready())
        if self.failure is not None:
            raise self.failure
        if self.trouble is not None:
            raise RunFailed(f"the relay at {self._dial.address} cannot be used, after {timeout_s:g} s: {self.trouble}")

    def address_of(self, site: str) -> str:
        """Where to dial to reach a site through the relay: host:port of loopback, the same each time. May be asked in any thread."""
        with self._lock:
            if site not in self._addresses:
                made = socket.create_server(("127.0.0.1", 0))
                self._addresses[site] = f"127.0.0.1:{made.getsockname()[1]}"
                io_loop().call_soon_threadsafe(lambda: self._do(lambda: self._forward(site, made)))
            return self._addresses[site]

    def whose(self, address: str) -> str | None:
        """The site that is reached by the relay at an address of loopback."""
        with self._lock:
            return next((site for site, at in self._addresses.items() if at == address), None)

    def absent_s(self, site: str) -> float | None:
        """For how long the relay has said, each time that it was asked for a pipe, that a site does not stand there. None: it does, for all
        that is known. One that lives, and can reach the relay, is back within `BACK_S`."""
        since_s = self._absent_s.get(site)
        return None if since_s is None or self.trouble is not None else time.monotonic() - since_s

    def close(self) -> None:
        """Ends all pipes. May be called again."""
        if not self._shut:
            self._shut = True
            in_loop(self._close())

    # ---- standing

    async def _start(self) -> None:
        self._standing = spawn(self._stand(), "standing at the relay")

    async def _close(self) -> None:
        if self._standing is not None:
            self._standing.cancel()
        for server in self._servers:
            server.close()
        await self._end_pipes()
        if self._standing is not None:
            await asyncio.wait([self._standing])

    async def _stand(self) -> None:
        backoff_s = _BACKOFF_S
        while self.failure is None:
            channel = self._dial.aio_channel(_OPTIONS)
            try:
                await self._stand_once(channel)
                why = "the relay has ended the call"
            except grpc.RpcError as error:
                why = str(error.details() or "") if isinstance(error, Distrusted) or error.code() in _FOR_GOOD else words(error)
                if isinstance(error, Distrusted) and error.reason == "session":
                    why = "the relay has begun anew"  # the next call greets again
                if error.code() == grpc.StatusCode.UNIMPLEMENTED or (isinstance(error, Distrusted) and error.reason == "run"):
                    self.failure = RunFailed(f"{self._dial.address} is no relay, though somebody answers there (a coordinator, or a site)")
                elif error.code() in _FOR_GOOD and not getattr(error, "passing", False):
                    self.failure = RunFailed(f"the relay at {self._dial.address} refuses this site: {why}")
            except Exception as error:  # of gRPC, which has several for a stream that has ended: try again
                why = str(error) or type(error).__name__
            finally:
                with contextlib.suppress(Exception):
                    await channel.close()
            if self.trouble is None:
                backoff_s = _BACKOFF_S
                self._away_s = time.monotonic()
                log.warning("relay at %s: away (%s); trying again", self._dial.address, why)
            self.trouble, self._channel = why, None
            self._absent_s.clear()
            self._settled.clear()
            await self._end_pipes()
            if self.failure is not None:
                log.error("%s", self.failure)
                self._settled.set()
                return
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)

    async def _stand_once(self, channel: Any) -> None:
        stream = channel.stream_stream(f"/{SERVICE}/Stand")()
        beats: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(GREET_S):
                await stream.write(pack(Stand(boot=self._boot, takes=self._local is not None)))
                stands = unpack(Stands, _bytes(await stream.read()))
            if self._away_s is None:
                log.info("relay at %s: this site stands", self._dial.address)
            else:
                log.info("relay at %s: back, after %.1f s", self._dial.address, time.monotonic() - self._away_s)
                self._away_s = None
            self.trouble = None
            self._channel = channel
            self._settled.set()
            heard = asyncio.Event()
            beats = spawn(_beat(stream, stands, heard), "signs of life for the relay")
            while (data := await stream.read()) is not grpc.aio.EOF:
                heard.set()
                if data:
                    announced = unpack(Announced, data)
                    self._do(functools.partial(self._take, announced))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ConnectionError("nothing comes from the relay") from None
        finally:
            if beats is not None:
                beats.cancel()
            stream.cancel()

    # ---- pipes

    async def _forward(self, site: str, made: socket.socket) -> None:
        if self._shut:
            made.close()
            return

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._shut:
                writer.transport.abort()
            else:
                self._do(lambda: self._open(site, reader, writer)).add_done_callback(lambda _: writer.transport.abort())

        self._servers.append(await asyncio.start_server(connected, sock=made, limit=PIECE_BYTES))

    async def _open(self, site: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A pipe for a connection to the address of a site. Whoever only knocks says nothing, and gets none."""
        first = await asyncio.wait_for(reader.read(PIECE_BYTES), _FIRST_BYTE_S)
        channel = self._channel
        if not first or channel is None:
            if first:
                self._say(site, self.trouble or "the relay is away")
            return
        try:
            answer = await channel.unary_unary(f"/{SERVICE}/Open")(pack(Open(to=site)), timeout=GREET_S)
        except grpc.RpcError as error:
            absent = error.code() == grpc.StatusCode.NOT_FOUND
            if absent:
                self._absent_s.setdefault(site, time.monotonic())
            self._say(site, str(error.details()) if absent else words(error))
            return
        self._lacks.pop(site, None)
        self._absent_s.pop(site, None)
        await self._run(unpack(Opened, answer).token, (reader, writer), first)

    async def _take(self, announced: Announced) -> None:
        """The other end of a pipe."""
        if self._local is None:
            return
        near = await asyncio.open_connection("127.0.0.1", self._local, limit=PIECE_BYTES)
        try:
            await self._run(announced.token, near, b"")
        finally:
            near[1].transport.abort()

    async def _run(self, token: str, near: tuple[asyncio.StreamReader, asyncio.StreamWriter], first: bytes) -> None:
        async with asyncio.timeout(GREET_S):
            far = await asyncio.open_connection(*place_of(self._dial.address), limit=PIECE_BYTES)
        try:
            keep_alive(far[1])
            far[1].write(MAGIC + bytes.fromhex(token) + first)
            await splice(near, far)
        finally:
            far[1].transport.abort()

    def _say(self, site: str, why: str) -> None:
        """Once, where it lasts; until there is a pipe again."""
        now_s = time.monotonic()
        since_s, said = self._lacks.get(site, (now_s, False))
        due = not said and now_s - since_s >= self._patience_s and self._there(site)
        self._lacks[site] = since_s, said or due
        log.log(
            logging.WARNING if due else logging.DEBUG,
            "relay at %s: no pipe to or from site %s for %.0f s: %s",
            self._dial.address,
            site,
            now_s - since_s,
            why,
        )

    def _do(self, job: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await job()
            except asyncio.CancelledError:
                pass
            except Exception as error:  # of gRPC and of sockets: this pipe ends, and nothing else
                log.debug("a pipe has ended: %s: %s", type(error).__name__, error)

        task = spawn(guarded(), "a pipe")
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)
        return task

    async def _end_pipes(self) -> None:
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        if pipes:
            await asyncio.wait(pipes, timeout=1.0)


async def _beat(stream: Any, stands: Stands, heard: asyncio.Event) -> None:
    """Signs of life, and an end to the stream where none come back. Counted in beats that this process has lived through."""
    quiet = 0.0
    while quiet <= stands.silent_s / stands.beat_s:
        await asyncio.sleep(stands.beat_s)
        quiet = 0 if heard.is_set() else quiet + 1
        heard.clear()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(stands.beat_s):
                await stream.write(b"")
    stream.cancel()


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else b""


def peer_of(mine: str | None, theirs: str | None, name: str, relay: RelayClient | None) -> Peer:
    """How this site sees another one.

    Args:
        mine, theirs: advertised addresses; None: a site that can only dial out.
        name: the other site.
        relay: needed where neither can be dialled.

    Raises:
        BadInput: neither can be dialled, and there is no relay.
    """
    if theirs is not None:
        return Peer(theirs, dials=None if mine is not None else True)
    if mine is not None:
        return Peer(None, dials=False)
    if relay is None:
        raise BadInput(
            f"neither this site nor site {name} can be dialled: give one of them --bind and --advertise HOST:PORT, or both --relay"
        )
    return Peer(relay.address_of(name))


def relayed(roster: Roster, me: str, relay: RelayClient) -> Roster:
    """A roster in which the other sites that cannot be dialled have an address, by way of the relay."""
    members = [
        m if m.card.address is not None or m.site == me else m.model_copy(update={"card": Card(address=relay.address_of(m.site))})
        for m in roster.members
    ]
    return roster.model_copy(update={"members": tuple(members)})
