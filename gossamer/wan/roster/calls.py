"""Calls to the coordinator: made again until they are answered or their time is over, and what that says about whether it is there."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from pydantic import ValidationError

from gossamer.core.errors import RunFailed
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.roster.messages import MAX_MESSAGE_BYTES, Record, Refusal, Refused, pack, printable, unpack
from gossamer.wan.roster.records import Ask, Done, Forget, Status
from gossamer.wan.roster.service import SERVICE
from gossamer.wan.trust.diagnose import plainly
from gossamer.wan.trust.terms import Distrusted

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
Channel = Callable[[Sequence[tuple[str, Any]]], Any]
"""Makes a gRPC channel with the options given: a Dial's, or for loopback `plain(address)`."""

_AGAIN = ("disk", "flapping", "quota", "taken")
"""Refusals after which the same request is made again, when the coordinator says so."""


class Away(RunFailed):
    """The coordinator did not answer in the time that a request had."""

    def __init__(self, text: str, other: bool = False) -> None:
        super().__init__(text)
        self.other = other
        """Somebody did answer, who is no coordinator."""


def plain(address: str) -> Channel:
    """Channels without TLS, for loopback."""
    return lambda options: grpc.insecure_channel(address, options=list(options))


def ask_status(channel: Channel, run: str | None = None, timeout_s: float = 10.0) -> Status:
    """The status of one run, or of all, for whoever is no member.

    Raises:
        Refused: there is no such run.
        Away: no answer.
    """
    return _ask(channel, "Status", Ask(run=run), Status, timeout_s)


def forget(channel: Channel, run: str, site: str | None = None, timeout_s: float = 10.0) -> None:
    """Has the coordinator forget a run, or a site of it.

    Raises:
        Refused: there is none, or it is there.
        Away: no answer.
    """
    _ask(channel, "Forget", Forget(run=run, site=site), Done, timeout_s)


def _ask(channel: Channel, method: str, request: Record, kind: type[R], timeout_s: float) -> R:
    with channel((("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)) as one:
        try:
            return unpack(kind, one.unary_unary(f"/{SERVICE}/{method}")(pack(request), timeout=timeout_s))
        except grpc.RpcError as error:
            raise _understood(error) or _away(error) from None


class Calls:
    """One connection to the coordinator. All methods may be called from several threads.

    Args:
        channel: makes the connection.
        on_lost: told when answers have been missing for more than a beat, with the reason. Who is slow for a moment is not worth a word.
        on_back: told when answers come again after that, with the seconds without.
    """

    def __init__(self, channel: Channel, timeouts: Timeouts, *, on_lost: Callable[[str], None], on_back: Callable[[float], None]) -> None:
        self.timeouts = t = timeouts
        self.over = threading.Event()
        """Set to end everything that waits here."""
        self.admitted = False
        """This site has been let in. From then on a coordinator that cannot be believed, or does not believe, counts as away."""
        self._on_lost, self._on_back = on_lost, on_back
        self._lock = threading.Lock()
        self._lost_s: float | None = None
        self._told = False
        """That it is away."""
        self._channel = channel(
            (
                ("grpc.initial_reconnect_backoff_ms", max(20, round(1000 * t.backoff))),
                ("grpc.min_reconnect_backoff_ms", max(200, round(1000 * t.call))),
                ("grpc.max_reconnect_backoff_ms", max(100, round(1000 * t.beat))),
                ("grpc.keepalive_time_ms", max(100, round(1000 * t.keepalive))),
                ("grpc.keepalive_timeout_ms", max(100, round(1000 * t.keepalive_wait))),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.enable_retries", 0),
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            )
        )

    @property
    def away_s(self) -> float | None:
        """For how long the coordinator has not answered; None: it answers."""
        lost_s = self._lost_s
        return None if lost_s is None else time.monotonic() - lost_s

    def request(self, method: str, request: Record, kind: type[R], timeout_s: float, wait_s: float = 0.0) -> R:
        """The answer, asked for until it comes or the time is over.

        Args:
            wait_s: how long the coordinator may hold the answer back.

        Raises:
            Away: no answer.
            Refused: it said no.
        """
        until_s, attempt = time.monotonic() + timeout_s, 0
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            try:
                return self.once(method, request, kind, min(left_s + 0.05, self.timeouts.call + wait_s))
            except Refused as error:
                retry_s = error.refusal.retry_s
                if error.code not in _AGAIN or retry_s is None or time.monotonic() + retry_s > until_s or self.over.wait(retry_s):
                    raise
            except Away as error:
                pause_s = self.pause_s(attempt)
                if time.monotonic() + pause_s > until_s or self.over.wait(pause_s):
                    raise
                attempt += 1
                log.debug("%s again: %s", method, error)

    def once(self, method: str, request: Record, kind: type[R], timeout_s: float) -> R:
        """The answer, asked for once."""
        try:
            data = self._channel.unary_unary(f"/{SERVICE}/{method}")(pack(request), timeout=timeout_s)
        except grpc.RpcError as error:
            found = _understood(error)
            if isinstance(found, Distrusted) and self.admitted and not found.own:
                found = None  # its certificate, its clock or its secret: whoever looks after it will see to that
            if found is None:
                self._lost(_words(error))
                raise _away(error) from None
            if isinstance(found, Refused):
                self.reached()
            raise found from None
        except ValueError as error:  # of a channel that is closed
            raise Away(f"the connection to the coordinator is closed ({error})") from None
        self.reached()
        return unpack(kind, data)

    def stream(self, method: str, request: Record) -> Any:
        """A standing stream (of gRPC): messages as bytes; it can be cancelled."""
        return self._channel.unary_stream(f"/{SERVICE}/{method}")(pack(request))

    def pause_s(self, attempt: int) -> float:
        """Doubled each time, up to a beat, and anything between half and all of it."""
        return min(self.timeouts.beat, self.timeouts.backoff * 2.0 ** min(attempt, 16)) * (0.5 + random.random() / 2)

    def reached(self) -> None:
        """The coordinator has answered."""
        if self._lost_s is None:
            return
        with self._lock:
            lost_s, self._lost_s = self._lost_s, None
            told, self._told = self._told, False
        if lost_s is not None and told:
            self._on_back(time.monotonic() - lost_s)

    def close(self) -> None:
        """Ends all calls."""
        self.over.set()
        self._channel.close()

    def _lost(self, why: str) -> None:
        """A call was not answered."""
        now_s = time.monotonic()
        with self._lock:
            if self.over.is_set():
                return
            self._lost_s = now_s if self._lost_s is None else self._lost_s
            if self._told or now_s - self._lost_s <= self.timeouts.beat:
                return
            self._told = True
        self._on_lost(why)


def _understood(error: Any) -> RunFailed | None:
    """A refusal, by the coordinator or by the guard before it; None: there was no answer."""
    if isinstance(error, Distrusted):
        return None if error.passing else error
    with suppress(ValidationError):
        refusal = Refusal.model_validate_json(error.details() or "")
        return Refused(refusal.code, refusal.text, refusal.retry_s)
    return None


def _away(error: Any) -> Away:
    other = error.code() == grpc.StatusCode.UNIMPLEMENTED or (isinstance(error, Distrusted) and error.reason == "site")
    return Away(f"the coordinator does not answer ({_words(error)})", other)


def _words(error: Any) -> str:
    code, details = error.code(), str(error.details() or "")
    if not isinstance(error, Distrusted) and (words := plainly(details)) is not None:
        return words
    return f"{code.name if code else 'no status'}: {printable(details)[:200]}"
