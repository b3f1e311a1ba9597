"""The weighted mean, computed once, in float32, from declared weights, over the weights actually received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.core.codec.base import Codec
from gossamer.core.tree import Layout, Tree


class Piece(NamedTuple):
    """A payload to add into a mean."""

    layout: Layout
    weight: float
    """A number that float32 holds exactly (see `normalised`)."""
    payload: Tensor


def normalised(weights: Mapping[int, float]) -> dict[int, float]:
    """Weights divided by their sum in float64, each rounded to float32 once, in id order. All zero when the sum is.

    >>> normalised({1: 300.0, 0: 100.0})
    {0: 0.25, 1: 0.75}
    """
    total = sum(weights[j] for j in sorted(weights))
    return {j: float(np.float32(weights[j] / total)) if total else 0.0 for j in sorted(weights)}


def combine(pieces: Sequence[Piece], codec: Codec, like: Tree) -> Tree:
    """sum of weight * decode(payload), in the order given (id order): multiply, then add.

    Returns fresh float32 tensors of the shapes of `like`, on its device, for the names that the pieces carry; elements that no piece
    carries are zero.
    """
    names = dict.fromkeys(part.name for piece in pieces for part in piece.layout)
    acc = {name: torch.zeros(like[name].shape, dtype=torch.float32, device=like[name].device) for name in names}
    for piece in pieces:
        if piece.weight:
            codec.accumulate(piece.payload, piece.layout, acc, piece.weight)
    return acc


def mean(trees: Iterable[Tree], weights: Sequence[float] | None = None) -> Tree:
    """The weighted mean of trees in the order given: float32, multiply, then add, exactly as `combine` does. Uniform by default. With
    weights one tree is asked for at a time, and beside the mean no other is held.

    >>> mean([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])["w"].item()
    2.0
    """
    if weights is None:
        trees = list(trees)
        weights = [1.0] * len(trees)
    acc: Tree = {}
    for tree, weight in zip(trees, normalised(dict(enumerate(weights))).values(), strict=True):
        if not acc:
            acc = {k: t.to(torch.float32) * weight for k, t in tree.items()}
            continue
        for k, a in acc.items():
            a.add_(tree[k].to(torch.float32) * weight)
    return acc
