"""Inner optimizers: what a worker does with each gradient, between two exchanges.

Three that you know: `AdamW`, `SGD`, `Lion`; and `Muon` for hidden matrices. A part is a frozen dataclass that
is its own configuration; `build` makes the torch optimizer that holds the state. Rules that all share:

- `lr` is the peak. Each parameter group carries it as ``initial_lr``; `set_lr` multiplies by the schedule's factor.
- Weight decay is decoupled (except in SGD, as in torch) and acts on tensors of two or more dimensions only; never on biases and norms.
- `clip` bounds the global norm of the gradient over all tensors together; None switches it off.

>>> import torch
>>> params = {"w": torch.nn.Parameter(torch.ones(2, 2)), "b": torch.nn.Parameter(torch.ones(2))}
>>> [(len(g["params"]), g["weight_decay"]) for g in AdamW(lr=1e-3).build(params).param_groups]
[(1, 0.1), (1, 0.0)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.core.errors import BadInput
from gossamer.core.schedule import named
from gossamer.core.tree import squares

Named: TypeAlias = Mapping[str, Parameter]


class Inner(Protocol):
    """The configuration of an inner optimizer."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""

    @property
    def clip(self) -> float | None:
        """Largest global norm of a gradient; None: no clipping."""

    def build(self, params: Named, by_row: Collection[str] = ()) -> torch.optim.Optimizer:
        """The optimizer of `params`. `by_row` names embeddings and output layers (only Muon treats them apart)."""


@dataclass(frozen=True)
class AdamW:
    """m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  p <- p - lr (mhat / (sqrt(vhat) + eps) + weight_decay p).

    Loshchilov and Hutter 2019; torch's own. State: two float copies of the model.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _check("AdamW", self.lr, self.weight_decay, self.clip)
        _betas("AdamW", self.betas)
        _positive("AdamW", "eps", self.eps)

    def build(self, params: Named, by_row: Collection[str] = ()) -> torch.optim.Optimizer:
        """torch.optim.AdamW, fused where the device has it (one pass over memory, and the same bits each time)."""
        return torch.optim.AdamW(
            _groups(params, self.lr, self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=_fused(params.values()),
        )


@dataclass(frozen=True)
class SGD:
    """m <- momentum m + g;  p <- p - lr (g + momentum m if nesterov else m). Weight decay is added to g, as torch does.

    State: one float copy of the model if momentum > 0, else none.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _check("SGD", self.lr, self.weight_decay, self.clip)
        if not 0.0 <= self.momentum < 1.0:
            raise BadInput(f"SGD: momentum is {self.momentum}; expected a number from 0 to less than 1")
        if self.nesterov and self.momentum == 0.0:
            raise BadInput("SGD: nesterov = true has no meaning at momentum 0: set a momentum, for example 0.9")

    def build(self, params: Named, by_row: Collection[str] = ()) -> torch.optim.Optimizer:
        """torch.optim.SGD."""
        return torch.optim.SGD(
            _groups(params, self.lr, self.weight_decay),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=_fused(params.values()),
        )


@dataclass(frozen=True)
class Lion:
    """p <- p - lr (sign(b1 m + (1-b1) g) + weight_decay p);  m <- b2 m + (1-b2) g.

    Chen et al. 2023. Every coordinate moves by lr or not at all, so |drift| <= the sum of the learning rates (plus decay): what a shared
    magnitude wants. State: one float copy of the model.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _check("Lion", self.lr, self.weight_decay, self.clip)
        _betas("Lion", self.betas)

    def build(self, params: Named, by_row: Collection[str] = ()) -> torch.optim.Optimizer:
        """A `LionOptimizer`."""
        return LionOptimizer(_groups(params, self.lr, self.weight_decay), self.lr, self.betas, self.weight_decay)


@dataclass(frozen=True)
class Muon:
    """Hidden matrices: m <- momentum m + (1-momentum) g;  p <- p - lr s (orthogonalised m + weight_decay p / s). All else: AdamW.

    Jordan 2024; torch's own (Newton-Schulz, bfloat16 inside). It is for matrices, so embeddings, output layers, vectors and tensors of
    other ranks go to AdamW with `adamw_lr`. One optimizer steps both, and the schedule scales both.
    """

    lr: float
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The factor s of an A x B matrix: 0.2 sqrt(max(A, B)), which makes AdamW's learning rates fit; or sqrt(max(1, A / B))."""
    adamw_lr: float | None = None
    """Learning rate of the rest; None: `lr`."""
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    """AdamW's."""
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _check("Muon", self.lr, self.weight_decay, self.clip)
        _betas("Muon", self.adamw_betas)
        _positive("Muon", "eps", self.eps)
        if self.adamw_lr is not None:
            _positive("Muon", "adamw_lr", self.adamw_lr)
        if not 0.0 <= self.momentum < 1.0:
            raise BadInput(f"Muon: momentum is {self.momentum}; expected a number from 0 to less than 1")
        if self.adjust not in ("match_rms_adamw", "original"):
            raise BadInput(f"Muon: adjust is {self.adjust!r}; expected 'match_rms_adamw' or 'original'")

    def build(self, params: Named, by_row: Collection[str] = ()) -> torch.optim.Optimizer:
        """A `Both` of torch.optim.Muon and torch.optim.AdamW; AdamW alone if there is no hidden matrix."""
        hidden = {k: p for k, p in params.items() if p.ndim == 2 and k not in by_row}
        rest = {k: p for k, p in params.items() if k not in hidden}
        parts: list[torch.optim.Optimizer] = []
        if hidden:
            muon = torch.optim.Muon(
                _groups(hidden, self.lr, self.weight_decay),
                lr=self.lr,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=self.weight_decay,
                adjust_lr_fn=self.adjust,
            )
            parts.append(muon)
        if rest:
            lr = self.lr if self.adamw_lr is None else self.adamw_lr
            parts.append(AdamW(lr, self.adamw_betas, self.weight_decay, self.eps, self.clip).build(rest))
        return parts[0] if len(parts) == 1 else Both(parts)


class LionOptimizer(torch.optim.Optimizer):
    """Lion as a torch optimizer; see `Lion` for the rule. State per tensor: ``momentum_buffer``."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients at hand."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            ps: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            ms = [self._momentum(p) for p in ps]
            gs = [cast(Tensor, p.grad) for p in ps]
            args = group["lr"], group["betas"], group["weight_decay"]
            if all(p.is_cpu for p in ps):  # tensor by tensor: the temporary stays small and warm
                for p, g, m in zip(ps, gs, ms, strict=True):
                    _lion([p], [g], [m], *args)
            else:
                _lion(ps, gs, ms, *args)
        return loss

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return cast(Tensor, state["momentum_buffer"])


def _lion(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    b1, b2 = betas
    # c = b1 m + (1 - b1) g
    c = torch._foreach_mul(ms, b1)
    torch._foreach_add_(c, gs, alpha=1.0 - b1)
    torch._foreach_sign_(c)
    # p <- (1 - lr weight_decay) p - lr sign(c)
    if weight_decay:
        torch._foreach_mul_(ps, 1.0 - lr * weight_decay)
    torch._foreach_add_(ps, c, alpha=-lr)
    # m <- b2 m + (1 - b2) g
    torch._foreach_mul_(ms, b2)
    torch._foreach_add_(ms, gs, alpha=1.0 - b2)


class Both(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters as one: groups and state are theirs, so a schedule or a checkpoint sees a single one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:stop]
            part.state = self.state
            start = stop

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, and hands groups and state on to the parts."""
        super().load_state_dict(state_dict)
        self._link()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


INNERS: Mapping[str, type[AdamW] | type[SGD] | type[Lion] | type[Muon]] = {"adamw": AdamW, "sgd": SGD, "lion": Lion, "muon": Muon}
"""The built-in inner optimizers by the name that a configuration uses."""


def inner_named(name: str, options: Mapping[str, Any] | None = None) -> Inner:
    """The inner optimizer called `name` with fields `options` (`lr` is required; lists are taken as tuples).

    >>> inner_named("lion", {"lr": 1e-3, "betas": [0.9, 0.98]})
    Lion(lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, clip=1.0)

    Raises:
        BadInput: an unknown name or field, or a value out of range.
    """
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in (options or {}).items()}
    made: Inner = named("inner optimizer", INNERS, name, given)
    return made


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """lr = peak x factor, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


@torch.no_grad()
def clip_(grads: Sequence[Tensor], limit: float, total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Scales all of `grads` in place by min(1, limit / norm), norm over all of them together. Returns the norm before (float64 scalar).

    The squares are summed in float64, so that replicas which hold the same mean gradient take the same step. No host synchronisation on
    an accelerator. A norm that is not finite makes the gradients NaN, which the guard of the outer step refuses and names.

    Args:
        total: makes of this rank's sum of squares that of all ranks, which hold the rest of the gradient; None: there is no rest.
    """
    mine = squares(grads)
    norm = (total(mine) if total else mine).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    if not norm.is_cpu:
        torch._foreach_mul_(list(grads), scale.to(torch.float32))
    elif float(scale) != 1.0:
        torch._foreach_mul_(list(grads), float(scale))
    return norm


def _groups(params: Named, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: tensors of two or more dimensions decay, the others do not. Empty ones are left out."""
    decayed = [p for p in params.values() if p.ndim >= 2]
    free = [p for p in params.values() if p.ndim < 2]
    both = ((decayed, weight_decay), (free, 0.0))
    return [{"params": ps, "weight_decay": wd, "initial_lr": lr} for ps, wd in both if ps]


def _fused(params: Iterable[Tensor]) -> bool:
    """float32 only: torch 2.13's fused SGD leaves most of a bf16 or fp16 tensor on the CPU where it was, and says nothing."""
    return all(p.dtype == torch.float32 and p.device.type in ("cpu", "cuda") for p in params)


def _positive(owner: str, field: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise BadInput(f"{owner}: {field} is {value}; expected a positive number")


def _check(owner: str, lr: float, weight_decay: float, clip: float | None) -> None:
    _positive(owner, "lr", lr)
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise BadInput(f"{owner}: weight_decay is {weight_decay}; expected 0 or more")
    if clip is not None and not clip > 0:
        raise BadInput(f"{owner}: clip is {clip}; expected a positive norm, or none to switch clipping off")


def _betas(owner: str, betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise BadInput(f"{owner}: betas are {betas}; expected two numbers from 0 to less than 1, for example (0.9, 0.95)")
