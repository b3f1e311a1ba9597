"""A worker's checkpoint for another number of ranks: the rows of its parts put together, and cut anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.outer import STEP
from gossamer.core.ranges import rows_of


class Place(NamedTuple):
    """One rank of a worker."""

    rank: int
    ranks: int
    rows: Mapping[str, int] | None = None
    """Of each parameter of the whole model, its first dimension; only wanted where parts are written."""


ALONE = Place(0, 1)


def cut_anew(parts: Sequence[tuple[dict[str, Any], dict[str, Tensor]]], place: Place) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a rank goes on from.

    Args:
        parts: (values, tensors) of all ranks of the worker, in their order, as the checkpoint has them.

    Raises:
        BadInput: an exchange was in flight, whose packets are of the ranks that sent them.
    """
    about, first = parts[0]
    was, own = len(parts), place.rank if place.rank < len(parts) else 0
    if any(stream["pending"] for stream in about["state"]["streams"]):
        raise BadInput(
            f"the checkpoint has an exchange in flight, as overlap has it, between workers one of which had {was} ranks and has "
            f"{place.ranks} now: resume with as many as before"
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in first.items():
        if not is_cut(name, tensor):
            tensors[name] = parts[own][1][name]
            continue
        whole = torch.cat([of_rank[name] for _, of_rank in parts])
        lo, hi = rows_of(len(whole), place.ranks, place.rank)
        tensors[name] = whole[lo:hi].clone()
    if place.rank >= was:  # a rank that was not there draws random numbers of its own
        order = [key for key in about["body"]["order"] if "/" in key or f"body/{key}" not in first]
        about = {**about, "body": {**about["body"], "order": order}}
    return about, tensors


def is_cut(name: str, tensor: Tensor) -> bool:
    """Whether a rank has its rows of it. Every rank has all of numbers, counts of steps, buffers and random states."""
    kind, _, rest = name.partition("/")
    if kind == "body":
        return tensor.ndim > 0 and "/" in rest and not rest.startswith("buffer/")
    return tensor.ndim > 0 and not name.startswith(f"outer/{STEP}/")
