"""A worker body small enough to reason about: least squares on random data, with the project's inner optimizers.

Tensor sizes are odd on purpose, one tensor is an embedding, and one row of it is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gossamer.core.inner import SGD, Inner
from gossamer.core.rng import Stream, words
from gossamer.core.tree import Layout, Tree, layout_of
from gossamer.worker.effects import Done, Work


class ToyModel(nn.Module):
    """embedding[11, 5] -> tanh(linear[7, 5]) -> linear[1, 7]; token 10 never occurs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(11, 5, generator=g))
        self.hidden = nn.Parameter(torch.randn(7, 5, generator=g) * 0.3)
        self.bias = nn.Parameter(torch.zeros(7))
        self.out = nn.Parameter(torch.randn(1, 7, generator=g) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed[tokens].mean(1) @ self.hidden.T + self.bias)
        return (h @ self.out.T).squeeze(-1)


def toy_layout() -> Layout:
    """Layout of the toy model, its embedding by row."""
    return layout_of({k: p.data for k, p in ToyModel().named_parameters()}, by_row=("embed",))


def toy_start(seed: int = 0) -> Tree:
    """A fresh copy of the toy model's parameters."""
    return {k: p.detach().clone() for k, p in ToyModel(seed).named_parameters()}


class ToyBody:
    """A Body: batches are a pure function of (data seed, worker, cursor). `workers` > 1 takes the joined batch of that many."""

    LENGTH = 4

    def __init__(self, worker: int, inner: Inner | None = None, *, workers: int = 1, poison_at: int | None = None) -> None:
        self.worker, self.workers, self.poison_at = worker, workers, poison_at
        self.inner = inner or SGD(lr=0.05, momentum=0.0, weight_decay=0.0, clip=None)
        self.model = ToyModel()
        self.params = dict(self.model.named_parameters())
        self.cursor = 0
        self._fresh()

    def _fresh(self) -> None:
        self.optimizer = self.inner.build(self.params)

    def batch(self, worker: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        w = words(size * self.LENGTH, 99, Stream.DATA, worker, self.cursor)
        tokens = torch.from_numpy((w % 10).astype("int64")).view(size, self.LENGTH)
        return tokens, torch.sin(tokens.float().sum(1))

    def gradient(self, size: int) -> float:
        self.optimizer.zero_grad()
        joined = [self.batch(self.worker + k, size) for k in range(self.workers)]
        tokens, target = torch.cat([a for a, _ in joined]), torch.cat([b for _, b in joined])
        loss = ((self.model(tokens) - target) ** 2).mean()
        loss.backward()
        if self.poison_at == self.cursor:
            self.params["hidden"].grad[0, 0] = float("nan")
        self.cursor += 1
        return float(loss.detach()) * size * self.workers * self.LENGTH

    def take(self) -> None:
        if self.inner.clip is not None:
            nn.utils.clip_grad_norm_(list(self.params.values()), self.inner.clip)
        self.optimizer.step()

    def compute(self, work: Work) -> Done:
        live = {k: p.data for k, p in self.params.items()}
        if work.kind == "apply":
            for k, p in self.params.items():
                p.grad = work.tree[k].clone()
            self.take()
            return Done(live, 0, 0.0)
        loss = 0.0
        for _ in range(work.steps):
            loss += self.gradient(work.batch)
            if work.kind == "steps":
                self.take()
        tree = {k: p.grad for k, p in self.params.items()} if work.kind == "grad" else live
        return Done(tree, work.steps * work.batch * self.workers * self.LENGTH, loss)

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        for k, v in tree.items():
            self.params[k].data.copy_(v)
        if reset_inner:
            self._fresh()

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]
        self.optimizer.load_state_dict(state["optimizer"])
