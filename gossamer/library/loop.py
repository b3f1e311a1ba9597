"""The user's model and optimizer, as a worker's body: the steps are taken elsewhere, here they are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.tree import Layout, Tree
from gossamer.train import model as models
from gossamer.worker.effects import Done, Work


class Loop:
    """Implements `gossamer.worker.effects.Body`, but for `compute`.

    Args:
        model: as it is trained; what requires a gradient is exchanged.
        optimizers: those that step it. The steps of the first are counted.

    Raises:
        BadInput: a model that something else keeps equal or in shards, without trainable parameters, or of another than the optimizers.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model = unwrapped(model)
        self._params = models.parameters_of(self.model)
        if not self._params:
            raise BadInput("no parameter of the model requires a gradient, so there is nothing to train or to exchange: unfreeze some")
        for name, p in self._params.items():
            if hasattr(p, "to_local"):
                raise BadInput(
                    f"parameter {name} is a DTensor: gossamer.join takes a model that each process holds whole. For workers of several "
                    "ranks use gossamer train with ranks in the fleet file"
                )
            if not p.is_contiguous():  # flat ranges of parameters travel
                p.data = p.data.contiguous()
        self.optimizers = tuple(optimizers)
        self._check_optimizers()
        self.deaf = False
        """Loads are not done: the parameters are known to be what is loaded."""
        self.keep_inner = False
        """The state of the optimizers is left alone, whatever a Load asks for."""
        self._steps = 0
        self._hook: Any = None
        with suppress(AttributeError):  # what is no torch optimizer has no hooks
            self._hook = self.optimizers[0].register_step_post_hook(self._stepped)

    @property
    def tree(self) -> Tree:
        """Live views of the parameters, wherever their owner has put them by now."""
        return {name: p.detach() for name, p in self._params.items()}

    @property
    def layout(self) -> Layout:
        """What an exchange of the model carries."""
        return models.layout(self.model)

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(iter(self._params.values())).device

    def taken(self) -> int:
        """Steps of the first optimizer since the last call; 1 where they cannot be counted."""
        if self._hook is None:
            return 1
        steps, self._steps = self._steps, 0
        return steps

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps += 1

    def _check_optimizers(self) -> None:
        if not self.optimizers:
            raise BadInput("no optimizer was given: gossamer.join counts its steps and leaves its state to you")
        known = {id(p) for p in self._params.values()}
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        foreign = sum(id(p) not in known for p in held)
        if foreign:
            raise BadInput(
                f"{foreign} of the optimizer's {len(held)} parameters are none of the model's, and would be trained and never exchanged: "
                "give the model that holds all of them, and join after it has been moved or wrapped"
            )

    def release(self) -> None:
        """Takes the hook away."""
        if self._hook is not None:
            self._hook.remove()

    # ---- a body

    def compute(self, work: Work) -> Done:
        raise RunFailed("the steps of this worker are taken by its own loop")

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        if self.deaf:
            return
        with torch.no_grad():
            for name, value in tree.items():
                self._params[name].copy_(value)
        if reset_inner and not self.keep_inner:
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in a compiled one.

    Raises:
        BadInput: the model is wrapped in something that synchronises it at every step.
    """
    kind = type(model).__name__
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        raise BadInput(
            f"the model is wrapped in {kind}, which works over all processes at every step: give gossamer.join the bare model. Where a "
            "library wraps it by itself, call gossamer.connect(alone=True) before that library looks at the environment"
        )
    inner = getattr(model, "_orig_mod", model)  # torch.compile
    return inner if isinstance(inner, nn.Module) else model
