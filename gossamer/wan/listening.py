"""The side of a site that is dialled: greetings are checked here, and what does not belong is refused by name."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from gossamer.core.errors import BadInput
from gossamer.wan.access import Access
from gossamer.wan.channel import SERVER_OPTIONS, SERVICE, Accepted, Session
from gossamer.wan.frames import WIRE_VERSION, Attach, FrameError, Hello, Welcome, pack_control, unpack_control
from gossamer.wan.link import Link

log = logging.getLogger(__name__)
GREET_S = 10.0
"""For a greeting and its answer."""
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
        self._server: grpc.aio.Server | None = None

    async def start(self, bind: str, services: Sequence[grpc.GenericRpcHandler]) -> int:
        """Listens at host:port; the port.

        Raises:
            BadInput: that cannot be.
        """
        handlers = {
            "control": grpc.stream_stream_rpc_method_handler(self._control),
            "data": grpc.stream_stream_rpc_method_handler(self._data),
        }
        server = self._server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=self._access.interceptors, maximum_concurrent_rpcs=64 + 32 * self._n
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers), *services))
        try:
            port = self._access.listen(server, bind)
        except RuntimeError as error:
            raise BadInput(f"cannot listen at {bind} ({error}): give an address of this machine, with a port that is free") from error
        await server.start()
        return port

    async def stop(self) -> None:
        """Takes in no more."""
        if self._server is not None:
            await self._server.stop(0.2)

    async def _control(self, _: Any, context: Any) -> None:
        """Handles a control stream, to the end of its session."""
        stream = Accepted(context)
        try:
            hello = only(await asyncio.wait_for(stream.read(), GREET_S), Hello)
        except (FrameError, TimeoutError) as error:
            await self._refuse(context, f"no greeting: {error}")
            return
        if (why := self._fault(hello, context)) is not None:
            await self._refuse(context, why)
            return
        link = self._find(hello.sender)
        if link is None or (link.over is not None and link.incarnation != hello.incarnation):
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"site {self._me} does not know site {hello.sender} yet")
            return
        if link.over is None and link.incarnation not in (None, hello.incarnation):
            link.die("its process has ended (another one has come in its place)")
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"site {self._me} takes site {hello.sender} for gone")
            return
        if link.over is not None or hello.known not in (None, self._incarnation):
            await self._refuse(context, link.over or f"site {self._me} is another process than the one that site {hello.sender} knew")
            return
        link.incarnation = hello.incarnation
        session = Session(link, secrets.token_hex(16), stream, hello.channels)
        self._sessions[session.mark] = session
        with _ending(session):
            try:
                await stream.write(pack_control([Welcome(incarnation=self._incarnation, session=session.mark)]))
                link.begin(session)
                await asyncio.shield(session.over)
            finally:
                del self._sessions[session.mark]

    async def _data(self, _: Any, context: Any) -> None:
        """Handles a data stream, to the end of its session."""
        stream = Accepted(context)
        try:
            attach = only(await asyncio.wait_for(stream.read(), GREET_S), Attach)
        except (FrameError, TimeoutError) as error:
            await self._refuse(context, f"no greeting: {error}")
            return
        session = self._sessions.get(attach.session)
        if session is None or not session.attach(attach.channel, stream):
            await self._refuse(context, "a data stream of no session")
            return
        with _ending(session):
            await asyncio.shield(session.over)

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

    async def _refuse(self, context: Any, why: str) -> None:
        if why not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(why)
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
