"""The state of a run on its way from site to site: pieces, breaks, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from gossamer.core.errors import RunFailed
from gossamer.wan import state_service
from gossamer.wan.state_service import NotBrought, PieceAsk, StateAsk, StateOffer, StateServer, fetch

PIECES = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_service, "PIECE_BYTES", 1000)
    monkeypatch.setattr(state_service, "_PAUSE_S", 0.01)


class Donor:
    """A donor whose connection breaks after so many pieces."""

    def __init__(self, folder: Path, data: bytes) -> None:
        self.path, self.data, self.made, self.given = folder / "given", data, 0, 0
        self.server = StateServer(self._make)
        self.holds = 5
        self.breaks_after: int | None = None
        self.spoils = False
        self.port = 0

    def _make(self, ask: StateAsk) -> tuple[int, Path] | None:
        if ask.session != self.holds:
            return None
        self.made += 1
        self.path.write_bytes(self.data)
        return 7, self.path

    async def piece(self, data: bytes, context: Any) -> bytes:
        if self.breaks_after is not None and self.given >= self.breaks_after:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
        self.given += 1
        found = await self.server._piece(data, context)
        return found[:-1] + b"!" if self.spoils else found

    async def __aenter__(self) -> Any:
        one = {
            "Offer": grpc.unary_unary_rpc_method_handler(self.server._offer),
            "Piece": grpc.unary_unary_rpc_method_handler(self.piece),
        }
        self._grpc = grpc.aio.server()
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(state_service.SERVICE, one),))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")
        await self._grpc.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return self._channel

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._grpc.stop(None)


def with_donor(donor: Donor, test: Callable[[Any], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with donor as channel:
            await test(channel)

    asyncio.run(whole())


def data_of(pieces: int) -> bytes:
    return b"".join(hashlib.sha256(bytes([i])).digest() * 40 for i in range(pieces))[: pieces * 1000 - 123]


def test_a_transfer_that_breaks_midway_goes_on_where_it_was(tmp_path: Path) -> None:
    donor, path = Donor(tmp_path, data_of(PIECES)), tmp_path / "taken" / "worker-0.safetensors"
    ask = StateAsk(session=5, inner=False)

    async def test(channel: Any) -> None:
        donor.breaks_after = 7
        with pytest.raises(NotBrought, match="the line broke"):
            await fetch(channel, ask, path, 2.0)
        (part,) = path.parent.iterdir()
        kept = part.stat().st_size // 1000
        assert 1 <= kept <= 7 and not path.exists(), "nothing stands for the state before all of it is there"
        donor.breaks_after, donor.given = None, 0
        offer = await fetch(channel, ask, path, 30.0)
        assert path.read_bytes() == donor.data and donor.given == PIECES - kept and (offer.round, donor.made) == (7, 1)
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    with_donor(donor, test)


def test_a_break_within_the_time_is_nobodys_business(tmp_path: Path) -> None:
    donor, path = Donor(tmp_path, data_of(PIECES)), tmp_path / "state"

    async def test(channel: Any) -> None:
        donor.breaks_after = 3

        async def mend() -> None:
            await asyncio.sleep(0.2)
            donor.breaks_after = None

        await asyncio.gather(fetch(channel, StateAsk(session=5, inner=True), path, 30.0), mend())
        assert path.read_bytes() == donor.data

    with_donor(donor, test)


def test_what_is_not_as_it_was_offered_is_not_taken(tmp_path: Path) -> None:
    donor, path = Donor(tmp_path, data_of(3)), tmp_path / "state"

    async def test(channel: Any) -> None:
        donor.spoils = True
        with pytest.raises(NotBrought, match="damaged"):
            await fetch(channel, StateAsk(session=5, inner=False), path, 5.0)
        donor.spoils = False
        offer = await fetch(channel, StateAsk(session=5, inner=False), path, 5.0)
        part = path.with_name(f"{offer.sha256[:32]}.part")
        part.write_bytes(b"x" * 1000)  # of another file, by this name
        with pytest.raises(NotBrought, match="sha256 differs"):
            await fetch(channel, StateAsk(session=5, inner=False), path, 5.0)
        assert not part.exists()
        with pytest.raises(NotBrought, match="session 6 is not here"):
            await fetch(channel, StateAsk(session=6, inner=False), path, 2.0)
        donor.server.forget()
        call = channel.unary_unary(f"/{state_service.SERVICE}/Piece")
        with pytest.raises(grpc.RpcError, match="no such piece"):
            await call(PieceAsk(sha256=offer.sha256, offset=0).model_dump_json().encode())
        for rubbish in (b"", b"\x00" * 100, b'{"session": -1}', b'{"sha256": "../../etc/passwd", "offset": 0}'):
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                await call(rubbish)

    with_donor(donor, test)


def test_no_room_on_either_side_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    donor = Donor(tmp_path, data_of(3))

    async def test(channel: Any) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(RunFailed, match="free some space") as found:
            await fetch(channel, StateAsk(session=5, inner=False), tmp_path / "file" / "state", 5.0)
        assert not isinstance(found.value, NotBrought), "this site cannot go on"

        def full(ask: StateAsk) -> tuple[int, Path]:
            raise RunFailed("the checkpoint cannot be written (No space left on device)")

        donor.server.forget()
        monkeypatch.setattr(donor.server, "_make", full)
        with pytest.raises(NotBrought, match="No space left"):
            await fetch(channel, StateAsk(session=5, inner=False), tmp_path / "state", 0.2)

    with_donor(donor, test)


def test_an_offer_of_another_session_is_refused(tmp_path: Path) -> None:
    async def test(channel: Any) -> None:
        with pytest.raises(NotBrought, match="offers the state of session 4"):
            await fetch(channel, StateAsk(session=5, inner=False), tmp_path / "state", 5.0)

    donor = Donor(tmp_path, b"x")
    offer = StateOffer(session=4, round=0, size=1, sha256="0" * 64)
    donor.server._offers[5, False] = (offer, tmp_path / "nothing")
    with_donor(donor, test)
