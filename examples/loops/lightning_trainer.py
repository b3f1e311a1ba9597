"""Lightning: torchrun --nproc-per-node 2 examples/loops/lightning_trainer.py OUT. Lines that end in `# +` are Gossamer's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import lightning.pytorch as lightning
import own
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import gossamer  # +
from gossamer.integrations.lightning import GossamerCallback  # +


class Batches(IterableDataset[Tensor]):
    """This worker's data."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def __iter__(self) -> Iterator[Tensor]:
        return own.batches(self.worker)


class Module(lightning.LightningModule):
    """The user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = own.model()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return own.mean_loss(self.model(input_ids=batch[:, :-1], use_cache=False).logits, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return own.optimizer(self.model)


def main(out: Path) -> None:
    workers = gossamer.connect(alone=True)  # +
    module = Module()
    amount = {"steps": own.STEPS, "batch": own.BATCH, "sequence": own.SEQUENCE, "rounds": own.ROUNDS}  # +
    join = partial(gossamer.join, method="diloco", **amount, workers=workers)  # +
    trainer = lightning.Trainer(
        max_steps=-1,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[GossamerCallback(join)],  # +
    )
    trainer.fit(module, DataLoader(Batches(workers.me), batch_size=None))
    own.save(module.model, out, "lightning_trainer", workers.me)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
