"""The parameters of a run's model: the mean of its workers, from the parts of a checkpoint or as the end of the run has left it.

A checkpoint holds the anchor x of each worker. Where workers differ (gossip) the model of the run is their mean,

    x = sum_i float32(1/n) * x_i        in the order of worker ids, float32, multiply, then add,

the bits of `gossamer.core.combine.mean`. Tensors are read one at a time: the model and two of them must fit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.combine import normalised
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree
from gossamer.train import checkpoint, parts

FILE = "model.safetensors"
"""In a run folder: the model that the run has come to at its end."""


class Weights(NamedTuple):
    """Parameters that were trained."""

    tree: Tree
    """float32. What is not trained is not here."""
    round: int
    """Rounds completed."""
    tokens: int
    """Of all workers."""
    workers: tuple[int, ...]
    """Whose mean it is; one where all hold the same."""


def write(folder: Path, found: Weights) -> None:
    """Writes the model of a run into its folder, whole or not at all.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    from safetensors.torch import save_file

    about = {"order": list(found.tree), "round": found.round, "tokens": found.tokens, "workers": list(found.workers)}
    with parts.replacing(folder / FILE) as scratch:
        save_file(parts.apart(found.tree), scratch, metadata={"gossamer": json.dumps(about)})


def read(folder: Path) -> Weights | None:
    """What `write` has left there; None where it has not.

    Raises:
        RunFailed: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as f:
            about = json.loads(f.metadata()["gossamer"])
            tree = {name: f.get_tensor(name) for name in about["order"]}
        return Weights(tree, int(about["round"]), int(about["tokens"]), tuple(about["workers"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(f"{path} is damaged ({error}): put it back, or take the last checkpoint by its round") from error


def of_checkpoint(folder: Path, round: int, workers: Sequence[int]) -> Weights:
    """The mean of the anchors of `workers` in a checkpoint.

    Args:
        folder: the run's `checkpoints` folder.
        workers: seats that have a part; of one, it is that one's own.

    Raises:
        RunFailed: no such round, a worker without a part, or a damaged part.
    """
    manifest = checkpoint.read_manifest(folder, round)
    with ExitStack() as files:
        anchors = [_Anchor(files, folder, manifest, worker) for worker in workers]
        weights = normalised(dict.fromkeys(range(len(anchors)), 1.0))
        tree: Tree = {}
        for name in anchors[0].names:
            mean = anchors[0].tensor(name)
            if len(anchors) > 1:
                mean = mean.to(torch.float32) * weights[0]
                for i, anchor in enumerate(anchors[1:], start=1):
                    mean.add_(anchor.tensor(name).to(torch.float32) * weights[i])
            tree[name] = mean
    return Weights(tree, round, manifest.tokens, tuple(workers))


def shapes_of(folder: Path, round: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what is trained, as the first part of a checkpoint has it. Of its files the headers alone are read.

    Raises:
        RunFailed: no such round.
        BadInput: another release wrote it.
    """
    from safetensors import safe_open

    manifest = checkpoint.read_manifest(folder, round)
    found: dict[str, tuple[int, ...]] = {}
    worker = min(manifest.parts)
    for path, _ in checkpoint.parts_of(folder, manifest, worker):
        with safe_open(path, framework="pt") as f:
            for name in parts.about_of(f.metadata(), path, round, worker)["state"]["x"]:
                rows, *rest = f.get_slice(f"x/{name}").get_shape() or (None,)
                found[name] = () if rows is None else (rows + (found[name][0] if name in found else 0), *rest)
    return found


class _Anchor:
    """The anchor in the part of one worker, the rows of its ranks put together."""

    def __init__(self, files: ExitStack, folder: Path, manifest: checkpoint.Manifest, worker: int) -> None:
        from safetensors import safe_open

        found = checkpoint.parts_of(folder, manifest, worker)
        self._files: list[Any] = []
        for path, sha in found:
            parts.check_part(path, manifest.round, sha)
            self._files.append(files.enter_context(safe_open(path, framework="pt")))
        about = parts.about_of(self._files[0].metadata(), found[0][0], manifest.round, worker)
        self.names: list[str] = about["state"]["x"]

    def tensor(self, name: str) -> Tensor:
        rows = [file.get_tensor(f"x/{name}") for file in self._files]
        return rows[0] if len(rows) == 1 or not rows[0].ndim else torch.cat(rows)
