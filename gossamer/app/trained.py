"""The model of a run folder, to evaluate or to take elsewhere.

    found = load(Path("runs/demo"))
    found.model, found.tokenizer        # as transformers have them

Its parameters are the fleet's mean: what all workers of a synchronous method hold, the mean over the workers of a gossip method, the global
server's where there are servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.app.config import load as read_config
from gossamer.app.folder import TOKENIZER, RunFolder
from gossamer.app.job import Job, resolve
from gossamer.app.settings import Config
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.tree import Tree, sha256
from gossamer.train import checkpoint, weights
from gossamer.train.adapt import merged
from gossamer.train.model import longest_sequence, parameters_of
from gossamer.train.tokenizer import as_transformers
from gossamer.train.weights import Weights


class Trained(NamedTuple):
    """What a run has come to."""

    model: Any
    """A model of transformers, float32, on the CPU, in evaluation mode. Tensors that are not trained are as the configuration has them, and
    adapters are merged into the matrices that they were beside."""
    tokenizer: Any
    """A `transformers.PreTrainedTokenizerFast`."""
    config: Config
    round: int
    """Rounds completed."""
    tokens: int
    """Of all workers."""
    workers: tuple[int, ...] = ()
    """Whose mean it is; one where all hold the same."""


def load(folder: Path, round: int | None = None, *, merge: bool = True) -> Trained:
    """The model of a run.

    Args:
        folder: a run folder.
        round: that of one of its checkpoints; None: the end of the run, where it has come to it, else the last whole checkpoint.
        merge: adapters go into the matrices that they are beside; otherwise the model is a `PeftModel`, where it has adapters.

    Raises:
        BadInput: no run folder, none trained yet, no such checkpoint, or one of another model.
        RunFailed: a damaged file.
    """
    run = RunFolder.existing(folder)
    job = resolve(read_config([folder / "config.toml"]))
    found = _weights(run, job, round)
    if (mark := run.facts().get("frozen_digest")) != job.models.frozen_digest:
        raise BadInput(
            f"what is not trained of the model comes from {job.origin}, and is not what the run in {folder} had ({mark}, now "
            f"{job.models.frozen_digest}): put it back"
        )
    model = job.models.whole()
    put(model, found.tree, f"the checkpoint of round {found.round} in {folder}")
    model = merged(model) if merge else model
    return Trained(model.eval(), tokenizer(run, job, longest_sequence(model)), job.config, found.round, found.tokens, found.workers)


def put(model: nn.Module, tree: Tree, what: str) -> None:
    """Sets the trainable parameters of `model`, all of them.

    Raises:
        BadInput: `tree` is of another model; `what` says where it comes from.
    """
    own = parameters_of(model)
    _check_shapes(_shapes(own), _shapes(tree), what)
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(tree[name])


def check_model(job: Job, run: RunFolder, round: int) -> None:
    """That a checkpoint of a run to resume is of the model of its configuration.

    Raises:
        BadInput: it is not, or another release wrote it.
        RunFailed: no such round.
    """
    own = _shapes(parameters_of(job.outline.meta))
    _check_shapes(own, weights.shapes_of(run.checkpoints, round), f"the checkpoint of round {round} in {run.path}")


def _shapes(tree: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tree.items()}


def _check_shapes(own: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str) -> None:
    for name in [*own, *(n for n in found if n not in own)]:
        here, there = (f"shape {shapes[name]}" if name in shapes else "none of that name" for shapes in (own, found))
        if here != there:
            raise BadInput(
                f"{what} is of another model: of {name} it has {there}, and the model of the configuration {here}. Put the checkpoints and "
                "the config.toml of one run together"
            )


def tokenizer(run: RunFolder, job: Job, longest: int | None) -> Any:
    """The tokenizer of a run, as transformers have it.

    Args:
        longest: tokens that the model takes at most.

    Raises:
        BadInput: the folder does not hold it, and the data of which it was made are gone or changed.
    """
    kept = run.path / TOKENIZER
    if kept.is_dir():
        return as_transformers(kept, longest)
    return as_transformers("bytes" if job.config.data.tokenizer == "bytes" else job.corpus().tokenizer, longest)


def _weights(run: RunFolder, job: Job, round: int | None) -> Weights:
    """The fleet's mean."""
    if round is None and run.finished and (end := weights.read(run.path)) is not None:
        _check_end(run, end)
        return end
    folder = run.checkpoints
    found = checkpoint.latest(folder) if round is None else round
    there = checkpoint.closed(folder)
    if found is None:
        raise BadInput(
            f"{run.path} has no whole checkpoint: nothing is trained yet, or it was not kept. Set checkpoint.every, or let it end"
        )
    if found not in there:
        kept = f"there are rounds {', '.join(map(str, there))}" if there else "there is none"
        raise BadInput(f"{run.path} has no checkpoint of round {found}: {kept} (checkpoint.every and checkpoint.keep)")
    return weights.of_checkpoint(folder, found, _whose(run, job, checkpoint.read_manifest(folder, found)))


def _check_end(run: RunFolder, end: Weights) -> None:
    """That the model is the one that the summary was made of. Older runs do not say.

    Raises:
        RunFailed: it is not.
    """
    said = run.summary()
    if "model_sha256" not in said:
        return
    of_summary, of_file = (said["model_sha256"], said.get("tokens")), (sha256(end.tree), end.tokens)
    if of_summary != of_file:
        there, here = (f"SHA-256 {str(mark)[:12]}... after {tokens} tokens" for mark, tokens in (of_summary, of_file))
        raise RunFailed(
            f"{run.path / weights.FILE} is damaged, or of another run: the summary has {there}, the file {here}. Put it back, or take the "
            "last checkpoint by its round"
        )


def _whose(run: RunFolder, job: Job, manifest: checkpoint.Manifest) -> list[int]:
    """The seats whose anchors make up the model."""
    workers = sorted(w for w in manifest.parts if w < job.n)
    if tiers := job.method.tiers:
        if tiers.top not in manifest.parts:
            raise BadInput(
                f"the checkpoint of round {manifest.round} in {run.path} has no part of the global server, whose parameters are the model "
                "of the run: take the folder of the site that holds it"
            )
        return [tiers.top]
    if job.method.synchronous:
        return workers[:1]
    if run.facts()["world"] == "wan" and job.n > 1:
        raise BadInput(
            f"{run.path} is the folder of one site, whose checkpoint of round {manifest.round} has its own parameters alone, and the model "
            "of the run is the mean over all sites: take the folder of the site that has made the summary, at the end of the run"
        )
    return workers
