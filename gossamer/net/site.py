"""The ranks of one worker and their process group.

A worker of several ranks is a site of several GPUs: its processes form torch's default process group (gloo for tensors on the CPU, NCCL for
those on GPUs), on which `fully_shard` runs. Between workers there is no collective, only the connections of gossamer.real.group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.core.errors import BadInput, RunFailed
from gossamer.net.gloo import FOREVER, c10d, first_line
from gossamer.real.seats import Seats
from gossamer.real.site import Alone, Site
from gossamer.worker.effects import Addr

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def site_of(store: Any, seats: Seats | None, me: Addr, *, device: str = "cpu", local: bool = False) -> Site:
    """Seat `me` among the ranks of its worker, over whatever wire the workers are connected. Returns when all ranks are there.

    Args:
        store: a store of torch.distributed that the ranks of one worker share; other workers may share it, too.
        seats: None: every worker is one process.
        device, local: as of TorchSite.
    """
    if seats is None or len(seats.site(me)) == 1:
        return Alone()
    own = c10d.PrefixStore(f"worker-{seats.workers[me]}", store)
    return TorchSite(own, seats.rank(me), len(seats.site(me)), device=device, local=local)


class TorchSite:
    """One rank of a worker, connected to the others of it.

    Args:
        store: what the ranks find each other by, of this worker alone.
        size: ranks, 2 or more.
        device: "cuda" where the model is on GPUs, one a rank, else "cpu".
        local: keep to the loopback interface.

    Raises:
        BadInput: torch's default process group is there already, or two ranks would have one GPU.
    """

    def __init__(self, store: Any, rank: int, size: int, *, device: str = "cpu", local: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # slow to import, and most workers have one rank

        self.rank, self.size = rank, size
        self._mesh: DeviceMesh | None = None
        if dist.is_initialized():
            raise BadInput("this process has a default process group of torch already, and a worker of several ranks needs it: remove that")
        here = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        if device == "cuda" and here > torch.cuda.device_count():
            raise BadInput(
                f"a worker has {here} ranks on this machine, which has {torch.cuda.device_count()} CUDA devices: expected one a rank. "
                'Lower ranks in the fleet file, or use run.device = "cpu"'
            )
        with _loopback(local):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=c10d.PrefixStore("site", store),
                rank=rank,
                world_size=size,
                timeout=FOREVER,
            )
            self._mesh = init_device_mesh(device, (size,))

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the worker, in one dimension."""
        assert self._mesh is not None
        return self._mesh

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, added in the order of their numbers, the same bits on all; float64.

        Raises:
            RunFailed: a rank is gone.
        """
        mine = value.detach().to("cpu", torch.float64).contiguous()
        found = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(found, mine)
        except RuntimeError as error:
            raise RunFailed(f"another rank of this worker is gone ({first_line(error)})") from error
        total = found[0]
        for other in found[1:]:
            total = total + other
        return total.to(value.device)

    def close(self) -> None:
        """Ends the process group."""
        if self._mesh is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._mesh = None


@contextmanager
def _loopback(local: bool) -> Iterator[None]:
    """Torch's gloo groups take their interface from the environment."""
    name = "GLOO_SOCKET_IFNAME"
    if not local or name in os.environ:
        yield
        return
    os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[name]
