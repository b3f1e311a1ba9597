"""Rubbish from strangers, bounds, and the same trust with grpc.aio."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trust_toys import ECHO, TALK, TERMS, WATCH, Listed, dial, fresh, identity, raw, serving, sites, unharmed

from gossamer.wan.trust import ca, gate
from gossamer.wan.trust import greeting as G
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.gate import Seen
from gossamer.wan.trust.guard import AioGuard, caller_of
from gossamer.wan.trust.terms import Distrusted, Party


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


@pytest.mark.parametrize(
    "metadata, words",
    [
        ((), "a call without a session"),
        (((G.CALL_KEY, b""),), "expected once, 56 bytes"),
        (((G.CALL_KEY, b"\xff" * 55),), "expected once, 56 bytes"),
        (((G.CALL_KEY, b"\xff" * 7000),), "expected once, 56 bytes"),
        (((G.CALL_KEY, bytes(56)),), "no such session"),
        (((G.CALL_KEY, os.urandom(56)), (G.CALL_KEY, os.urandom(56))), "expected once, 56 bytes"),
        ((("gossamer-call", "abc"), ("x" * 200, "y")), "a call without a session"),
    ],
)
def test_rubbish_in_the_metadata(made: Path, metadata: Any, words: str) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, guard):
        with raw(address, identity(made, "b")) as channel:
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match=words):
                    channel.unary_unary(ECHO)(b"x", metadata=metadata, timeout=10)
                with pytest.raises(grpc.RpcError, match=words):
                    next(channel.unary_stream(WATCH)(b"x", metadata=metadata, timeout=10))
        assert not guard._open
        unharmed(address, made)


@pytest.mark.parametrize(
    "hello",
    [b"", b"x", bytes(32), bytes(32) + b"{}", bytes(32) + b"[" * 3000, bytes(32) + b'{"protocol": 1}', bytes(1 << 20), os.urandom(900)],
)
def test_rubbish_as_a_greeting(made: Path, hello: bytes) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, guard):
        with raw(address, identity(made, "b")) as channel, pytest.raises(grpc.RpcError, match="a greeting") as caught:
            channel.unary_unary(G.HELLO)(hello, timeout=10)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not guard._sessions
        unharmed(address, made)


GATE = gate.Gate("a", {TERMS.run: Party(TERMS, Listed("b"))}.get, None)
HERE = Seen("ipv4:127.0.0.1:5", None)


@given(st.binary(max_size=300), st.integers(0, 500), st.integers(0, 255))
def test_no_greeting_but_the_right_one_is_answered(junk: bytes, at: int, byte: int) -> None:
    hello, _ = dial("127.0.0.1:1", None)._hello()
    at %= len(hello)
    changed = hello[:at] + bytes([byte]) + hello[at + 1 :]
    for wrong in {junk, changed, hello[:at], hello + junk} - {hello}:
        with pytest.raises(Distrusted):
            GATE.hello(wrong, HERE)


@given(st.lists(st.tuples(st.sampled_from([G.CALL_KEY, "x"]), st.one_of(st.binary(max_size=80), st.text("abc", max_size=20))), max_size=3))
def test_no_call_but_the_right_one_is_admitted(metadata: list[tuple[str, Any]]) -> None:
    with pytest.raises(Distrusted):
        GATE.admit(ECHO, metadata, HERE, lambda error: None)


@given(st.lists(st.integers(0, 3 * G.WINDOW), max_size=60))
def test_each_counter_once(counters: list[int]) -> None:
    window, taken, top = G.Window(), set[int](), 0
    for k in counters:
        want = k >= 1 and k not in taken and k > top - G.WINDOW
        assert window.take(k) == want
        if want:
            taken.add(k)
            top = max(top, k)


def test_memory_is_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = type("Everybody", (), {"epoch": 1, "allows": lambda self, site: True})()
    one = gate.Gate("a", {TERMS.run: Party(TERMS, everybody)}.get, None)
    monkeypatch.setattr(gate, "MAX_SESSIONS", 100)
    for k in range(160):
        hello, _ = dial("127.0.0.1:1", None, as_=f"site-{k % 3 if k < 80 else k}")._hello()
        one.hello(hello, HERE)
        each = [s.site for s in one._sessions.values()]
        assert len(each) <= 100 and max(map(each.count, each)) <= gate.MAX_SESSIONS_EACH
    monkeypatch.setattr(gate, "MAX_LOGGED", 20)
    for k in range(60):
        with pytest.raises(Distrusted):
            one.hello(b"", Seen(f"ipv4:127.0.1.{k}:5", None))
    assert len(one._logged) == 20
    assert sum("refused" in r.message for r in caplog.records) == 20 and "further refusals are not logged" in caplog.records[-1].message


# ---- grpc.aio


@asynccontextmanager
async def aio_serving(me: Identity | None, roster: Listed) -> Any:
    async def echo(request: bytes, context: Any) -> bytes:
        return caller_of(context).site.encode() + request

    async def watch(request: bytes, context: Any) -> Any:
        yield b"here"
        await asyncio.sleep(30)

    async def talk(request: Any, context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            await context.write(caller_of(context).site.encode() + data)

    guard = AioGuard("a", {TERMS.run: Party(TERMS, roster)}.get, me)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
        "Talk": grpc.stream_stream_rpc_method_handler(talk),
    }
    server = grpc.aio.server(interceptors=[guard])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = guard.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", guard
    finally:
        await server.stop(None)


@pytest.mark.parametrize("tls", [True, False])
def test_the_same_with_grpc_aio(made: Path, tls: bool) -> None:
    a, b = (identity(made, "a"), identity(made, "b")) if tls else (None, None)
    roster = Listed("b")

    async def scene() -> None:
        async with aio_serving(a, roster) as (address, guard):
            one = dial(address, b)
            assert await one.aio_open() == "a"
            channel = one.aio_channel()
            echo = channel.unary_unary(ECHO)
            assert await asyncio.gather(*(echo(b"%d" % k, timeout=10) for k in range(50))) == [b"b%d" % k for k in range(50)]
            talk = channel.stream_stream(TALK)()
            for word in (b"1", b"2"):
                await talk.write(word)
                assert await talk.read() == b"b" + word
            await talk.done_writing()
            assert await talk.read() is grpc.aio.EOF
            guard._sessions.clear()
            assert await echo(b"", timeout=10) == b"b"  # in a new session
            watch = channel.unary_stream(WATCH)(b"")
            assert await watch.read() == b"here"
            talk = channel.stream_stream(TALK)()
            await talk.write(b"3")
            assert await talk.read() == b"b3"
            roster.sites.clear()
            guard.sweep()
            for stream in (watch, talk):
                with pytest.raises(Distrusted, match="not in the roster"):
                    await stream.read()
            while guard._open:
                await asyncio.sleep(0.01)
            with pytest.raises(Distrusted, match="not in the roster"):
                await echo(b"", timeout=10)
            refused = channel.stream_stream(TALK)()
            with pytest.raises(Distrusted, match="not in the roster"):
                await refused.read()
            roster.sites.add("b")
            again = channel.stream_stream(TALK)()
            await again.write(b"4")
            assert await again.read() == b"b4"
            again.cancel()
            wrong = dial(address, b, terms=replace(TERMS, layout="0"))
            with pytest.raises(Distrusted, match="parameter layout"):
                await wrong.aio_open()
            early = wrong.aio_channel().stream_stream(TALK)()
            with pytest.raises(Distrusted, match="parameter layout"):
                await early.write(b"")
            await channel.close()

    asyncio.run(scene())


def test_certificates_with_grpc_aio(made: Path, tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)

    async def scene() -> None:
        async with aio_serving(a, Listed("b", "c")) as (address, guard):
            with pytest.raises(Distrusted, match="is not of this project's CA"):
                await dial(address, identity(made, "b")).aio_open()
            one = dial(address, load("b")).aio_channel()
            stream = one.stream_stream(TALK)()
            await stream.write(b"1")
            assert await stream.read() == b"b1"
            ca.revoke(folder, "b")
            shutil.copy2(folder / "revoked.pem", a.folder / "revoked.pem")
            guard.sweep()
            with pytest.raises(Distrusted, match="was revoked on"):
                await stream.read()
            with pytest.raises(Distrusted, match="was revoked on"):
                await one.unary_unary(ECHO)(b"", timeout=10)
            assert await dial(address, load("c")).aio_channel().unary_unary(ECHO)(b"", timeout=10) == b"c"
            await one.close()

    asyncio.run(scene())


def test_only_greetings_are_signed(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls cost hashes alone."""
    signed = []
    sign = Identity.sign
    monkeypatch.setattr(Identity, "sign", lambda self, message: signed.append(message) or sign(self, message))
    with serving(identity(made, "a"), Listed("b")) as (address, guard):
        one = dial(address, identity(made, "b"))
        with one.channel() as first, one.channel((("x", 1),)) as second:
            for channel in (first, second) * 5:
                assert channel.unary_unary(ECHO)(b"", timeout=10) == b"b run-1 "
        assert len(signed) == len(guard._sessions) == 1
