"""Outer optimizers of torch: the mean pseudo-gradient as the gradient of a real `torch.optim` optimizer.

>>> rule = OuterTorch("adam", lr=0.1)
>>> x = {"w": torch.zeros(2)}
>>> x, state = rule.step(x, {}, {}, {"w": torch.tensor([1.0, -100.0])}, rule.init(x))
>>> [round(v, 4) for v in x["w"].tolist()], state["step"]["w"].tolist()
([-0.1, 0.1], [1.0])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.outer import STEP, OuterState, Says, check
from gossamer.core.tree import Tree, zeros_like

TorchName: TypeAlias = Literal["adam", "adamw", "radam", "rmsprop"]


@dataclass(frozen=True)
class OuterTorch:
    """torch.optim.Adam, AdamW, RAdam or RMSprop on the weighted mean of the pseudo-gradients (FedOpt, Reddi et al. 2021,
    arXiv 2003.00295), with torch's state, torch's first step and torch's bits.

        adam      m <- b1 m + (1 - b1) D;  v <- b2 v + (1 - b2) D^2;  x <- x - lr mhat / (sqrt(vhat) + eps)
        adamw     the same, and x <- (1 - lr decay) x before
        radam     adam with the variance of its early steps rectified
        rmsprop   v <- b2 v + (1 - b2) D^2;  b <- b1 b + D / (sqrt(v) + eps);  x <- x - lr b

    `momentum` is b1, `beta2` is b2. Steps have the size of `lr` whatever the size of D, so `lr` is smaller than SGD's. Held: two copies of
    the model beside the anchor (rmsprop without momentum: one), and a count of steps a tensor, as one float32 number.

    Raises:
        BadInput: an optimizer that is not known, or a number outside its range.
    """

    optimizer: TorchName
    lr: float = 1e-3
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    decay: float = 0.0
    """Decoupled weight decay; adamw only."""
    says: ClassVar[Says] = "drift"
    before: ClassVar[bool] = False
    needs_said: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(TorchName):
            raise BadInput(f"outer optimizer {self.optimizer!r} is not one of torch's that are known: {', '.join(get_args(TorchName))}")
        check(self.lr, self.momentum)
        if not 0.0 <= self.beta2 < 1.0:
            raise BadInput(f"beta2 of the outer optimizer is {self.beta2}: expected at least 0 and below 1 (0.99 is usual)")
        if not 0.0 < self.eps <= 1.0:
            raise BadInput(f"eps of the outer optimizer is {self.eps}: expected above 0 and at most 1 (1e-8 is usual)")
        if not 0.0 <= self.decay < 1.0:
            raise BadInput(f"weight decay of the outer optimizer is {self.decay}: expected at least 0 and below 1 (0 is usual)")
        if self.decay and self.optimizer != "adamw":
            raise BadInput(f"weight decay of the outer optimizer belongs to adamw, not to {self.optimizer}: leave it out")

    @property
    def _kept(self) -> tuple[str, ...]:
        """Names, in torch's state, of what is kept for each number; all zeros before the first step."""
        if self.optimizer != "rmsprop":
            return ("exp_avg", "exp_avg_sq")
        return ("square_avg", "momentum_buffer") if self.momentum else ("square_avg",)

    def _build(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        betas = (self.momentum, self.beta2)
        match self.optimizer:
            case "adam":
                return torch.optim.Adam(params, lr=self.lr, betas=betas, eps=self.eps, foreach=False)
            case "adamw":
                return torch.optim.AdamW(params, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.decay, foreach=False)
            case "radam":
                return torch.optim.RAdam(params, lr=self.lr, betas=betas, eps=self.eps, foreach=False)
        return torch.optim.RMSprop(params, lr=self.lr, alpha=self.beta2, eps=self.eps, momentum=self.momentum, foreach=False)

    def init(self, x: Tree) -> OuterState:
        return {name: zeros_like(x) for name in self._kept} | {STEP: {k: torch.zeros(1) for k in x}}

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        return D

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        if not mixed:
            return x, s
        optimizer = self._build([x[k] for k in mixed])
        for k, d in mixed.items():
            x[k].grad = d
            optimizer.state[x[k]] = {name: s[name][k] for name in (*self._kept, STEP)}
        optimizer.step()
        for k in mixed:
            x[k].grad = None
        return x, s
