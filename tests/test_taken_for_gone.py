"""Where one connection breaks, and both that it joined live on: nobody waits for somebody who takes it for gone."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from coordinator_toys import eventually
from torch import Tensor

from gossamer.core.errors import RunFailed
from gossamer.real.board import Board
from gossamer.real.notes import _DEAD, _LOST, _NOT_AGREED, _NOTE, _VIEW, Notes
from gossamer.real.wire import LinkDown


class Done:
    def wait(self) -> None: ...


class Coming:
    """A receive: done when there is something."""

    def __init__(self, buffer: Tensor, queue: SimpleQueue[bytes | None]) -> None:
        self._buffer, self._queue = buffer, queue

    def wait(self) -> None:
        if (data := self._queue.get()) is None:
            raise LinkDown("closed")
        self._buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class Toy:
    """The wire of worker 1 of four, whose others are the test."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, tuple[int, ...]]] = []
        self.coming: dict[int, SimpleQueue[bytes | None]] = {j: SimpleQueue() for j in (0, 2, 3)}

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4

    def send(self, data: Tensor, dst: int, tag: int) -> Done:
        self.sent.append((dst, _NOTE.unpack(data.numpy().tobytes())))
        return Done()

    def recv(self, buffer: Tensor, src: int, tag: int) -> Coming:
        return Coming(buffer, self.coming[src])

    def says(self, src: int, kind: int, a: int = 0, b: int = 0) -> None:
        self.coming[src].put(_NOTE.pack(kind, 0, a, b))

    def told_lost(self) -> list[tuple[int, int]]:
        """(whom, who is lost) of the notes of that kind."""
        return [(dst, a) for dst, (kind, _, a, _) in self.sent if kind == _LOST]

    def close(self) -> None:
        for queue in self.coming.values():
            queue.put(None)


def made() -> tuple[Toy, Board, Notes]:
    wire: Any = Toy()
    board = Board(survives=True, me=1)
    return wire, board, Notes(wire, board)


@pytest.mark.parametrize("how", ["a view", "a loss"])
def test_who_is_said_to_be_dead_is_told(how: str) -> None:
    wire, board, notes = made()
    if how == "a view":
        wire.says(0, _DEAD, 2, _NOT_AGREED)
        wire.says(0, _VIEW, 1, 1)
    else:
        wire.says(0, _LOST, 2)
    eventually(lambda: 2 in board.dead, "it is dead here, too")
    assert wire.told_lost() == [(2, 2)], "it may be alive, and wait"
    wire.says(3, _LOST, 2)
    wire.says(3, _LOST, 0)
    eventually(lambda: 0 in board.dead, "and another")
    assert wire.told_lost() == [(2, 2), (0, 0)], "each once"
    notes.hang_up()


def test_who_says_that_it_fails_itself_is_told_nothing() -> None:
    wire, board, notes = made()
    wire.says(0, _LOST, 0)
    eventually(lambda: 0 in board.dead, "it is dead")
    assert wire.told_lost() == []
    notes.hang_up()


def test_who_is_told_ends_what_it_waits_for() -> None:
    wire, board, notes = made()
    wire.says(3, _LOST, 1)
    with pytest.raises(RunFailed, match="worker 3 has lost the connection to this one"):
        board.wait(lambda: False, timeout_s=30.0)
    notes.hang_up()
