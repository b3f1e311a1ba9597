"""Outer rules: what a worker says after its inner steps, and how it moves when it has heard.

    DiLoCo        says the drift D              x <- SGD(lr, momentum, nesterov) on the mean of D
    Local SGD     says y                        x <- the mean of y
    GASLoC        says z = x + lr * (y - x)     x <- zbar + momentum * (zbar - zbar_previous)

Symbols (design, section 2): x the anchor (float32), y the parameters after the inner steps, g = y - x, D = x - y the pseudo-gradient,
W the mixing matrix of the round. `mixed` is (W said)_i. A rule is a frozen dataclass; its state is a dict of trees that it takes and
returns (it may reuse their storage, and that of x; it never writes to said or mixed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch

from gossamer.core.errors import BadInput
from gossamer.core.tree import Tree, map_tree, master, rounded, zeros_like

OuterState: TypeAlias = dict[str, Tree]
Says: TypeAlias = Literal["drift", "parameters", "gradient"]

STEP = "step"
"""The one outer state that is not of the parameters' shape: how many steps were taken, one float32 number a tensor."""
PREVIOUS = "previous"
"""The one that lies where the parameters lie, and moves with them: what was mixed, or said, last."""


class Outer(Protocol):
    """The rule between two rounds."""

    says: ClassVar[Says]
    """What `emit` returns. A lossy codec goes with a drift or a gradient, not with parameters."""
    before: ClassVar[bool]
    """True when what is said does not depend on the inner steps, so that it travels while they run."""

    @property
    def needs_said(self) -> bool:
        """True when `step` uses the worker's own part as the others heard it."""

    def init(self, x: Tree) -> OuterState:
        """State before the first round."""

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        """What the worker says, float32. It may reuse the storage of D, unless `before`."""

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        """The next anchor and state. D is the worker's own drift; only rules with `before` may use it."""


def drift(x: Tree, y: Tree) -> Tree:
    """The pseudo-gradient D = cast(x) - y, float32: cast(x) is what a model of y's dtype really started from."""
    return map_tree(lambda a, b: torch.sub(a, b.to(torch.float32)), rounded(x, y), y)


def check(lr: float, momentum: float) -> None:
    """Refuses an outer learning rate or momentum outside its range.

    Raises:
        BadInput: with the range.
    """
    if not 0.0 < lr <= 1000.0:
        raise BadInput(f"outer learning rate {lr} must be above 0, and at most 1000 (0.4 to 1.0 are usual)")
    if not 0.0 <= momentum < 1.0:
        raise BadInput(f"outer momentum {momentum} must be at least 0 and below 1 (0.9 is usual, 0 for none)")


@dataclass(frozen=True)
class OuterSGD:
    """torch.optim.SGD on the weighted mean of the pseudo-gradients (DiLoCo, Douillard et al. 2023, algorithm 1).

    b <- momentum * b + D;  x <- x - lr * (D + momentum * b) with `nesterov`, else x - lr * b.

    The first buffer is D, as in torch, and the operations come in torch's order, so the bits are torch's. Two copies of the model are
    held: anchor and momentum.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    correction: Literal["none", "work"] = "none"
    """For unequal work, within a round and between rounds: see `gossamer.core.work`, which applies it."""
    says: ClassVar[Says] = "drift"
    before: ClassVar[bool] = False
    needs_said: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self.lr, self.momentum)
        if self.correction not in ("none", "work"):
            raise BadInput(f"the outer correction is {self.correction!r}: expected 'none' or 'work'")

    def init(self, x: Tree) -> OuterState:
        return {"momentum": zeros_like(x)} if self.momentum else {}

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        return D

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        for k, d in mixed.items():
            if self.momentum:
                b = s["momentum"][k].mul_(self.momentum).add_(d)
                d = torch.add(d, b, alpha=self.momentum) if self.nesterov else b
            x[k].add_(d, alpha=-self.lr)
        return x, s


@dataclass(frozen=True)
class Average:
    """Local SGD, FedAvg: x <- sum_i w_i y^i. One copy of the model is held, the anchor."""

    says: ClassVar[Says] = "parameters"
    before: ClassVar[bool] = False
    needs_said: ClassVar[bool] = False

    def init(self, x: Tree) -> OuterState:
        return {}

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        return {k: torch.sub(x[k], d, out=d) for k, d in D.items()}

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        for k, v in mixed.items():
            x[k].copy_(v)
        return x, s


Form: TypeAlias = Literal["local", "mixed", "outer"]


@dataclass(frozen=True)
class Gossip:
    """GASLoC (Cagnasso, Belilovsky and Oyallon 2026, section 3): mix what lies after an outer step, then add momentum.

    With z_t = x_t + lr * g_t and z_{-1} = x_0 (the paper's momentum starts at t = 1; torch's, and ours, at once):

    - ``"local"``, as printed:  x_{t+1} = W z_t + momentum * (z_t - z_{t-1}). Replicas keep a spread even on the complete graph.
    - ``"mixed"``: zbar_t = W z_t; x_{t+1} = zbar_t + momentum * (zbar_t - zbar_{t-1}). On the complete graph this is DiLoCo.
    - ``"outer"``: D_t = x_t - W (x_t + g_t) is fed to `OuterSGD`, or to another `rule` that steps on a drift. Equals ``mixed`` at lr = 1,
      DiLoCo on the complete graph at any lr.

    The damping alpha of the paper (W = I - alpha * Lambda) belongs to the topology. Two copies of the model are held.

    Raises:
        BadInput: an unknown form, numbers outside their ranges, heavy ball or a rule with a form that has no place for it.
    """

    lr: float = 0.8
    momentum: float = 0.7
    form: Form = "outer"
    nesterov: bool = True
    """Only ``outer`` can go without (heavy ball); the other two forms are Nesterov's by construction."""
    rule: Outer | None = None
    """The outer optimizer of ``outer``, with a learning rate and momentum of its own. None: `OuterSGD` with those above."""
    says: ClassVar[Says] = "parameters"
    before: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self.lr, self.momentum)
        if self.form not in ("local", "mixed", "outer"):
            raise BadInput(f"momentum form {self.form!r} is unknown: choose local, mixed or outer")
        if self.form != "outer" and not self.nesterov:
            raise BadInput(f"form {self.form!r} is Nesterov's by construction: use form 'outer' for heavy ball")
        if self.rule is not None and self.form != "outer":
            raise BadInput(f"form {self.form!r} is Nesterov's by construction: use form 'outer' for another outer optimizer")
        if self.rule is not None and (self.rule.says != "drift" or self.rule.before):
            raise BadInput(f"{type(self.rule).__name__} does not step on a drift after the inner steps: use OuterSGD or OuterTorch")

    @property
    def needs_said(self) -> bool:
        return self.form == "local"

    @property
    def linear(self) -> bool:
        """Whether the step is linear in the parameters, so that `gossamer.core.consensus.rate` tells how fast workers agree."""
        return self.rule is None

    @property
    def _rule(self) -> Outer:
        return self.rule or OuterSGD(self.lr, self.momentum, self.nesterov)

    def init(self, x: Tree) -> OuterState:
        return self._rule.init(x) if self.form == "outer" else {PREVIOUS: master(x)}

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        lr = 1.0 if self.form == "outer" else self.lr
        return {k: torch.sub(x[k], d, alpha=lr, out=d) for k, d in D.items()}

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        if self.form == "outer":
            return self._rule.step(x, D, said, map_tree(torch.sub, x, mixed), s)
        z = mixed if self.form == "mixed" else said
        for k, previous in s[PREVIOUS].items():
            x[k].copy_(mixed[k]).add_(z[k] - previous, alpha=self.momentum)
            previous.copy_(z[k])
        return x, s


@dataclass(frozen=True)
class CombineWhileAdapt:
    """Local-DAdam (GASLoC, section 4) and, with one inner step a round, DAdam (Wang et al. 2024, arXiv 2410.11998):

    x_{t+1} = W x_t + g_t. The disagreement is taken before the inner steps, so the mixing travels while they run; weight decay acts on
    the unmixed x_t. One copy of the model is held.
    """

    says: ClassVar[Says] = "parameters"
    before: ClassVar[bool] = True
    needs_said: ClassVar[bool] = False

    def init(self, x: Tree) -> OuterState:
        return {}

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        return master(x)

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        for k, v in mixed.items():
            torch.sub(v, D[k], out=x[k])
        return x, s


@dataclass(frozen=True)
class GradientMean:
    """Data parallelism: the mean gradient goes to the inner optimizer, which takes the one step of the round (weights by tokens)."""

    says: ClassVar[Says] = "gradient"
    before: ClassVar[bool] = False
    needs_said: ClassVar[bool] = False

    def init(self, x: Tree) -> OuterState:
        return {}

    def emit(self, x: Tree, D: Tree, s: OuterState) -> Tree:
        return D

    def step(self, x: Tree, D: Tree, said: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
        raise AssertionError("the inner optimizer takes this step")
