"""The coordinator on the network: gRPC with plain bytes, one method per request, and a standing stream of news for each site.

    name = lambda context: caller_of(context).site
    with CoordinatorServer(Path("runs.db"), "0.0.0.0:7400", interceptors=[guard], listen=guard.listen, identify=name) as server:
        print(server.port)
        server.wait()

What is no message is refused before anything looks at it; a request that fails ends that request and nothing else. Refusals are answered in
words and logged once for each site and reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from gossamer.core.errors import BadInput
from gossamer.wan.roster.coordinator import Coordinator
from gossamer.wan.roster.ledgerdb import LedgerDB, unusable
from gossamer.wan.roster.membership import is_loopback
from gossamer.wan.roster.messages import MAX_MESSAGE_BYTES, Code, Record, Refused, pack, unpack
from gossamer.wan.roster.records import Ask, Beat, Caller, Forget, HandIn, Join, News, Propose, Publish, Status, Verdict
from gossamer.wan.trust.terms import Distrusted, check_bind

log = logging.getLogger(__name__)

SERVICE = "gossamer.Coordinator"
THREADS = 256
"""Calls at a time. A quarter is kept for those that do not wait."""
MAX_WAIT_S = 20.0
"""The longest that an answer is held back."""
MAX_LOGGED = 1024

_STATUS: dict[Code, grpc.StatusCode] = {
    "garbage": grpc.StatusCode.INVALID_ARGUMENT,
    "identity": grpc.StatusCode.PERMISSION_DENIED,
    "unknown": grpc.StatusCode.NOT_FOUND,
    "flapping": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "quota": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "disk": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""All others: FAILED_PRECONDITION. What counts is the refusal in the details."""

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 50),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)

Identify = Callable[[Any], str | None]
Listen = Callable[[Any, str], int]
Ended = Callable[[Any], Distrusted | None]


def listen_plain(server: Any, address: str) -> int:
    """Binds without TLS, which is for loopback.

    Raises:
        BadInput: another address, or one that is taken.
    """
    if not is_loopback(address) or address.startswith(":"):
        raise BadInput(f"{address}: not a loopback address, and there are no certificates: make them with gossamer wan ca")
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise BadInput(f"{address}: cannot be bound: give an address of this machine, and a port that is free")
    return int(port)


class CoordinatorServer:
    """A coordinator that listens.

    Args:
        state: the file that holds everything; made where there is none.
        bind: host:port; port 0 takes a free one.
        interceptors: of gRPC's server, such as a Guard.
        services: what else is served on the port.
        listen: binds the server to the address, with whatever credentials it has.
        identify: the site that makes a call, as its certificate says; None where it says nothing (loopback).
        ended: why a call was ended by an interceptor; None: it was not.

    Raises:
        BadInput: the file or the address cannot be used.
    """

    def __init__(
        self,
        state: Path,
        bind: str,
        *,
        interceptors: Sequence[grpc.ServerInterceptor] = (),
        services: Sequence[grpc.GenericRpcHandler] = (),
        listen: Listen = listen_plain,
        identify: Identify = lambda context: None,
        ended: Ended = lambda context: None,
        threads: int = THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = threading.Condition()
        self._db = LedgerDB(state)
        self._identify, self._ended = identify, ended
        self._over = False
        self._logged: set[tuple[str, str]] = set()
        self._standing: dict[Caller, int] = {}
        self._waiting, self._may_wait = 0, threads - max(1, threads // 4)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="coordinator")
        self._server = grpc.server(pool, interceptors=list(interceptors), options=OPTIONS, maximum_concurrent_rpcs=4 * threads)
        self._server.add_generic_rpc_handlers((self._handlers(), *services))
        try:
            check_bind(bind)
            self.coordinator = Coordinator(self._db, clock, lambda run: self._changed.notify_all())
            self.port = listen(self._server, bind)
        except BaseException as error:
            self._db.close()
            if isinstance(error, Refused):
                raise unusable(state, str(error)) from error
            raise
        self._server.start()
        self._ticker = threading.Thread(target=self._tick, name="coordinator-tick", daemon=True)
        self._ticker.start()
        log.info("coordinator listening=%s port=%d state=%s runs=%d", bind, self.port, state, len(self.coordinator.runs))

    def __enter__(self) -> CoordinatorServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def status(self) -> Status:
        """Of all runs."""
        with self._changed:
            return self.coordinator.status(Ask())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is closed; False after the time-out."""
        return not self._server.wait_for_termination(timeout_s)

    def close(self, grace_s: float = 1.0) -> None:
        """Ends all calls and closes the file. The sites go on, as configured, and come back to the next one."""
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify_all()
        self._server.stop(grace_s).wait()
        self._ticker.join()
        with self._changed:
            self._db.close()

    # ---- calls

    def _handlers(self) -> Any:
        one: dict[str, Any] = {
            "Join": self._on(Join, lambda r, c: self.coordinator.join(r)),
            "Beat": self._on(Beat, lambda r, c: self.coordinator.beat(r)),
            "Leave": self._on(Caller, lambda r, c: self.coordinator.leave(r)),
            "Propose": self._on(Propose, self._propose),
            "HandIn": self._on(HandIn, lambda r, c: self.coordinator.hand_in(r)),
            "Publish": self._on(Publish, lambda r, c: self.coordinator.publish(r)),
            "Plan": self._on(Caller, lambda r, c: self.coordinator.plan(r)),
            "Status": self._on(Ask, lambda r, c: self.coordinator.status(r)),
            "Forget": self._on(Forget, lambda r, c: self.coordinator.forget(r, self._identify(c))),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(SERVICE, one)

    def _on(self, kind: type[Any], answer: Callable[[Any, Any], Record]) -> Any:
        def handle(data: bytes, context: Any) -> bytes:
            request = None
            try:
                request = unpack(kind, data)
                self._check(request, context)
                with self._changed:
                    if self._over:
                        context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator ends")
                    reply = pack(answer(request, context))
                if len(reply) > MAX_MESSAGE_BYTES:
                    raise Refused("quota", f"the answer has {len(reply)} bytes, at most {MAX_MESSAGE_BYTES}: ask for less at a time")
                return reply
            except Refused as error:
                raise self._refuse(error, request, context) from None

        return grpc.unary_unary_rpc_method_handler(handle)

    def _check(self, request: Any, context: Any) -> None:
        """That a site speaks for itself."""
        who = request if isinstance(request, Caller) else getattr(request, "caller", None)
        site = self._identify(context)
        if who is not None and site is not None and site != who.site:
            raise Refused("identity", f"a call for site {who.site} with the certificate of site {site}")

    def _refuse(self, error: Refused, request: Any, context: Any, say: bool = True) -> Exception:
        """Ends a call by raising; it returns nothing."""
        who = request if isinstance(request, Caller) else getattr(request, "caller", None)
        name = who.site if who is not None else context.peer().rpartition(":")[0]
        key = (name, f"{error.code} {error.refusal.retry_s is None}")
        with self._changed:
            new = say and key not in self._logged and len(self._logged) < MAX_LOGGED
            self._logged |= {key} if new else set()
        if new:
            log.warning("refused peer=%s code=%s %s", name, error.code, error)
        context.abort(_STATUS.get(error.code, grpc.StatusCode.FAILED_PRECONDITION), pack(error.refusal).decode())
        return error

    # ---- calls that wait

    def _propose(self, request: Propose, context: Any) -> Verdict:
        """Under the condition: proposes, and waits for a session until the time is over."""
        until_s = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        verdict = self.coordinator.propose(request)
        while verdict.session is None and (left_s := until_s - time.monotonic()) > 0 and context.is_active() and not self._over:
            with self._place():
                self._changed.wait(min(left_s, 1.0))
            verdict = self.coordinator.verdict(request)
        return verdict

    def _place(self) -> _Place:
        if self._waiting >= self._may_wait:
            raise Refused("quota", f"{self._waiting} calls wait already: the coordinator has room for no more", 1.0)
        return _Place(self)

    def _watch(self, data: bytes, context: Any) -> Iterator[bytes]:
        who: Caller | None = None
        try:
            who = unpack(Caller, data)
            self._check(who, context)
            with self._changed:
                self.coordinator.news(who)
                self._standing[who] = self._standing.get(who, 0) + 1
                every_s = self.coordinator.runs[who.run].timeouts.beat
            if not context.add_callback(lambda: self._fell(who, context)):
                self._fell(who, context)
                return
            seen = -1
            while (news := self._next_news(who, seen, every_s, context)) is not None:
                seen = news[0]
                yield pack(news[1])
        except Refused as error:
            raise self._refuse(error, who, context, say=error.code != "expired") from None  # a site that leaves is no news

    def _next_news(self, who: Caller, seen: int, every_s: float, context: Any) -> tuple[int, News] | None:
        """When there are any, or a beat has passed; None at the end of the stream."""
        with self._changed:
            until_s = time.monotonic() + every_s
            while not self._over and context.is_active():
                version, news = self.coordinator.news(who)
                left_s = until_s - time.monotonic()
                if version != seen or left_s <= 0:
                    return version, news
                with self._place():
                    self._changed.wait(left_s)
            return None

    def _fell(self, who: Caller, context: Any) -> None:
        """The stream has ended. Unless it stands anew already, the site may be gone; and it is, if its certificate is not good any more."""
        fault = self._ended(context)
        with self._changed:
            left = self._standing.pop(who, 1) - 1
            if left > 0:
                self._standing[who] = left
            if fault is not None and fault.of_certificate and not self._over:
                with suppress(Refused):  # the disk; its lease will be over soon
                    self.coordinator.expel(who, str(fault))
            elif left <= 0 and not self._over:
                self.coordinator.doubt(who)
            self._changed.notify_all()

    def _tick(self) -> None:
        while True:
            with self._changed:
                if self._over:
                    return
                try:
                    self.coordinator.tick()
                except Exception:  # whatever it is, leases must go on running out
                    log.exception("coordinator tick failed")
                every_s = min((run.timeouts.grace / 2 for run in self.coordinator.runs.values()), default=0.1)
            time.sleep(min(max(every_s, 0.01), 0.5))


class _Place:
    """A call that waits. Made, entered and left under the condition."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._server._waiting += 1

    def __exit__(self, *_: object) -> None:
        self._server._waiting -= 1
