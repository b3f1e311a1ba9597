"""Certificates for tests, a site that answers, and ways to call it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gossamer.wan.trust import ca, certificates
from gossamer.wan.trust.certificates import Certificate, Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.guard import Guard, caller_of
from gossamer.wan.trust.terms import Party, Terms

SECRET = b"s" * 32
TERMS = Terms("run-1", SECRET, "c0ffee", "1a70")
ECHO, WATCH, TALK = "/test/Echo", "/test/Watch", "/test/Talk"


class Listed:
    """A roster."""

    def __init__(self, *sites: str) -> None:
        self.sites = set(sites)
        self.epoch = 7

    def allows(self, site: str) -> bool:
        return site in self.sites


def sites(root: Path) -> Path:
    """A CA with sites a and b, another CA with a site b, and sites whose certificates have expired or are not good yet."""
    for name in ("ours", "theirs"):
        ca.init(root / name)
    ca.issue(root / "ours", "a", ["127.0.0.1", "localhost"])
    for where, site in (("ours", "b"), ("ours", "c"), ("theirs", "a"), ("theirs", "b")):
        ca.issue(root / where, site, ["127.0.0.1"])
    with pytest.MonkeyPatch.context() as patch:
        for site, days in (("old", -400), ("young", 20)):
            patch.setattr(certificates, "now_utc", lambda days=days: datetime.now(UTC) + timedelta(days=days))
            ca.issue(root / "ours", site, ["127.0.0.1"], days=30)
    return root


def identity(made: Path, site: str, of: str = "ours") -> Identity:
    return Identity.load(made / of / "sites" / site)


def believing(monkeypatch: pytest.MonkeyPatch, made: Path, site: str, of: str = "ours") -> Identity:
    """One that `Identity.load` would refuse, as somebody else's program would use it."""
    monkeypatch.setattr(Certificate, "fault", lambda self, revocations: None)
    return identity(made, site, of)


@contextmanager
def serving(me: Identity | None, roster: Listed, terms: Terms = TERMS) -> Iterator[tuple[str, Guard]]:
    """Site a, with an echo and a stream that goes on."""
    over = threading.Event()

    def echo(request: bytes, context: Any) -> bytes:
        caller = caller_of(context)
        return b"%s %s %s" % (caller.site.encode(), caller.run.encode(), request)

    def watch(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"here"
        context.add_callback(over.set)
        over.wait(30)

    def talk(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for one in requests:
            yield caller_of(context).site.encode() + one

    guard = Guard("a", {terms.run: Party(terms, roster)}.get, me)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
        "Talk": grpc.stream_stream_rpc_method_handler(talk),
    }
    server = grpc.server(ThreadPoolExecutor(8), interceptors=[guard])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = guard.listen(server, "127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", guard
    finally:
        over.set()
        server.stop(None).wait()


def dial(address: str, me: Identity | None, *, terms: Terms = TERMS, site: str | None = "a", as_: str | None = None) -> Dial:
    return Dial(Party(terms, Listed("a", "b", "c")), as_ or (me.site if me else "b"), address, site, me)


def call(one: Dial, request: bytes = b"hi") -> bytes:
    with one.channel() as channel:
        return channel.unary_unary(ECHO)(request, timeout=10)


def unharmed(address: str, made: Path) -> None:
    assert call(dial(address, identity(made, "b"))) == b"b run-1 hi"


def fresh(tmp_path: Path) -> tuple[Path, Identity, Callable[[str], Identity]]:
    """A CA of its own, its site a, and a way to load others."""
    folder = ca.init(tmp_path / "ca")
    for site in ("a", "b", "c"):
        ca.issue(folder, site, ["127.0.0.1"])
    load = lambda site: Identity.load(folder / "sites" / site)  # noqa: E731
    return folder, load("a"), load


@contextmanager
def raw(address: str, me: Identity | None) -> Iterator[Any]:
    """A channel without Gossamer on top."""
    one = Dial(Party(TERMS, Listed("a")), me.site if me else "b", address, "a", me)
    with one._raw(grpc, ()) as channel:
        yield channel
