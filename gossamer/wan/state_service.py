"""The state of a run, from a site that holds it to one that needs it: a safetensors file in pieces, each with its hash, and resumable.

The donor makes the file when it is first asked. The receiver knows size and SHA-256 before the first piece, checks each piece as it comes,
and the whole at the end; after a break it goes on where it was, with the same donor or, where that has the same file, another.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import grpc
from pydantic import Field

from gossamer.core.errors import RunFailed
from gossamer.wan.roster.messages import Hash, Record, Round, unpack
from gossamer.wan.roster.records import Count

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
MAX_STATE_BYTES = 1 << 44
_AHEAD = 8
"""Pieces asked for at a time."""
_PAUSE_S, _CALL_S = 0.2, 30.0
SERVICE = "gossamer.State"
_FOR_GOOD = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)


class StateAsk(Record):
    """A member of a session asks for the state at its beginning."""

    session: Count
    inner: bool
    """With the donor's inner optimizer."""


class StateOffer(Record):
    """What there is."""

    session: Count
    round: Round
    size: Annotated[int, Field(ge=1, le=MAX_STATE_BYTES)]
    sha256: Hash


class PieceAsk(Record):
    """A piece of an offer."""

    sha256: Hash
    offset: Annotated[int, Field(ge=0, lt=MAX_STATE_BYTES)]


class NotBrought(RunFailed):
    """The state of a session did not come from its donor. Another session may do better."""


class StateServer:
    """The donor's side. `make` writes the file for a request, or returns None where this site does not hold that state (yet, any more)."""

    def __init__(self, make: Callable[[StateAsk], tuple[int, Path] | None]) -> None:
        self._make = make
        self._offers: dict[tuple[int, bool], tuple[StateOffer, Path]] = {}
        self._lock = asyncio.Lock()

    def handlers(self) -> Any:
        """For a server of grpc.aio."""
        one = {
            "Offer": grpc.unary_unary_rpc_method_handler(self._offer),
            "Piece": grpc.unary_unary_rpc_method_handler(self._piece),
        }
        return grpc.method_handlers_generic_handler(SERVICE, one)

    def forget(self) -> None:
        """The state has gone on: what was offered is offered no more."""
        offers, self._offers = self._offers, {}
        for _, path in offers.values():
            path.unlink(missing_ok=True)

    async def _offer(self, data: bytes, context: Any) -> bytes:
        try:
            ask = unpack(StateAsk, data)
        except RunFailed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        async with self._lock:
            found = self._offers.get((ask.session, ask.inner))
            if found is None:
                try:
                    made = await asyncio.to_thread(self._make, ask)
                except RunFailed as error:
                    log.warning("the state of session %d cannot be given: %s", ask.session, error)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
                    raise
                if made is None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, f"the state of session {ask.session} is not here")
                    raise AssertionError
                round, path = made
                sha = await asyncio.to_thread(_sha256, path)
                found = StateOffer(session=ask.session, round=round, size=path.stat().st_size, sha256=sha), path
                self._offers[ask.session, ask.inner] = found
        return found[0].model_dump_json().encode()

    async def _piece(self, data: bytes, context: Any) -> bytes:
        try:
            ask = unpack(PieceAsk, data)
        except RunFailed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        path = next((path for offer, path in self._offers.values() if offer.sha256 == ask.sha256), None)
        piece = b"" if path is None else await asyncio.to_thread(_read, path, ask.offset)
        if not piece:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such piece (any more)")
        return hashlib.sha256(piece).digest() + piece


async def fetch(channel: Any, ask: StateAsk, path: Path, timeout_s: float) -> StateOffer:
    """Brings the state of a donor to `path`, going on with what is there of the same file.

    Raises:
        NotBrought: it did not come in time, or not as it was offered.
        RunFailed: there is no room for it here.
    """
    until_s = time.monotonic() + timeout_s
    offer_call, piece_call = channel.unary_unary(f"/{SERVICE}/Offer"), channel.unary_unary(f"/{SERVICE}/Piece")

    async def again(call: Any, request: Record) -> bytes:
        why = "no answer"
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                return bytes(await call(request.model_dump_json().encode(), timeout=min(left_s, _CALL_S)))
            except grpc.RpcError as error:
                late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                if why == "no answer" or not late:  # the end of the time says less than what was said before
                    why = str(error.details() or error.code())
                if error.code() in _FOR_GOOD and not getattr(error, "passing", False):
                    break
            await asyncio.sleep(_PAUSE_S)
        raise NotBrought(f"the state of session {ask.session} did not come from its donor: {why}")

    offer = unpack(StateOffer, await again(offer_call, ask))
    if offer.session != ask.session:
        raise NotBrought(f"the donor offers the state of session {offer.session}, not of {ask.session}")
    part = path.with_name(f"{offer.sha256[:32]}.part")
    try:
        await _fill(part, offer, lambda offset: again(piece_call, PieceAsk(sha256=offer.sha256, offset=offset)))
        if await asyncio.to_thread(_sha256, part) != offer.sha256:
            part.unlink()
            raise NotBrought("the state that came is not the one that was offered (sha256 differs)")
        part.replace(path)
    except OSError as error:
        raise RunFailed(f"the state cannot be written to {part} ({error}): free some space or set another run folder") from error
    return offer


async def _fill(part: Path, offer: StateOffer, get: Callable[[int], Awaitable[bytes]]) -> None:
    """Adds the pieces that are not there yet."""
    part.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size // PIECE_BYTES * PIECE_BYTES if part.exists() else 0
    if not 0 <= have < offer.size:
        have = 0
    with part.open("r+b" if part.exists() else "w+b") as file:
        file.truncate(have)
        file.seek(have)
        offsets = list(range(have, offer.size, PIECE_BYTES))
        tasks: dict[int, asyncio.Task[bytes]] = {}
        try:
            for i, offset in enumerate(offsets):
                for ahead in offsets[i : i + _AHEAD]:
                    if ahead not in tasks:
                        tasks[ahead] = asyncio.ensure_future(get(ahead))
                data = await tasks.pop(offset)
                piece = data[32:]
                if len(piece) != min(PIECE_BYTES, offer.size - offset) or hashlib.sha256(piece).digest() != data[:32]:
                    raise NotBrought(f"the piece at {offset} of the state was damaged on the way, or is none")
                await asyncio.to_thread(file.write, piece)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)  # several may have failed: one is told of


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
