"""A trainer in the style of torchtitan, which steps a container of optimizers: torchrun --nproc-per-node 2 examples/loops/titan.py OUT.
Lines that end in `# +` are Gossamer's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own
from torch import Tensor, nn

import gossamer  # +
from gossamer.integrations.torchtitan import OuterOptimizer  # +


class OptimizersContainer:
    """The optimizers of the parts of a model, stepped together."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [own.optimizer(part) for part in parts]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


class Trainer:
    """Owns everything, and is told how many steps to take."""

    def __init__(self, steps: int, data: Iterator[Tensor]) -> None:
        self.model_parts: list[nn.Module] = [own.model()]
        self.optimizers: Any = OptimizersContainer(self.model_parts)
        self.steps, self.data = steps, data

    def train_step(self, batch: Tensor) -> None:
        self.optimizers.zero_grad()
        own.mean_loss(self.model_parts[0](input_ids=batch[:, :-1], use_cache=False).logits, batch).backward()
        self.optimizers.step()

    def train(self) -> None:
        for _ in range(self.steps):
            self.train_step(next(self.data))


def main(out: Path) -> None:
    workers = gossamer.connect()  # +
    trainer = Trainer(own.STEPS * own.ROUNDS, own.batches(workers.me))
    amount = {"steps": own.STEPS, "batch": own.BATCH, "sequence": own.SEQUENCE, "rounds": own.ROUNDS}  # +
    outer = gossamer.join(trainer.model_parts[0], list(trainer.optimizers), "diloco", **amount, workers=workers)  # +
    outer.scheduler()  # +
    trainer.optimizers = OuterOptimizer(trainer.optimizers, outer)  # +
    trainer.train()
    outer.close()  # +
    own.save(trainer.model_parts[0], out, "titan", workers.me)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
