"""Tasks of the event loop that nobody waits for: none fails without anybody being told."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from coordinator_toys import eventually

from gossamer.wan.deadlines import Timeouts
from gossamer.wan.loop import in_loop, io_loop, spawn
from gossamer.wan.neighbours import Neighbours, Ping
from gossamer.wan.roster.records import Card, Member, Roster
from gossamer.wan.state_service import NotBrought, StateAsk, StateOffer, fetch
from gossamer.wan.trust.terms import Distrusted


def test_a_task_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("why")

    async def begin() -> None:
        await asyncio.wait([spawn(fails(), "to do something")])

    in_loop(begin(), 10)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, "to do something has failed: why")]


@contextmanager
def nothing_unretrieved() -> Iterator[None]:
    """No task of the event loop fails without anybody being told."""
    found: list[dict[str, Any]] = []
    io_loop().call_soon_threadsafe(io_loop().set_exception_handler, lambda loop, context: found.append(context))
    try:
        yield
        gc.collect()
        in_loop(asyncio.sleep(0), 10)
    finally:
        io_loop().call_soon_threadsafe(io_loop().set_exception_handler, None)
    assert not found, found


def test_a_neighbour_is_looked_after_through_whatever_grpc_raises() -> None:
    other = Member(site="b", seat=1, boot=f"{2:032x}", card=Card(address="127.0.0.1:1"))
    roster = Roster(run="r", revision=1, epoch=1, generation=0, members=(other,), session=None)
    answers: list[Any] = [grpc.aio.UsageError("Channel is closed."), ValueError("Cannot invoke RPC on closed channel!"), ConnectionError()]
    pong = Ping(site="b", boot=other.boot).model_dump_json().encode()

    async def ping(data: bytes, timeout: float) -> bytes:
        if answers:
            raise answers.pop(0)
        return pong

    async def close() -> None: ...

    channel = SimpleNamespace(unary_unary=lambda method: ping, close=close)
    doors: Any = SimpleNamespace(sweep=lambda: None, channel=lambda *args: channel)
    with nothing_unretrieved():
        neighbours = Neighbours("a", doors, lambda: roster)
        neighbours.begin(f"{1:032x}", Timeouts.of(30.0))
        eventually(lambda: neighbours.alive() == {1}, "it answers in the end")
        task = neighbours._known[1].task
        neighbours.close()
        assert task is not None and task.done()


def test_a_transfer_whose_pieces_all_fail_fails_once_and_at_once(tmp_path: Path) -> None:
    offer = StateOffer(session=1, round=3, size=20 << 20, sha256="ab" * 32)

    async def offered(data: bytes, timeout: float) -> bytes:
        return offer.model_dump_json().encode()

    async def refused(data: bytes, timeout: float) -> bytes:
        raise Distrusted("revoked", "the certificate of site b was revoked on a day")

    channel = SimpleNamespace(unary_unary=lambda method: offered if method.endswith("Offer") else refused)
    with nothing_unretrieved(), pytest.raises(NotBrought, match="was revoked on a day"):
        in_loop(fetch(channel, StateAsk(session=1, inner=False), tmp_path / "state", 600.0), 30)
