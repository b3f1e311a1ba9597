"""The connections of one site to all others over gRPC, and the two wires that a group takes.

    links = Links(me=1, n=3, run="8f..", bind="0.0.0.0:7001")      # listens
    links.connect({0: Peer("site-a.example:7001"), 2: Peer("site-c.example:7001")})
    group = Group(store, 1, 3, links.wire)                         # gossamer.real

Of two sites that can both be reached the one with the higher number dials; one that cannot be reached dials. The streams carry both
directions.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from torch import Tensor

from gossamer.core.errors import BadInput, RunFailed
from gossamer.real.wire import LinkDown
from gossamer.wan.links.channel import CHANNEL_OPTIONS, Dialled, Session, words
from gossamer.wan.links.frames import Attach, Bye, Control, FrameError, Hello, Welcome, pack_control
from gossamer.wan.links.link import Link, LinkSettings, Traffic, WireName
from gossamer.wan.links.listening import GREET_S, Listener, Port, only
from gossamer.wan.links.peerstore import PeerStore
from gossamer.wan.links.transfer import Op
from gossamer.wan.links.watch import knock
from gossamer.wan.loop import in_loop, io_loop, spawn
from gossamer.wan.trust.access import Access, Peer

log = logging.getLogger(__name__)
_FOR_GOOD = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)
_BACKOFF_S, _MOST_BACKOFF_S, _LOOK_S = 0.05, 1.0, 0.05


class LinkWire:
    """One of the two wires of a site (a `gossamer.real.Wire`)."""

    def __init__(self, links: Links, name: WireName) -> None:
        self._links, self._name = links, name

    def rank(self) -> int:
        return self._links.me

    def size(self) -> int:
        return self._links.n

    def send(self, tensor: Tensor, dst: int, tag: int) -> Op:
        return self._post(tensor, dst, tag, receive=False)

    def recv(self, tensor: Tensor, src: int, tag: int) -> Op:
        return self._post(tensor, src, tag, receive=True)

    def _post(self, tensor: Tensor, other: int, tag: int, *, receive: bool) -> Op:
        op, links = Op(tensor), self._links

        def post() -> None:
            link = links.links.get(other)
            if link is None:
                op.end(f"there is no link to site {other}")
            else:
                link.post(self._name, op, tag, receive=receive)

        io_loop().call_soon_threadsafe(post)
        return op

    def close(self) -> None:
        self._links.close_wire(self._name)


class Links:
    """All connections of site `me` among `n` in one run. It listens from the start.

    Args:
        run: the run's id; another one is refused.
        bind: host:port to listen at (port 0: any); None: this site cannot be reached, and dials all others.
        terms: what both sides of a connection must have equal, by name (configuration, layout).
        access: how connections are made and let in: TLS, certificates, the run's secret; None: plainly, for one machine.
        services: further gRPC services (asynchronous handlers) on the same port.
        port: where this site listens already, in place of `bind` and `services`: shared with whatever else it takes part in. It stays when
            these connections are closed.

    Raises:
        BadInput: the address cannot be listened at.
    """

    def __init__(
        self,
        me: int,
        n: int,
        run: str,
        *,
        bind: str | None = "127.0.0.1:0",
        terms: Mapping[str, str] | None = None,
        settings: LinkSettings | None = None,
        access: Access | None = None,
        services: Sequence[grpc.GenericRpcHandler] = (),
        port: Port | None = None,
    ) -> None:
        self.me, self.n, self.run, self.bind = me, n, run, bind if port is None else port.bind
        self.settings = settings or LinkSettings()
        self.incarnation = secrets.token_hex(16)
        self.links: dict[int, Link] = {}
        self.port: int | None = None
        """Where it listens."""
        self.store = PeerStore(me)
        """What a Group over these connections takes for its store, where nobody else has one for all."""
        self.store.push = self._push
        self.out: Callable[[int], str | None] = lambda number: None
        """Why the process of a peer is gone, as others say who would know; None: nobody says so. Counts while there is no connection."""
        self._terms, self._access = dict(terms or {}), access or Access()
        self._listener = Listener(me, n, run, self.incarnation, self._terms, self._access, self.links.get)
        self._closed: set[WireName] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shut = False
        self._shared = port
        self._own: Port | None = None
        in_loop(self._start(services))

    def wire(self, name: WireName) -> LinkWire:
        """One of the two wires: what a Group connects by."""
        return LinkWire(self, name)

    # ---- peers

    def connect(self, peers: Mapping[int, Peer], timeout_s: float, *, check: Callable[[], None] | None = None) -> None:
        """Adds these sites and waits until there is a connection to each.

        Args:
            check: asked ten times a second meanwhile; what it raises ends the wait.

        Raises:
            BadInput: neither this site nor one of them can be reached.
            RunFailed: one refuses, or does not answer in time; the message says which, and why.
        """
        for j, peer in sorted(peers.items()):
            self.add(j, peer)
        in_loop(self._meet(sorted(peers), timeout_s), check=check)

    def add(self, j: int, peer: Peer) -> None:
        """Adds a site, or one that was gone and comes back, as a new one; connects to it in the background.

        Raises:
            BadInput: neither side can be reached.
        """
        if peer.address is None and self.bind is None:
            raise BadInput(
                f"site {self.me} and site {j} cannot be reached: one of the two must listen (give it an address), or a relay between them"
            )
        in_loop(self._add(j, peer))

    def drop(self, j: int, why: str) -> None:
        """Ends the link to a site: what is under way to and from it raises LinkDown."""
        if link := self.links.get(j):
            io_loop().call_soon_threadsafe(link.die, why)

    def traffic(self) -> dict[int, Traffic]:
        """What has passed, by site."""

        async def read() -> dict[int, Traffic]:
            return {j: link.traffic for j, link in self.links.items()}

        return in_loop(read())

    async def _add(self, j: int, peer: Peer) -> None:
        if old := self.links.get(j):
            old.die(f"site {j} has come anew")
        link = self.links[j] = Link(self.run, self.me, j, peer, self.settings, self._session_ended, self.store)
        if self._dials(link):
            self._do(self._dial(link))

    async def _meet(self, wanted: list[int], timeout_s: float) -> None:
        links = [self.links[j] for j in wanted]
        tasks = [asyncio.ensure_future(link.met.wait()) for link in links]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        lacking = [link for link in links if link.over is not None or not link.met.is_set()]
        if lacking:
            what = "; ".join(f"site {link.src} ({link.peer.address or 'dials in'}): {link.trouble}" for link in lacking)
            raise RunFailed(f"site {self.me} has no connection, after up to {timeout_s:g} s, to {what}")

    def _dials(self, link: Link) -> bool:
        if link.peer.dials is not None:
            return link.peer.dials
        return self.bind is None or (link.peer.address is not None and self.me > link.src)

    # ---- dialling

    async def _dial(self, link: Link) -> None:
        backoff_s = _BACKOFF_S
        address = link.peer.address
        assert address is not None
        while link.over is None:
            if link.incarnation is not None and await knock(address, self.settings.beat_s) == "refused":
                link.die("its process has ended: a new connection is refused")
                return
            channels = [self._channel(link, i) for i in range(1 + self.settings.channels)]
            session: Session | None = None
            try:
                session = await asyncio.wait_for(self._greet(link, channels), GREET_S)
                since_s = time.monotonic()
                await session.over
                if time.monotonic() - since_s > _MOST_BACKOFF_S:
                    backoff_s = 0.0
            except grpc.RpcError as error:
                link.trouble = words(error)
                if error.code() in _FOR_GOOD and not getattr(error, "passing", False):
                    link.die(error.details() or link.trouble)
            except TimeoutError:
                link.trouble = "no answer"
            except (FrameError, ConnectionError) as error:
                link.trouble = str(error)
            except Exception as error:  # of gRPC, which has several for a stream that has ended: dial again
                link.trouble = f"{type(error).__name__}: {error}"[:200]
            finally:
                good = link.parted and session is not None and session.well
                for channel in channels:
                    with suppress(Exception):
                        await self._access.release(channel, good)
            if link.over is None:
                await asyncio.sleep(backoff_s)
                backoff_s = min(max(2 * backoff_s, _BACKOFF_S), _MOST_BACKOFF_S)

    async def _greet(self, link: Link, channels: Sequence[Any]) -> Session:
        """A session with a peer that listens."""
        k = self.settings.channels
        hello = Hello(
            run=self.run, sender=self.me, receiver=link.src, incarnation=self.incarnation, known=link.incarnation,
            channels=k, terms=self._terms,
        )  # fmt: skip
        for channel in channels[1:]:
            channel.get_state(try_to_connect=True)  # all connect at once
        control = Dialled(channels[0], "control")
        streams: list[Dialled] = []
        try:
            await control.write(pack_control([hello]))
            welcome = only(await control.read(), Welcome)
            if link.incarnation is not None and link.incarnation != welcome.incarnation:
                link.die("its process has ended (another one answers in its place)")
                raise FrameError(link.trouble)
            link.incarnation = welcome.incarnation
            streams += [Dialled(channel, "data") for channel in channels[1:]]
            await asyncio.gather(
                *(stream.write(pack_control([Attach(session=welcome.session, channel=i)])) for i, stream in enumerate(streams))
            )
        except BaseException:
            for stream in (control, *streams):
                stream.cancel()
            raise
        session = Session(link, welcome.session, control, k)
        for i, stream in enumerate(streams):
            session.attach(i, stream)
        link.begin(session)
        return session

    def _channel(self, link: Link, number: int) -> Any:
        return self._access.channel(link.src, link.peer, (*CHANNEL_OPTIONS, ("gossamer.channel", number)))

    # ---- life

    def _session_ended(self, link: Link, why: str) -> None:
        log.info("site %d: %s; connecting anew", link.src, why)
        if not self._shut:
            self._do(self._look_out(link))
        if not self._dials(link) and link.peer.address is not None and not self._shut:
            self._do(self._await_return(link))

    async def _await_return(self, link: Link) -> None:
        """Of a peer that will dial: looks whether its process is still there."""
        address = link.peer.address
        assert address is not None
        pause_s = _BACKOFF_S  # a process that ends closes its connections first, and then where it listens
        while link.over is None and link.session is None:
            if await knock(address, self.settings.beat_s) == "refused" and link.session is None:
                link.die("its process has ended: a new connection is refused")
            await asyncio.sleep(min(pause_s, self.settings.beat_s))
            pause_s *= 2.0

    async def _look_out(self, link: Link) -> None:
        """Of a peer whose connection broke: whether others say that its process is gone. Where it cannot be dialled, nothing else tells."""
        while link.over is None and link.session is None:
            if (why := self.out(link.src)) is not None:
                link.die(why)
            await asyncio.sleep(_LOOK_S)

    def _push(self, frame: Control) -> None:
        for link in self.links.values():
            link.say(frame)

    async def _start(self, services: Sequence[grpc.GenericRpcHandler]) -> None:
        if self._shared is not None:
            self._shared.add(self._listener)
            self.port = self._shared.number
        elif self.bind is not None:
            own = self._own = Port(self.bind, self._access, services, alone=self._listener)
            self.port = await own.start()
        self._do(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.settings.beat_s)
            for link in self.links.values():
                link.tick()

    def _do(self, job: Any) -> None:
        task = spawn(job, f"site {self.me}, {job.__name__.strip('_')}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close_wire(self, name: WireName) -> None:
        """Closes one of the two wires at once; with the second, all connections."""
        if self._shut:
            return
        self._closed.add(name)

        async def close() -> None:
            for link in self.links.values():
                link.close_wire(name)

        in_loop(close())
        if len(self._closed) == 2:
            self.close()

    def close(self, drain_s: float = 0.0, why: str = "its program has ended") -> None:
        """Waits up to `drain_s` until everything sent has arrived, takes leave of all peers, and closes. May be called again."""
        if not self._shut:
            self._shut = True
            in_loop(self._close(drain_s, why))

    async def _close(self, drain_s: float, why: str) -> None:
        deadline_s = time.monotonic() + drain_s
        while any(link.busy for link in self.links.values()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.005)
        sessions = [link.session for link in self.links.values() if link.session is not None]
        for link in self.links.values():
            link.parted = True
        for session in sessions:
            session.say(Bye(why=why))
        if sessions:  # who is told ends the session
            await asyncio.wait([asyncio.ensure_future(_quiet(s)) for s in sessions], timeout=1.0)
        for link in self.links.values():
            link.die("this site has closed its links")
        tasks = [*self._tasks]
        for task in tasks:
            if task.get_coro().__name__ != "_dial":  # type: ignore[union-attr]
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        if self._shared is not None:
            self._shared.remove(self._listener)
        elif self._own is not None:
            await self._own.stop()


async def _quiet(session: Session) -> None:
    await asyncio.shield(session.over)


__all__ = ["Access", "LinkDown", "LinkSettings", "LinkWire", "Links", "Peer", "Traffic"]
