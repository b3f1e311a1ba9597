"""Records that the app adds to what the worlds note."""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np
import torch

import gossamer
from gossamer.app.job import Job
from gossamer.core.tree import numel
from gossamer.train.data import Corpus


def evaluation(round: int, worker: int | str, tokens: int, time_s: float, loss: float, distance: float | None = None) -> dict[str, Any]:
    """A validation record of one worker's parameters, or of the mean of the "fleet"."""
    record: dict[str, Any] = {
        "kind": "eval",
        "round": round,
        "worker": worker,
        "tokens": tokens,
        "time_s": time_s,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
    }
    return record if distance is None else record | {"consensus_distance": distance}


def facts_of(job: Job, corpus: Corpus, world: str) -> dict[str, Any]:
    """What a run depends on and its configuration does not say."""
    return {
        "world": world,
        "gossamer": gossamer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "corpus": corpus.name,
        "corpus_sha256": corpus.content_hash,
        "train_tokens": len(corpus.train),
        "valid_tokens": len(corpus.valid),
        "vocab_size": corpus.vocab_size,
        "parameters": numel(job.layout),
        "steps": list(job.method.plan.steps),
        "batch": list(job.method.plan.batch),
    }
