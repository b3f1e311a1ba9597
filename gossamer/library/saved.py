"""The outer state of a worker as a flat dictionary of tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossamer.core.errors import BadInput
from gossamer.core.tree import Tree
from gossamer.train.packing import pack_state, unpack_state
from gossamer.train.parts import replacing
from gossamer.worker.state import State

FORMAT = 1


class Place(NamedTuple):
    """Which run and worker a state is of."""

    worker: int
    workers: int
    method: str
    """A mark of the method and of the model's layout."""


class Partial(NamedTuple):
    """How far a worker has come in a round."""

    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0


def pack(place: Place, state: State, partial: Partial, live: Tree | None) -> dict[str, Any]:
    """Copies of everything. `live`: the worker's parameters, where the state does not tell them."""
    tensors: Tree = {}
    about = pack_state(state, tensors)
    tensors |= {f"live/{name}": value for name, value in (live or {}).items()}
    return {
        "format": FORMAT,
        **place._asdict(),
        "about": about,
        "partial": list(partial),
        "tensors": {name: value.detach().clone() for name, value in tensors.items()},
    }


def write(saved: Mapping[str, Any], path: Path) -> None:
    """Writes what `pack` gave, for `torch.load`, whole or not at all.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    with replacing(path) as scratch:
        torch.save(saved, scratch)


def unpack(saved: Mapping[str, Any], place: Place, own: Tree, device: torch.device) -> tuple[State, Partial, Tree]:
    """What `pack` gave; the live parameters are empty where the state tells them.

    Args:
        own: parameters of the model that joined.

    Raises:
        BadInput: the state is of another release, worker, number of workers, method or model, or not whole.
    """
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise BadInput("this is no state of gossamer.join, or one of another release: expected what outer.state_dict() has given")
    try:
        for what, mine in place._asdict().items():
            if saved[what] != mine:
                words = {
                    "worker": f"the state is of worker {saved[what]}, and this is worker {mine}: give each worker its own",
                    "workers": f"the state is of a run of {saved[what]} workers, and here are {mine}: start as many",
                    "method": "the state is of another method, plan or model: join with what the run began with",
                }
                raise BadInput(words[what])
        tensors: Tree = {name: value.clone() for name, value in saved["tensors"].items()}  # the state is written to in place
        live = {name.removeprefix("live/"): value for name, value in tensors.items() if name.startswith("live/")}
        state, partial = unpack_state(saved["about"], tensors, device), Partial(*saved["partial"])
        for tree in (state.x, live) if live else (state.x,):
            if odd := [k for k in own.keys() | tree.keys() if k not in own or k not in tree or own[k].shape != tree[k].shape]:
                raise ValueError(f"{min(odd)!r} is missing, or not of the model's shape")
    except BadInput:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadInput(f"the state of worker {place.worker} is not whole ({said}): give all that outer.state_dict() has given") from error
    return state, partial, live
