"""Packets over a wire: posted receives, sends that never block, and one thread per outstanding operation.

No wait has a time-out: the end of a connection ends the operations on it, and a deadline is watched beside them (`Board.wait`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.real.board import Board, Crew
from gossamer.real.wire import LinkDown, Wire
from gossamer.worker.effects import Addr


class Receipt:
    """A posted receive. `done`, `at_s` and `value` are written by its thread, under the board's condition."""

    __slots__ = ("at_s", "done", "error", "lost", "src", "value")

    def __init__(self, src: Addr) -> None:
        self.src = src
        self.done = False
        self.lost = False
        """The connection broke first: it will not come."""
        self.at_s = 0.0
        """When the last byte had arrived, by this worker's monotonic clock."""
        self.value: Any = None
        """What `read` made of the bytes."""
        self.error: Exception | None = None
        """What `read` raised instead."""


class Transport:
    """Receives and sends of one wire, to the other members."""

    def __init__(self, wire: Wire, board: Board, members: Sequence[Addr] | None = None) -> None:
        self.board = board
        self.me: Addr = wire.rank()
        self.others = tuple(j for j in (range(wire.size()) if members is None else members) if j != self.me)
        self.sent = dict.fromkeys(self.others, 0)
        """Messages handed over, by receiver."""
        self.posted = dict.fromkeys(self.others, 0)
        """Receives posted, by sender."""
        self.received = dict.fromkeys(self.others, 0)
        """Messages that have arrived, by sender."""
        self.sending = dict.fromkeys(self.others, 0)
        """Messages handed over that have not left, by receiver. One that was handed over as its receiver died may stay for ever: a wire
        can lose it then."""
        self._wire = wire
        self._crew = Crew()

    def receive(self, src: Addr, tag: int, nbytes: int, read: Callable[[Tensor], Any], into: Tensor | None = None) -> Receipt:
        """Posts a receive of exactly `nbytes` (> 0), into a tensor of that size where there is one. `read` runs in the receive's thread, so
        that checks overlap with computing."""
        receipt, buffer = Receipt(src), torch.empty(nbytes, dtype=torch.uint8) if into is None else into
        self.posted[src] += 1
        try:
            work = self._wire.recv(buffer, src, tag)
        except LinkDown as error:
            receipt.lost = True
            self.board.suspect(src, str(error))
            return receipt

        def finish() -> None:
            try:
                work.wait()
            except LinkDown as error:
                with self.board.changed:
                    receipt.lost = True
                    self.board.changed.notify_all()
                self.board.suspect(src, str(error))
                return
            at_s = time.monotonic()
            try:
                receipt.value = read(buffer)
            except Exception as error:
                receipt.error = error
            with self.board.changed:
                receipt.at_s, receipt.done = at_s, True
                self.received[src] += 1
                self.board.changed.notify_all()

        self._crew.do(finish)
        return receipt

    def send(self, dst: Addr, tag: int, data: Tensor) -> None:
        """Hands a message over, without waiting. `data` (uint8, contiguous, on the CPU) is held until it has left; do not change it."""
        with self.board.changed:
            self.sent[dst] += 1
            self.sending[dst] += 1
        try:
            work = self._wire.send(data, dst, tag)
        except LinkDown as error:
            with self.board.changed:
                self.sending[dst] -= 1
            self.board.suspect(dst, str(error))
            return

        def finish(data: Tensor = data) -> None:
            try:
                work.wait()
            except LinkDown as error:
                self.board.suspect(dst, str(error))
            with self.board.changed:
                self.sending[dst] -= 1
                self.board.changed.notify_all()

        self._crew.do(finish)

    def hang_up(self, timeout_s: float = 2.0) -> None:
        """Closes all connections, whatever is still on its way, and lets the threads end."""
        self._wire.close()
        self._crew.dismiss(timeout_s)
