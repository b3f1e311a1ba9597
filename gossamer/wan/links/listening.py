"""The side of a site that is dialled: greetings are checked here, and what does not belong is refused by name."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from gossamer.core.errors import BadInput
from gossamer.wan.links.channel import SERVER_OPTIONS, SERVICE, Accepted, Session
from gossamer.wan.links.frames import WIRE_VERSION, Attach, FrameError, Hello, Welcome, pack_control, unpack_control
from gossamer.wan.links.link import Link
from gossamer.wan.trust.access import Access
from gossamer.wan.trust.terms import place_of

log = logging.getLogger(__name__)
GREET_S = 10.0
"""For a greeting and its answer."""
MAX_CALLS = 4096
"""That are open at a time."""
_MAX_LOGGED = 1000
F = TypeVar("F", Hello, Welcome, Attach)


class Listener:
    """Takes in the connections of others.

    Args:
        find: the link to a site, where it is known.
    """

    def __init__(
        self, me: int, n: int, run: str, incarnation: str, terms: Mapping[str, str], access: Access, find: Callable[[int], Link | None]
    ) -> None:
        self._me, self._n, self._run, self._incarnation = me, n, run, incarnation
        self._terms, self._access, self._find = dict(terms), access, find
        self._sessions: dict[str, Session] = {}
        self._logged: set[str] = set()

    @property
    def place(self) -> tuple[str, int]:
        """The run that callers must name, and the number that they must look for."""
        return self._run, self._me

    async def control(self, hello: Hello, stream: Accepted, context: Any) -> None:
        """Handles a control stream, to the end of its session."""
        if (why := self._fault(hello, context)) is not None:
            await refuse(context, why, self._logged)
            return
        link = self._find(hello.sender)
        if link is None or (link.over is not None and link.incarnation != hello.incarnation):
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"site {self._me} does not know site {hello.sender} yet")
            return
        if link.over is None and link.incarnation not in (None, hello.incarnation):
            link.die("its process has ended (another one has come in its place)")
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"site {self._me} takes site {hello.sender} for gone")
            return
        if link.over is not None and link.parted:  # a call that was on its way when it left, or this site did: nobody's concern
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, link.over)
            return
        if link.over is not None or hello.known not in (None, self._incarnation):
            await refuse(
                context, link.over or f"site {self._me} is another process than the one that site {hello.sender} knew", self._logged
            )
            return
        link.incarnation = hello.incarnation
        session = Session(link, secrets.token_hex(16), stream, hello.channels)
        self._sessions[session.mark] = session
        with _ending(session):
            try:
                await stream.write(pack_control([Welcome(incarnation=self._incarnation, session=session.mark)]))
                link.begin(session)
                await asyncio.shield(session.over)
            except asyncio.CancelledError:
                if (why := self._access.ended(context)) is not None:
                    link.die(why)
                raise
            finally:
                del self._sessions[session.mark]

    async def data(self, attach: Attach, stream: Accepted) -> bool:
        """Handles a data stream, to the end of its session. False: it is of none of the sessions here."""
        session = self._sessions.get(attach.session)
        if session is None or not session.attach(attach.channel, stream):
            return False
        with _ending(session):
            await asyncio.shield(session.over)
        return True

    def _fault(self, hello: Hello, context: Any) -> str | None:
        """Why a caller is refused."""
        me, them = self._me, hello.sender
        if hello.version != WIRE_VERSION:
            return f"site {them} speaks version {hello.version} of the wire, site {me} {WIRE_VERSION}: run one release on all sites"
        if not hmac.compare_digest(hello.run.encode(), self._run.encode()):
            return f"site {them} is in another run than site {me}: check the run id, and the address"
        if hello.receiver != me or them == me or them >= self._n:
            return f"this is site {me} of {self._n}, and site {them} looked for site {hello.receiver}: check the addresses"
        for name in sorted(self._terms.keys() | hello.terms.keys()):
            mine, theirs = self._terms.get(name), hello.terms.get(name)
            if mine != theirs:
                return f"the {name} of site {them} is {theirs}, that of site {me} is {mine}: all sites must run one configuration"
        return self._access.admit(them, context)


class Port:
    """Where a site listens, for all that it takes part in at once: the connections of one group after the other, of several numbers in one
    group (servers beside a worker), and other services.

    Args:
        bind: host:port (port 0: any); None: the site cannot be reached.
        alone: the only group that there will be; None: whichever was added. A caller for one that is not there (yet) is told to try again.
    """

    def __init__(
        self, bind: str | None, access: Access, services: Sequence[grpc.GenericRpcHandler] = (), alone: Listener | None = None
    ) -> None:
        self.bind = bind
        self.number: int | None = None
        """The port that it listens at."""
        self._access, self._services, self._alone = access, tuple(services), alone
        self._groups: dict[tuple[str, int], Listener] = {}
        self._logged: set[str] = set()
        self._server: grpc.aio.Server | None = None
        if alone is not None:
            self.add(alone)

    async def start(self) -> int | None:
        """Listens; the port.

        Raises:
            BadInput: that cannot be.
        """
        if self.bind is None:
            return None
        handlers = {
            "control": grpc.stream_stream_rpc_method_handler(self._control),
            "data": grpc.stream_stream_rpc_method_handler(self._data),
        }
        server = self._server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=self._access.interceptors, maximum_concurrent_rpcs=MAX_CALLS
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers), *self._services))
        try:
            self.number = self._access.listen(server, self.bind)
        except RuntimeError as error:
            raise BadInput(f"cannot listen at {self.bind} ({error}): give an address of this machine, with a port that is free") from error
        await server.start()
        return self.number

    @property
    def local(self) -> str | None:
        """Where the machine itself reaches it."""
        if self.bind is None or self.number is None:
            return None
        host = self.bind.rpartition(":")[0]
        return f"{'127.0.0.1' if host in ('', '0.0.0.0', '[::]') else host}:{self.number}"

    async def stop(self) -> None:
        """Takes in no more."""
        if self._server is not None:
            await self._server.stop(0.2)

    def add(self, group: Listener) -> None:
        """Takes in callers of a group, in the event loop."""
        self._groups[group.place] = group

    def remove(self, group: Listener) -> None:
        """No more of them."""
        if self._groups.get(group.place) is group:
            del self._groups[group.place]

    async def _first(self, stream: Accepted, context: Any, kind: type[F]) -> F | None:
        """The greeting of a stream; None: it was none, and is refused."""
        try:
            return only(await asyncio.wait_for(stream.read(), GREET_S), kind)
        except (FrameError, TimeoutError) as error:
            await refuse(context, f"no greeting: {error}", self._logged)
            return None

    async def _control(self, _: Any, context: Any) -> None:
        stream = Accepted(context)
        if (hello := await self._first(stream, context, Hello)) is None:
            return
        group = self._alone or self._groups.get((hello.run, hello.receiver))
        if group is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this site does not take part in that (yet)")
            return
        await group.control(hello, stream, context)

    async def _data(self, _: Any, context: Any) -> None:
        stream = Accepted(context)
        if (attach := await self._first(stream, context, Attach)) is None:
            return
        for group in list(self._groups.values()):
            if await group.data(attach, stream):
                return
        await refuse(context, "a data stream of no session", self._logged)


def taken(address: str) -> bool:
    """Whether another process listens at host:port, so that this one cannot."""
    host, port = place_of(address)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


async def refuse(context: Any, why: str, logged: set[str]) -> None:
    """Ends a call; why is logged once."""
    if why not in logged and len(logged) < _MAX_LOGGED:
        logged.add(why)
        log.warning("refused %s: %s", context.peer(), why)
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


@contextmanager
def _ending(session: Session) -> Iterator[None]:
    """Of a handler: its end is the session's."""
    try:
        yield
    finally:
        session.end("the peer's connection was closed")


def only(data: bytes | None, kind: type[F]) -> F:
    """The one frame of a greeting.

    Raises:
        FrameError: it is another.
    """
    frames = unpack_control(data or b"")
    if len(frames) != 1 or not isinstance(frames[0], kind):
        raise FrameError(f"a {kind.__name__.lower()} frame was expected")
    return frames[0]
