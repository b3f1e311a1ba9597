"""What a user has before Gossamer comes: a model, an optimizer, data, a loss. The four loops share it.

It is made like that of `gossamer train examples/loops/job.toml`: first weights, order of the data and optimizer are the same, so that the
parameters in the end can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.app.config import load
from gossamer.app.job import resolve

STEPS, BATCH, SEQUENCE, ROUNDS = 3, 2, 16, 3
JOB = resolve(load([Path(__file__).with_name("job.toml")]))


def model() -> nn.Module:
    """A small Llama of transformers', with first weights from the seed."""
    made: nn.Module = JOB.model()
    return made


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """torch's own; matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def sequences(worker: int) -> Iterator[Tensor]:
    """This worker's, without end: int64 [L + 1] each."""
    data, cursor = JOB.corpus().batches(SEQUENCE, JOB.config.seed, worker, JOB.n), 0
    while True:
        yield data.batch(cursor, 1)[0]
        cursor += 1


def batches(worker: int) -> Iterator[Tensor]:
    """int64 [B, L + 1]."""
    found = sequences(worker)
    while True:
        yield torch.stack([next(found) for _ in range(BATCH)])


def mean_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Of the next token."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), batch[:, 1:].reshape(-1))


def save(model: nn.Module, out: Path, name: str, worker: int) -> None:
    """The parameters."""
    torch.save({k: v.detach().clone() for k, v in model.named_parameters()}, out / f"{name}-{worker}.pt")
