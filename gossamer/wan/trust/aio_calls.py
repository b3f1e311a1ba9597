"""Calls of grpc.aio, in a session (`gossamer.wan.trust.dial`).

A channel to a peer that is not to be believed any more is closed (`AioChannel.end`), and every call of it, under way or made later, raises
why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from gossamer.wan.trust.dial import Dial, Made, Session
from gossamer.wan.trust.terms import Distrusted


class AioChannel:
    """What of grpc.aio.Channel is used here, each call in the session with the peer. Bytes in, bytes out."""

    def __init__(self, dial: Dial, raw: Any) -> None:
        self._dial, self._raw = dial, raw
        self.session: Session | None = None
        """Of the latest call."""
        self.ended: Distrusted | None = None
        """Why nothing passes any more."""
        self._loop: asyncio.AbstractEventLoop | None = None
        dial.under_way(self)

    def end(self, error: Distrusted) -> None:
        """Closes the connection, for good. From any thread."""
        if self.ended is None:
            self.ended = error
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._raw.close(), self._loop)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around whatever a call does: raises why the channel has ended, where it has."""
        self._loop = asyncio.get_running_loop()
        self._check()
        try:
            yield
        except BaseException:
            task = asyncio.current_task()
            if self.ended is None or (task is not None and task.cancelling()):
                raise
        self._check()

    def _check(self) -> None:
        if self.ended is not None:
            raise Distrusted(self.ended.reason, str(self.ended), own=self.ended.own)

    def unary_unary(self, method: str) -> Callable[..., Awaitable[bytes]]:
        """As of grpc.aio.Channel. A call that finds the session over is made again, once, in a new one."""

        async def call(request: bytes, *, timeout: float | None = None, wait_for_ready: bool | None = None) -> bytes:
            try:
                return await self._unary(method, request, timeout, wait_for_ready)
            except Distrusted as error:
                if error.reason != "session":
                    raise
            return await self._unary(method, request, timeout, wait_for_ready)

        return call

    def unary_stream(self, method: str) -> Callable[..., AioStream]:
        """As of grpc.aio.Channel."""
        make = self._raw.unary_stream(method)

        def call(request: bytes, *, timeout: float | None = None, wait_for_ready: bool | None = None) -> AioStream:
            def begin(metadata: Any) -> Any:
                return make(request, metadata=metadata, timeout=timeout, wait_for_ready=wait_for_ready)

            return AioStream(self._dial, self, method, timeout, begin)

        return call

    def stream_stream(self, method: str) -> Callable[..., AioStream]:
        """As of grpc.aio.Channel, written to with `write`."""
        make = self._raw.stream_stream(method)

        def call(*, timeout: float | None = None, wait_for_ready: bool | None = None) -> AioStream:
            def begin(metadata: Any) -> Any:
                return make(metadata=metadata, timeout=timeout, wait_for_ready=wait_for_ready)

            return AioStream(self._dial, self, method, timeout, begin)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As of grpc.aio.Channel."""
        state: grpc.ChannelConnectivity = self._raw.get_state(try_to_connect)
        return state

    async def close(self, grace: float | None = None) -> None:
        """As of grpc.aio.Channel."""
        await self._raw.close(grace)

    async def greeted(self, timeout_s: float | None) -> Session:
        """The session with the peer."""
        self.session = await self._dial.aio_greeted(self._raw, timeout_s)
        return self.session

    async def _unary(self, method: str, request: bytes, timeout_s: float | None, wait_for_ready: bool | None) -> bytes:
        with self.telling():
            session = await self.greeted(timeout_s)
            made = session.call(method)
            call = self._raw.unary_unary(method)(request, metadata=(made.metadata,), timeout=timeout_s, wait_for_ready=wait_for_ready)
            try:
                answer = await call
            except grpc.RpcError as error:
                raise self._dial.refused(error, session) from None
            self._dial.believe(await call.initial_metadata(), made, session)
        return bytes(answer)


class AioStream:
    """A stream that greets first, if need be, and is believed from its first message on."""

    def __init__(self, dial: Dial, channel: AioChannel, method: str, timeout_s: float | None, begin: Callable[[Any], Any]) -> None:
        self._dial, self._channel, self._method, self._timeout_s, self._begin = dial, channel, method, timeout_s, begin
        self._begun: asyncio.Task[tuple[Any, Session, Made]] = asyncio.get_running_loop().create_task(self._made())
        self._begun.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever reads or writes is told
        self._believed = False

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        with self._channel.telling():
            call, session, made = await asyncio.shield(self._begun)
            try:
                found = await call.read()
            except grpc.RpcError as error:
                raise self._dial.refused(error, session) from None
        if found is not grpc.aio.EOF and not self._believed:
            try:
                self._dial.believe(await call.initial_metadata(), made, session)
            except Distrusted:
                call.cancel()
                raise
            self._believed = True
        return found

    async def write(self, data: bytes) -> None:
        """Sends a message."""
        with self._channel.telling():
            call, session, _ = await asyncio.shield(self._begun)
            try:
                await call.write(data)
            except grpc.RpcError as error:
                raise self._dial.refused(error, session) from None

    async def done_writing(self) -> None:
        """There are no more messages."""
        call, _, _ = await asyncio.shield(self._begun)
        await call.done_writing()

    def cancel(self) -> bool:
        """Ends the stream."""
        if self._begun.done() and not self._begun.cancelled() and self._begun.exception() is None:
            return bool(self._begun.result()[0].cancel())
        return self._begun.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (found := await self.read()) is not grpc.aio.EOF:
            yield found

    async def _made(self) -> tuple[Any, Session, Made]:
        session = await self._channel.greeted(self._timeout_s)
        made = session.call(self._method)
        return self._begin((made.metadata,)), session, made
