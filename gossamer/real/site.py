"""The ranks of one worker, as one of them sees them.

A worker of several ranks has a process for each. Between workers each process has its own connections, over any wire; what the ranks of
one worker sum among themselves goes over whatever library cuts the model: torch.distributed, in gossamer.net.site.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Site(Protocol):
    """This process among the ranks of its worker."""

    rank: int
    size: int

    @property
    def mesh(self) -> Any:
        """The device mesh of all ranks, for `fully_shard`; only of a worker of several."""

    def sum(self, value: Tensor) -> Tensor:
        """The float64 sum over the ranks, the same bits on all.

        Raises:
            RunFailed: a rank is gone.
        """

    def close(self) -> None:
        """Ends the connections of the ranks."""


class Alone:
    """The only rank of its worker."""

    rank, size = 0, 1

    @property
    def mesh(self) -> Any:
        raise RuntimeError("a worker of one rank has no device mesh")

    def sum(self, value: Tensor) -> Tensor:
        return value

    def close(self) -> None:
        """There is nothing to close."""
