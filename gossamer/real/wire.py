"""What a real world needs of a network: wires that carry bytes between the workers, and a store of short texts that all can see.

Whoever has these two has a world: `gossamer.net` over gloo, `gossamer.wan` over gRPC, your own in docs/extend.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from gossamer.worker.effects import Addr


class LinkDown(Exception):
    """The connection to the other side of an operation broke, or was closed. The text says how."""


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Waits, without a time-out, for the end of the operation. Of a receive: all bytes are in the tensor. Of a send: the receiver has
        them, or at least nothing that happens here can lose them any more.

        Raises:
            LinkDown: it will not come to that.
        """


class Wire(Protocol):
    """Connections from this worker to each other one. All methods may be called from several threads at once.

    The messages of one tag from one worker to another fill the receives of that tag in the order sent and posted; other tags may overtake
    them, and a message whose receive is not posted yet keeps waiting, without holding up others. A message is as long as the receive that
    is posted for it. One that breaks these rules is a broken connection, never a wrong tensor.
    """

    def rank(self) -> Addr:
        """This worker."""

    def size(self) -> int:
        """Workers."""

    def send(self, tensor: Tensor, dst: Addr, tag: int) -> Work:
        """Starts a send, without waiting. The caller keeps `tensor` (uint8, contiguous, on the CPU), unchanged, until the work's end.

        Raises:
            LinkDown: at once, or from the work.
        """

    def recv(self, tensor: Tensor, src: Addr, tag: int) -> Work:
        """Posts a receive of exactly the bytes of `tensor`, without waiting.

        Raises:
            LinkDown: at once, or from the work.
        """

    def close(self) -> None:
        """Closes all connections at once, whatever is still on its way: every work that has not come to its end raises LinkDown, here and
        at the other workers, and no thread of the wire is left inside a library. May be called again."""


class Store(Protocol):
    """Keys and short texts that all workers of a run see. A key is set once."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""


Connect: TypeAlias = Callable[[Literal["data", "notes"]], Wire]
"""Makes one of the two wires of a group. `notes` carries small messages that must not queue behind the payload of `data`."""
