"""The server's side of trust: every call is checked before its handler sees it, and what was refused is logged once for a peer and reason.

    guard = Guard("lyon", {"run-7": Party(terms, roster)}.get, identity)  # AioGuard for grpc.aio
    server = grpc.server(pool, interceptors=[guard])
    port = guard.listen(server, "0.0.0.0:7000")
    ...
    caller_of(context).site  # in a handler

Initial metadata of an answer belongs to the guard; handlers use trailing metadata.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from gossamer.wan.trust.gate import Admitted, Caller, Gate, Seen
from gossamer.wan.trust.greeting import TAKE
from gossamer.wan.trust.terms import REFUSED_KEY, Distrusted, code_of

_callers: weakref.WeakKeyDictionary[Any, Caller] = weakref.WeakKeyDictionary()
_caller: ContextVar[Caller] = ContextVar("caller")
_faults: weakref.WeakKeyDictionary[Any, Distrusted] = weakref.WeakKeyDictionary()
_ended: ContextVar[list[Distrusted]] = ContextVar("ended")


def caller_of(context: Any) -> Caller:
    """Who makes this call, in a handler behind a guard."""
    return _callers[context] if isinstance(context, grpc.ServicerContext) else _caller.get()


def ended_of(context: Any) -> Distrusted | None:
    """Why the guard has ended this call, in its handler or when it is over; None: it has not."""
    if isinstance(context, grpc.ServicerContext):
        return _faults.get(context)
    return next(iter(_ended.get([])), None)


class Guard(Gate, grpc.ServerInterceptor):
    """For a server of gRPC with threads. Arguments as of `Gate`."""

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Of gRPC: wraps the handler of a call."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if (handle := self.sessionless(method)) is not None:
            return grpc.unary_unary_rpc_method_handler(self._without_session(handle))
        if method == TAKE:
            handler = grpc.unary_unary_rpc_method_handler(lambda pem, context: self.take(pem))
        elif (handler := continuation(handler_call_details)) is None:
            return None
        inner = getattr(handler, _kind(handler))

        def checked(request: Any, context: Any) -> Any:
            def end(error: Distrusted) -> None:
                _faults[context] = error
                context.cancel()

            try:
                admitted = self.admit(method, metadata, Seen.of(context), end)
            except Distrusted as error:
                self._refuse(error, context)
                raise
            _callers[context] = admitted.caller
            if not context.add_callback(lambda: self.closed(admitted)):
                self.closed(admitted)  # it is over already
            context.send_initial_metadata(admitted.answer)
            return inner(request, context)

        return _wrapped(handler, checked)

    def _without_session(self, answer: Callable[[bytes, Seen], bytes]) -> Callable[[bytes, Any], bytes]:
        def handle(raw: bytes, context: Any) -> bytes:
            try:
                return answer(raw, Seen.of(context))
            except Distrusted as error:
                self._refuse(error, context)
                raise

        return handle

    def _refuse(self, error: Distrusted, context: Any) -> None:
        """Ends the call: raises what gRPC wants."""
        context.set_trailing_metadata(((REFUSED_KEY, error.reason),))
        context.abort(*_status(self, error))


class AioGuard(Gate, grpc.aio.ServerInterceptor):
    """For a server of grpc.aio, whose handlers are coroutines or asynchronous generators. Arguments as of `Gate`."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Of gRPC: wraps the handler of a call."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if (handle := self.sessionless(method)) is not None:
            return grpc.unary_unary_rpc_method_handler(self._without_session(handle))
        if method == TAKE:
            handler = grpc.unary_unary_rpc_method_handler(self._taken)
        elif (handler := await continuation(handler_call_details)) is None:
            return None
        inner = getattr(handler, _kind(handler))

        async def answer(request: Any, context: Any) -> Any:
            async with self._admitted(method, metadata, context):
                return await inner(request, context)

        async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._admitted(method, metadata, context):
                async for one in inner(request, context):
                    yield one

        return _wrapped(handler, answers if inspect.isasyncgenfunction(inner) else answer)

    @asynccontextmanager
    async def _admitted(self, method: str, metadata: Any, context: Any) -> AsyncIterator[None]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        ended: list[Distrusted] = []

        def end(error: Distrusted) -> None:
            ended.append(error)
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)

        try:
            admitted: Admitted = self.admit(method, metadata, Seen.of(context), end)
        except Distrusted as error:
            await self._refuse(error, context)
            raise
        _caller.set(admitted.caller)
        _ended.set(ended)
        try:
            await context.send_initial_metadata(admitted.answer)
            yield
        except asyncio.CancelledError:
            if not ended:
                raise
            if task is not None:
                task.uncancel()
            await self._refuse(ended[0], context)
        finally:
            self.closed(admitted)

    def _without_session(self, answer: Callable[[bytes, Seen], bytes]) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(raw: bytes, context: Any) -> bytes:
            try:
                return answer(raw, Seen.of(context))
            except Distrusted as error:
                await self._refuse(error, context)
                raise

        return handle

    async def _taken(self, pem: bytes, _: Any) -> bytes:
        return self.take(pem)

    async def _refuse(self, error: Distrusted, context: Any) -> None:
        """Ends the call: raises what gRPC wants."""
        code, details = _status(self, error)
        await context.abort(code, details, trailing_metadata=((REFUSED_KEY, error.reason),))


def _kind(handler: Any) -> str:
    return ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")


def _wrapped(handler: Any, behaviour: Any) -> Any:
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    return make(behaviour, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


def _status(gate: Gate, error: Distrusted) -> tuple[grpc.StatusCode, str]:
    return code_of(error.reason), f"site {gate.site} refuses this call: {error}"[:1000]
