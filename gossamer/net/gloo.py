"""Bytes between the workers over gloo, torch.distributed's library for CPUs.

How gloo behaves, and what follows from it here:

- a send is a rendezvous, even for 100 bytes, and aliases its buffer: tensor and work are held until the send is done;
- `is_completed()` never turns true by polling: each outstanding operation has a thread in `wait()`, which stamps the arrival;
- a receive that times out closes all connections of the group: no wait ever has a time-out (`GlooWire.close` uses this on purpose);
- messages of one tag between one pair are matched in the order posted and sent;
- a message longer than the receive posted for it aborts the process: sizes are compared before anything is sent.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.real.wire import LinkDown, Store
from gossamer.worker.effects import Addr

FOREVER = timedelta(days=3650)
"""The time-out of the process groups: none. A peer's death closes its connection, which is noticed at once."""

c10d: Any = dist
"""torch.distributed, whose stubs leave out stores and gloo."""


class GlooWork:
    """One gloo operation."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkDown(first_line(error)) from None


class GlooWire:
    """A gloo group with a connection between every two workers, apart from torch's default group (which may be the user's own).

    Args:
        local: keep to the loopback interface. Otherwise gloo takes the interface of GLOO_SOCKET_IFNAME, or that of the host's name.
    """

    def __init__(self, store: Store, me: Addr, n: int, *, local: bool) -> None:
        if not local:
            self._group = c10d.ProcessGroupGloo(store, me, n, FOREVER)
            return
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = FOREVER
        self._group = c10d.ProcessGroupGloo(store, me, n, options)

    def rank(self) -> Addr:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def send(self, tensor: Tensor, dst: Addr, tag: int) -> GlooWork:
        try:
            return GlooWork(self._group.send([tensor], dst, tag))
        except RuntimeError as error:
            raise LinkDown(first_line(error)) from None

    def recv(self, tensor: Tensor, src: Addr, tag: int) -> GlooWork:
        try:
            return GlooWork(self._group.recv([tensor], src, tag))
        except RuntimeError as error:
            raise LinkDown(first_line(error)) from None

    def close(self) -> None:
        """By a time-out, which is all that ends an operation of gloo. A thread that is still inside gloo when Python shuts down aborts the
        process, so none may be left."""
        for j in range(self.size()):  # a connection that is closed already refuses at once; the first that is open closes all others
            if j != self.rank():
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], j, 2**31 - 1).wait(timedelta(milliseconds=1))


def first_line(error: BaseException) -> str:
    """gloo's words without its source position and its advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if text.startswith("["):
        text = text.split("] ", 1)[-1]
    return text.split(". This is typically", 1)[0]
