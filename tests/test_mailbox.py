"""What servers take in: order of arrival, the dead, and what is no message of a client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gossamer.core.errors import RunFailed
from gossamer.real.board import Board
from gossamer.real.mailbox import Mailbox, post
from gossamer.real.transport import Receipt
from gossamer.worker.effects import RecvAny
from gossamer.worker.packet import DONE, HEADER_BYTES, Header, Packet, blank, seal
from gossamer.worker.server import TO_SERVER


class Wireless:
    """A transport whose messages the test delivers."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, int, Receipt, torch.Tensor, Callable[[torch.Tensor], Any]]] = []
        self.handed: list[tuple[int, int, int]] = []

    def receive(self, src: int, tag: int, nbytes: int, read: Callable[[torch.Tensor], Any], into: torch.Tensor) -> Receipt:
        assert nbytes == into.numel()
        receipt = Receipt(src)
        self.posted.append((src, tag, receipt, into, read))
        return receipt

    def send(self, dst: int, tag: int, data: torch.Tensor) -> None:
        self.handed.append((dst, tag, data.numel()))

    def deliver(self, src: int, packet: Packet, at_s: float) -> None:
        """As sent: header, then payload."""
        assert packet.data is not None
        pieces = [(TO_SERVER, packet.data[:HEADER_BYTES])]
        pieces += [(TO_SERVER + 1, packet.data[HEADER_BYTES:])] if packet.nbytes > HEADER_BYTES else []
        for tag, data in pieces:
            entry = next(e for e in self.posted if e[0] == src and e[1] == tag)
            self.posted.remove(entry)
            _, _, receipt, into, read = entry
            assert into.numel() == data.numel() or tag == TO_SERVER
            into.copy_(data)
            try:
                receipt.value = read(into)
            except RunFailed as error:
                receipt.error = error
            receipt.at_s, receipt.done = at_s, True


def letter(sender: int, round: int, nbytes: int = 100, mark: int = 0) -> Packet:
    data = blank(nbytes)
    data[HEADER_BYTES:] = sender + 10 * round
    return seal(data, Header(1, round, sender, 5, 0, 1, 0, 0, 10, mark))


def posted_for(box: Mailbox, ask: RecvAny, board: Board) -> None:
    """Receives are posted, and nothing has come."""
    board.fail(RunFailed("awake"))
    with pytest.raises(RunFailed, match="awake"):
        box.first(ask)
    board.failure = None


def test_the_first_to_have_come_whole_is_heard_first_and_each_in_the_order_sent() -> None:
    wire, board = Wireless(), Board(survives=True)
    box, ask = Mailbox(wire, board), RecvAny(TO_SERVER, (0, 1, 2), HEADER_BYTES + 100)  # type: ignore[arg-type]
    posted_for(box, ask, board)
    wire.deliver(1, letter(1, 0), 5.0)
    wire.deliver(2, letter(2, 0), 5.0)
    wire.deliver(0, letter(0, 0), 7.0)
    heard = [box.first(ask)]
    wire.deliver(1, letter(1, 1), 6.0)
    heard += [box.first(ask)]
    wire.deliver(2, letter(2, 1, 0, DONE), 8.0)
    heard += [box.first(ask) for _ in range(2)]
    assert [(src, p.header.round) for src, p in heard if p] == [(1, 0), (2, 0), (1, 1), (0, 0)]
    heard = [box.first(ask)]
    assert [(src, p.header.flags, p.nbytes) for src, p in heard if p] == [(2, DONE, HEADER_BYTES)]
    wire.deliver(2, letter(2, 2), 9.0)  # after a header alone, room is still there
    src, packet = box.first(ask)
    assert src == 2 and packet and bool((packet.payload == 22).all())


def test_of_the_dead_all_that_came_is_taken_and_then_they_are_named() -> None:
    wire, board = Wireless(), Board(survives=True)
    box, ask = Mailbox(wire, board), RecvAny(TO_SERVER, (0, 1), HEADER_BYTES + 100)  # type: ignore[arg-type]
    posted_for(box, ask, board)
    wire.deliver(0, letter(0, 0), 1.0)
    board.dead[0] = "it failed"
    assert box.first(ask)[1] is not None
    for src, _, receipt, *_ in wire.posted:
        receipt.lost = src == 0
    assert box.first(ask) == (0, None)


@pytest.mark.parametrize("wrong", ["size", "magic", "damage"])
def test_what_is_no_message_of_a_client_is_refused(wrong: str) -> None:
    wire, board = Wireless(), Board(survives=True)
    box, ask = Mailbox(wire, board), RecvAny(TO_SERVER, (0,), HEADER_BYTES + 100)  # type: ignore[arg-type]
    posted_for(box, ask, board)
    packet = letter(0, 0, 100)
    assert packet.data is not None
    said = "was damaged"
    if wrong == "size":
        other = letter(0, 0, 99).data
        assert other is not None
        packet.data[:HEADER_BYTES] = other[:HEADER_BYTES]
        said = "declares a payload of 99 bytes, expected none or 100"
    elif wrong == "magic":
        packet.data[0] = 1
        said = "not a Gossamer worker"
    else:
        packet.data[-1] += 1
    wire.deliver(0, packet, 1.0)
    with pytest.raises(RunFailed, match=said):
        box.first(ask)


def test_a_server_that_names_nobody_is_refused_and_a_packet_goes_in_two() -> None:
    wire = Wireless()
    with pytest.raises(RunFailed, match="it has to say whose"):
        Mailbox(wire, Board()).first(RecvAny(TO_SERVER))  # type: ignore[arg-type]
    for packet in (letter(0, 0), letter(0, 1, 0, DONE)):
        assert packet.data is not None
        post(wire, 3, TO_SERVER, packet.data)  # type: ignore[arg-type]
    assert [n for _, _, n in wire.handed] == [HEADER_BYTES, 100, HEADER_BYTES]
