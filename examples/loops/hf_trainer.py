"""transformers' Trainer: torchrun --nproc-per-node 2 examples/loops/hf_trainer.py OUT. Lines that end in `# +` are Gossamer's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import own
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

import gossamer  # +
from gossamer.integrations.transformers import GossamerCallback  # +


class Sequences(IterableDataset[Tensor]):
    """This worker's data."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def __iter__(self) -> Iterator[Tensor]:
        return own.sequences(self.worker)


def collate(items: list[Tensor]) -> dict[str, Tensor]:
    batch = torch.stack(items)
    return {"input_ids": batch[:, :-1].contiguous(), "labels": batch}


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return own.mean_loss(outputs.logits, labels)


def main(out: Path) -> None:
    workers = gossamer.connect(alone=True)  # +
    model = own.model()
    amount = {"steps": own.STEPS, "batch": own.BATCH, "sequence": own.SEQUENCE, "rounds": own.ROUNDS}  # +
    join = partial(gossamer.join, method="diloco", **amount, workers=workers)  # +
    arguments = TrainingArguments(
        output_dir=str(out / f"trainer-{workers.me}"),
        per_device_train_batch_size=own.BATCH,
        max_steps=own.STEPS * own.ROUNDS,
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Sequences(workers.me),
        data_collator=collate,
        compute_loss_func=loss_of,
        optimizers=(own.optimizer(model), None),
        callbacks=[GossamerCallback(join)],  # +
    )
    trainer.train()
    own.save(model, out, "hf_trainer", workers.me)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
