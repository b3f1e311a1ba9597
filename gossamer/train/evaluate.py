"""Validation loss on fixed windows: the same ones for every worker, method and world."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gossamer.core.errors import BadInput
from gossamer.core.tree import Tree
from gossamer.train.compute import Precision, mean_loss, to_device
from gossamer.train.data import Corpus
from gossamer.train.model import parameters_of
from gossamer.train.shard import folded, is_cut, local_parameters


class Evaluation(NamedTuple):
    """What `evaluate` found."""

    loss: float
    """Mean over tokens, in nats."""
    tokens: int


def windows(tokens: int, sequences: int, length: int) -> NDArray[np.int64]:
    """Starts of `sequences` evenly spaced windows of `length` + 1 among `tokens`; the first at 0, the last at the end. Where there is
    no room for so many side by side they overlap.

    >>> windows(tokens=101, sequences=3, length=20).tolist()
    [0, 40, 80]
    """
    if sequences < 1 or length < 1:
        raise BadInput(f"evaluation on {sequences} sequences of {length} tokens; expected at least 1 of each")
    room = tokens - length - 1
    if room < 0:
        raise BadInput(
            f"the validation text has {tokens} tokens, too few for a window of {length} + 1: give more text or shorten the sequence"
        )
    return np.arange(sequences, dtype=np.int64) * room // max(1, sequences - 1)


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, sequences: int, length: int, batch: int = 16, precision: Precision = "fp32") -> Evaluation:
    """Loss of `model` on evenly spaced validation windows. Draws no random number, and leaves the model in the mode it was in.

    Args:
        sequences: windows in all.
        length: tokens predicted per window.
        batch: windows at a time; bounds memory. (float32 sums of another batch size may differ in the last bits.)
    """
    starts = windows(len(corpus.valid), sequences, length)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    was = {m: m.training for m in model.modules()}
    model.eval()
    try:
        for some in np.split(starts, range(batch, len(starts), batch)):
            rows = torch.from_numpy(corpus.valid[some[:, None] + np.arange(length + 1)].astype(np.int64))
            total += mean_loss(model, to_device(rows, device), precision, reduction="none").double().sum()
    finally:
        for m, training in was.items():
            m.training = training
    tokens = len(starts) * length
    return Evaluation(float(total) / tokens, tokens)


def evaluate_tree(
    scratch: nn.Module, tree: Tree, corpus: Corpus, sequences: int, length: int, batch: int = 16, precision: Precision = "fp32"
) -> Evaluation:
    """Loss of the parameters `tree` (the fleet's mean, an anchor), put into `scratch`: a model of the same shape that trains nothing, so
    that nobody's parameters, optimizer or random state are touched. Of a model that was cut, `tree` is this rank's shard; all ranks call
    it, and all get the loss that one rank would."""
    cut = is_cut(scratch)
    params = local_parameters(scratch) if cut else parameters_of(scratch)
    with torch.no_grad():
        for name, value in tree.items():
            params[name].copy_(value)
    found = evaluate(scratch, corpus, sequences, length, batch, precision)
    if cut:
        folded(scratch)
    return found


def perplexity(loss: float) -> float:
    """exp(loss), infinite where it overflows.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf
