"""Memory of an inner step: as a site measured it, or as an estimate.

    fixed = P (parameters + gradients + state of the inner optimizer) + P * 4 * (float32 copies of the outer step) + F    bytes
    token = a * (34 / 2) width layers + (a + 8) vocabulary                                                                bytes

P: parameters that are trained; F: bytes of those that are not. With activation checkpointing a block keeps what enters it, and one block
at a time the rest: a * (layers + 34 / 2) width.

a: bytes of an activation, 2 under autocast to 16 bits, else 4. 34 bytes a token, layer and unit of width are what a transformer layer
keeps for its backward pass in 16 bits, less the attention scores, which are not kept (Korthikanti et al. 2022, arXiv 2205.05198,
equation 2 without its second term). The last term is the logits, once as they come, in float32, and their gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gossamer.core.fleet import Site
from gossamer.core.inner import Inner
from gossamer.core.method import Method
from gossamer.core.tree import Layout

_LAYER_BYTES = 34 / 2
_WORDS = {
    "previous": "previous iterate",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "square_avg": "mean square",
    "momentum_buffer": "momentum",
}
"""Outer state, for people."""


@dataclass(frozen=True)
class Footprint:
    """An estimate for one model and method: bytes of a step without tokens, and per token, of all GPUs of a worker together."""

    fixed_bytes: float
    token_bytes: float

    def step_gb(self, site: Site, tokens: int) -> float:
        """Peak memory of a step on `tokens` tokens, in GB: by the site's measured line, else the estimate."""
        share = 1e-9 / site.ranks  # of the estimate; what was measured is of the fullest GPU already
        fixed_gb, token_gb = site.memory_line() if site.memory_gb else (share * self.fixed_bytes, share * self.token_bytes)
        return fixed_gb + token_gb * tokens

    def batch_max(self, site: Site, sequence: int, headroom: float) -> int | None:
        """The most sequences of a step that leave `headroom` of the site's memory free; 0: not even one. None: no known limit."""
        if site.memory_gb:
            return site.batch_max(sequence, headroom)
        free = (1 - headroom) * 1e9 * site.limit_gb * site.ranks - self.fixed_bytes
        return max(0, math.floor(free / (self.token_bytes * sequence)))


def footprint(
    method: Method,
    layout: Layout,
    config: Any,
    activation_bytes: int,
    frozen_bytes: int = 0,
    recomputed: bool = False,
    offload: bool = False,
) -> Footprint:
    """The estimate for the model of `layout`.

    Args:
        config: its transformers configuration.
        activation_bytes: 2 or 4.
        frozen_bytes: of parameters that are not trained.
        recomputed: whether a block keeps what enters it alone.
        offload: the copies of the outer step are in the host's memory.
    """
    state = _state_bytes(method.inner)
    copies = 0 if offload else 4 * outer_copies(method)
    fixed = sum(part.size * (2 * part.dtype.itemsize + state[_kind(part.by_row, part.row < part.numel)] + copies) for part in layout)
    kept = config.num_hidden_layers + _LAYER_BYTES if recomputed else _LAYER_BYTES * config.num_hidden_layers
    return Footprint(fixed + frozen_bytes, activation_bytes * config.hidden_size * kept + (activation_bytes + 8) * config.vocab_size)


def outer_copies(method: Method) -> int:
    """Float32 copies of the model that a worker holds beside it (`outer_names`)."""
    return len(outer_names(method))


def outer_names(method: Method) -> list[str]:
    """What these copies are: anchor, outer state, residual, what travels, what was last heard."""
    kept = [name for name, tree in method.outer.init({"p": torch.zeros(2)}).items() if tree["p"].numel() > 1]  # a count is no copy
    names = ["anchor", *(_WORDS.get(name, name) for name in kept)]
    names += ["residual"] if method.feedback is not None and method.feedback.at_worker else []
    names += ["parameters in flight"] if method.cadence.overlap > 0 else []
    return names + (["what the others said last"] if method.cadence.eager else [])


def _kind(by_row: bool, matrix: bool) -> str:
    return "table" if by_row else "matrix" if matrix else "vector"


def _state_bytes(inner: Inner) -> dict[str, float]:
    """Bytes an element that the optimizer keeps for a hidden matrix, an embedding and a vector, found by one step of a small model."""
    sizes = {"matrix": (4, 4), "table": (4, 4), "vector": (16,)}
    params = {kind: torch.nn.Parameter(torch.ones(size)) for kind, size in sizes.items()}
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer = inner.build(params, frozenset({"table"}))
    optimizer.step()
    return {
        kind: sum(v.nbytes for v in optimizer.state[p].values() if isinstance(v, torch.Tensor) and v.numel() == p.numel()) / p.numel()
        for kind, p in params.items()
    }
