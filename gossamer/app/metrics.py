"""Records that the app adds to what the worlds note."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

import gossamer
from gossamer.app.job import Job
from gossamer.core.errors import BadInput
from gossamer.core.tree import numel
from gossamer.train.data import Corpus
from gossamer.train.evaluate import perplexity


def evaluation(round: int, worker: int | str, tokens: int, time_s: float, loss: float, distance: float | None = None) -> dict[str, Any]:
    """A validation record of one worker's parameters, or of the mean of the "fleet"."""
    record: dict[str, Any] = {
        "kind": "eval",
        "round": round,
        "worker": worker,
        "tokens": tokens,
        "time_s": time_s,
        "loss": loss,
        "perplexity": perplexity(loss),
    }
    return record if distance is None else record | {"consensus_distance": distance}


def facts_of(job: Job, corpus: Corpus, world: str) -> dict[str, Any]:
    """What a run depends on and its configuration does not say."""
    return {
        "world": world,
        "run_id": f"{job.run_id:016x}",
        "gossamer": gossamer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "corpus": corpus.name,
        "corpus_sha256": corpus.content_hash,
        "train_tokens": len(corpus.train) if corpus.reading is None else None,
        "valid_tokens": len(corpus.valid),
        "vocab_size": corpus.vocab_size,
        "parameters": numel(job.layout),
        "frozen_parameters": job.outline.frozen[0],
        "frozen_digest": job.models.frozen_digest,
        "steps": list(job.method.plan.steps),
        "batch": list(job.method.plan.batch),
    }


def check_unchanged(job: Job, corpus: Corpus, facts: dict[str, Any], remedy: str = "put it back, or start a new run") -> None:
    """Refuses to resume a run under other circumstances than it began: it would no longer be the same run.

    Raises:
        BadInput: naming what has changed.
    """
    now = facts_of(job, corpus, facts["world"])
    for key, what in (
        ("run_id", "the configuration, or the fleet or model file that it names"),
        ("corpus_sha256", f"the text of {corpus.name}"),
        ("frozen_digest", f"what is not trained of the model, which comes from {job.origin}"),
        ("torch", "the version of torch"),
    ):
        if facts.get(key) != now[key]:
            raise BadInput(f"{what} has changed since the run began ({key} was {facts.get(key)}, is {now[key]}): {remedy}")
