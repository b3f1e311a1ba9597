"""Calls of gRPC with threads, in a session (`gossamer.wan.trust.dial`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc

from gossamer.wan.trust.dial import Dial, Made, Session, refusal
from gossamer.wan.trust.terms import Distrusted


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class Interceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Makes every call of a channel one of the session with its peer.

    Args:
        raw: the channel without it, for the greeting.
    """

    def __init__(self, dial: Dial, raw: Any) -> None:
        self._dial, self._raw = dial, raw

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Of gRPC."""
        answer = self._made(continuation, client_call_details, request)
        if answer.session_over():  # the server was started again, or has another list of revoked certificates
            return self._made(continuation, client_call_details, request)
        return answer

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Of gRPC."""
        return self._made(continuation, client_call_details, request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Of gRPC."""
        return self._made(continuation, client_call_details, request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Of gRPC."""
        return self._made(continuation, client_call_details, request_iterator)

    def _made(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> _Answer:
        session = self._dial.greeted(self._raw, details.timeout)
        made = session.call(details.method)
        metadata = (*(details.metadata or ()), made.metadata)
        changed = _Details(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready, details.compression)
        answer = _Answer(continuation(changed, request), self._dial, session, made)
        self._dial.under_way(answer)
        return answer


class _Answer:
    """A call (and future, and stream) of gRPC whose answer is handed out only when it is believed. Everything else is the call's."""

    def __init__(self, call: Any, dial: Dial, session: Session, made: Made) -> None:
        self._call, self._dial, self.session, self._made = call, dial, session, made
        self._believed = False
        self._fault: Distrusted | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def end(self, error: Distrusted) -> None:
        """Ends the call, for a reason that whoever waits is told."""
        if self._fault is None:
            self._fault = error
            self._call.cancel()

    def session_over(self) -> bool:
        """Whether the call has ended for want of a session."""
        if not self._call.done() or self._call.code() == grpc.StatusCode.OK:
            return False
        self._dial.refused(self._call, self.session)
        found = refusal(self._call)
        return found is not None and found.reason == "session"

    def result(self, timeout: float | None = None) -> Any:
        """Of a future."""
        try:
            found = self._call.result(timeout)
        except grpc.RpcError as error:
            raise self._fault or self._dial.refused(error, self.session) from None
        self._believe()
        return found

    def exception(self, timeout: float | None = None) -> Any:
        """Of a future."""
        try:
            self.result(timeout)
        except grpc.RpcError as error:
            return error
        return None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            found = next(self._call)
        except grpc.RpcError as error:
            raise self._fault or self._dial.refused(error, self.session) from None
        self._believe()
        return found

    def _believe(self) -> None:
        if not self._believed:
            try:
                self._dial.believe(self._call.initial_metadata(), self._made, self.session)
            except grpc.RpcError:
                self._call.cancel()
                raise
            self._believed = True
