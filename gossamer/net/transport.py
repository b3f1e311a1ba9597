"""Bytes between the workers over gloo: posted receives, sends that never block, and one thread per outstanding operation.

How gloo behaves, and what follows from it here:

- a send is a rendezvous, even for 100 bytes, and aliases its buffer: tensor and work are held until the send is done;
- `is_completed()` never turns true by polling: each outstanding operation has a thread in `wait()`, which stamps the arrival;
- a receive that times out closes all connections of the group: no wait ever has a time-out (`hang_up` uses this on purpose, at the end);
- messages of one tag between one pair are matched in the order posted and sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.net.board import Board, Crew
from gossamer.worker.effects import Addr

FOREVER = timedelta(days=3650)
"""The time-out of the process groups: none. A peer's death closes its connection, which is noticed at once."""

c10d: Any = dist
"""torch.distributed, whose stubs leave out stores and gloo."""


class Store(Protocol):
    """Of a c10d store, what is used here."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """Its value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""


class Wire(Protocol):
    """Of a c10d process group, what is used here."""

    def rank(self) -> int:
        """This worker."""

    def size(self) -> int:
        """Workers."""

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Starts a send."""

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Starts a receive."""


def connect(store: Store, me: Addr, n: int, *, local: bool) -> Wire:
    """A gloo group with a connection between every two workers, apart from torch's default group (which may be the user's own).

    `local` keeps it to the loopback interface. Otherwise gloo takes the interface of GLOO_SOCKET_IFNAME, or that of the host's name.
    """
    if not local:
        wire: Wire = c10d.ProcessGroupGloo(store, me, n, FOREVER)
        return wire
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = FOREVER
    wire = c10d.ProcessGroupGloo(store, me, n, options)
    return wire


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
    """Receives and sends of one gloo group."""

    def __init__(self, group: Wire, board: Board) -> None:
        self.board = board
        self.me: Addr = group.rank()
        self.others = tuple(j for j in range(group.size()) if j != self.me)
        self.sent = dict.fromkeys(self.others, 0)
        """Messages handed over, by receiver."""
        self.posted = dict.fromkeys(self.others, 0)
        """Receives posted, by sender."""
        self.received = dict.fromkeys(self.others, 0)
        """Messages that have arrived, by sender."""
        self.sending = dict.fromkeys(self.others, 0)
        """Messages handed over that have not left, by receiver. One that was handed over as its receiver died may stay for ever: gloo can
        lose it then."""
        self._group = group
        self._crew = Crew()

    def receive(self, src: Addr, tag: int, nbytes: int, read: Callable[[Tensor], Any]) -> Receipt:
        """Posts a receive of exactly `nbytes` (> 0). `read` runs in the receive's thread, so that checks overlap with computing."""
        receipt, buffer = Receipt(src), torch.empty(nbytes, dtype=torch.uint8)
        self.posted[src] += 1
        try:
            work = self._group.recv([buffer], src, tag)
        except RuntimeError as error:
            receipt.lost = True
            self.board.suspect(src, first_line(error))
            return receipt

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                with self.board.changed:
                    receipt.lost = True
                    self.board.changed.notify_all()
                self.board.suspect(src, first_line(error))
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
            work = self._group.send([data], dst, tag)
        except RuntimeError as error:
            with self.board.changed:
                self.sending[dst] -= 1
            self.board.suspect(dst, first_line(error))
            return

        def finish(data: Tensor = data) -> None:
            try:
                work.wait()
            except RuntimeError as error:
                self.board.suspect(dst, first_line(error))
            with self.board.changed:
                self.sending[dst] -= 1
                self.board.changed.notify_all()

        self._crew.do(finish)

    def hang_up(self, timeout_s: float = 2.0) -> None:
        """Closes all connections, whatever is still on its way, and lets the threads end.

        A thread that is still inside gloo when Python shuts down aborts the process, so none may be left. Nothing in gloo cancels an
        operation; a time-out does.
        """
        close_connections(self._group, self.others)
        self._crew.dismiss(timeout_s)


def close_connections(group: Wire, others: tuple[Addr, ...]) -> None:
    """Closes all connections of a group, so that every operation on it ends, by a time-out."""
    for j in others:  # a connection that is closed already refuses at once; the first that is open closes all others
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], j, 2**31 - 1).wait(timedelta(milliseconds=1))


def first_line(error: BaseException) -> str:
    """gloo's words without its source position and its advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if text.startswith("["):
        text = text.split("] ", 1)[-1]
    return text.split(". This is typically", 1)[0]
