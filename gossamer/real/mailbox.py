"""What servers take in: whatever message comes first, from any of those that they serve.

A wire takes receives of an exact size from one sender, and a packet to a server is a header alone (its client is done) or a header and all
parameters. So it travels in two messages, the header and the payload, in the same bytes, and a server has a receive of each posted from
every client at all times: nothing waits for a size to be known, and nothing is received that was not posted. Which of the clients is
heard next is decided by when the last byte has come; at one moment, by the lower number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.core.errors import RunFailed
from gossamer.real.board import Board
from gossamer.real.transport import Receipt, Transport
from gossamer.worker.effects import Addr, RecvAny
from gossamer.worker.packet import HEADER_BYTES, Packet, payload_bytes, unseal

_PAYLOAD = 6  # the kind of the second message: no program's


def post(transport: Transport, dst: Addr, tag: int, data: Tensor) -> None:
    """Hands a packet over to a server, without waiting (see Transport.send)."""
    transport.send(dst, tag, data[:HEADER_BYTES])
    if data.numel() > HEADER_BYTES:
        transport.send(dst, _payload_of(tag), data[HEADER_BYTES:])


def _payload_of(tag: int) -> int:
    return tag - tag % 8 + _PAYLOAD


class Mailbox:
    """The mail of one server."""

    def __init__(self, transport: Transport, board: Board) -> None:
        self._transport, self._board = transport, board
        self._letters: dict[tuple[int, Addr], _Letter] = {}

    def first(self, effect: RecvAny) -> tuple[Addr, Packet | None]:
        """Waits for the next message from any of `effect.frm`; None in place of one: that sender is dead, and all it sent has been taken.

        Raises:
            RunFailed: a message of another size than expected, or none can come: nobody is named.
        """
        if not effect.frm or effect.nbytes <= HEADER_BYTES:
            raise RunFailed(
                f"a server asks for any message of {effect.nbytes} bytes from {list(effect.frm)}: it has to say whose, how long"
            )
        for j in effect.frm:
            if (effect.tag, j) not in self._letters:
                self._letters[effect.tag, j] = _Letter(self._transport, j, effect.tag, torch.empty(effect.nbytes, dtype=torch.uint8))
        letters = {j: self._letters[effect.tag, j] for j in effect.frm}
        found: list[Addr] = []

        def next_one() -> bool:
            whole = [(letter.at_s, j) for j, letter in letters.items() if letter.whole]
            gone = [j for j, letter in letters.items() if j in self._board.dead and letter.lost]
            found[:] = [min(whole)[1]] if whole else sorted(gone)
            return bool(found)

        self._board.wait(next_one)
        src = found[0]
        return src, letters[src].take() if letters[src].whole else None


class _Letter:
    """The next message of one sender, and room for it."""

    def __init__(self, transport: Transport, src: Addr, tag: int, room: Tensor) -> None:
        self._transport, self._src, self._tag = transport, src, tag
        self._receive_all(room)

    def _receive_all(self, room: Tensor) -> None:
        self._room = room
        self._receive_head()
        self._body = self._receive(_payload_of(self._tag), room[HEADER_BYTES:])

    def _receive_head(self) -> None:
        self._head = self._receive(self._tag, self._room[:HEADER_BYTES])

    def _receive(self, tag: int, into: Tensor) -> Receipt:
        return self._transport.receive(self._src, tag, into.numel(), payload_bytes if tag == self._tag else _nothing, into)

    @property
    def whole(self) -> bool:
        """Whether it has come, or is wrong."""
        return self._head.done and (self._body.done or self._head.error is not None or not self._head.value)

    @property
    def lost(self) -> bool:
        """Whether it will never come whole."""
        return self._head.lost or (not self.whole and self._body.lost)

    @property
    def at_s(self) -> float:
        """When its last byte had come."""
        return max(self._head.at_s, self._body.at_s if self._body.done and self._head.value else 0.0)

    def take(self) -> Packet:
        """The packet; room is made for the next one.

        Raises:
            RunFailed: it is none, or of a size that was not expected.
        """
        if self._head.error is not None:
            raise self._head.error
        room, nbytes = self._room, self._head.value
        if not nbytes:
            packet = unseal(room[:HEADER_BYTES].clone())
            self._receive_head()
            return packet
        if nbytes != room.numel() - HEADER_BYTES:
            raise RunFailed(
                f"a packet to a server from seat {self._src} declares a payload of {nbytes} bytes, expected none or "
                f"{room.numel() - HEADER_BYTES}: all must run one configuration and one release"
            )
        self._receive_all(torch.empty_like(room))
        return unseal(room)


def _nothing(data: Tensor) -> None:
    """A payload is read when it is taken."""
