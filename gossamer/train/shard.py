"""One model over the ranks of a worker: FSDP2, and what each rank takes of a batch.

`fully_shard` keeps of every parameter the rows of gossamer.core.ranges.rows_of in each rank, gathers a layer where it is used, and sums the
gradients of all ranks into the shards. Everything between two uses, the inner optimizer included, works on plain local tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from gossamer.train.model import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Ranks(Protocol):
    """The ranks of a worker, as one of them sees them."""

    rank: int
    size: int

    @property
    def mesh(self) -> DeviceMesh:
        """All of them."""

    def sum(self, value: Tensor) -> Tensor:
        """The float64 sum over the ranks, the same bits on all."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats, as its library names them; none where it does not."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if type(m).__name__ in names and m is not model]


def compile_blocks(model: nn.Module, backend: str) -> None:
    """torch.compile for each block (of a model that names none, for all of it), in place: names of parameters stay as they are.

    Blocks of one kind share what was compiled, so that a deep model takes no longer than a flat one. The first step of each shape pays.
    """
    for module in blocks(model) or [model]:
        module.compile(backend=backend)


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Cuts `model` over the ranks, in place: each block by itself, so that one is whole at a time, then the rest.

    Gradients are summed over the ranks, not averaged: a rank weighs its loss by its share of the batch.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # slow to import, and most workers have one rank

    for module in blocks(model):
        fully_shard(module, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's rows of each trainable parameter of a model that was cut, as parameters that share its memory."""
    owners: dict[str, Any] = dict(parameters_of(model))
    return {name: nn.Parameter(p.to_local().detach()) for name, p in owners.items()}


def is_cut(model: nn.Module) -> bool:
    """Whether `shard` has cut it."""
    return any(hasattr(p, "to_local") for p in model.parameters())


def folded(model: nn.Module) -> None:
    """Gives up what is gathered: after a forward pass without a backward one the outermost parameters would stay as they were."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def share(batch: Tensor, size: int, ranks: Ranks) -> list[tuple[Tensor, float]]:
    """What a rank takes of a batch, in pieces of at most `size` sequences: (sequences, their part of the whole batch).

    Consecutive sequences, rank by rank, so that all together take the batch that one rank would. All ranks take part in every piece, since
    the gradients are summed in each; a rank that has run out takes one sequence along with weight 0.
    """
    count, r, n = len(batch), ranks.rank, ranks.size
    mine = batch[count * r // n : count * (r + 1) // n]
    most = -(-count // n)
    cut = [mine[k * size : (k + 1) * size] for k in range(-(-most // size))]
    return [(piece, len(piece) / count) if len(piece) else (batch[:1], 0.0) for piece in cut]
