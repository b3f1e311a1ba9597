"""What is evaluated: the model of a run folder, or a folder in Hugging Face's format; and the text that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gossamer.app import trained
from gossamer.app.config import load as read_config
from gossamer.app.early import check_model_folder, unknown_text
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.zeroshot import texts
from gossamer.core.errors import BadInput, RunFailed, said
from gossamer.core.tree import sha256
from gossamer.train.compute import device_named
from gossamer.train.model import longest_sequence
from gossamer.train.pretrained import quiet

HELD_OUT = "the run's held-out text"
_TOKENS = 2_000_000
"""Of held-out text so much is looked at: more than the embedded suite can use."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate."""

    folder: Path
    model: nn.Module
    tokenizer: Any
    longest: int
    """Tokens that it sees at once: what the run was trained with, or what the model declares."""
    run: RunFolder | None
    """None: a folder in Hugging Face's format."""
    about: dict[str, Any]
    """For the record: whose model it is."""


def load(folder: Path, round: int | None = None, length: int | None = None) -> Subject:
    """The model in a folder, on the GPU where there is one.

    Args:
        round: of a run: as of `gossamer.app.trained.load`.
        length: tokens that the model shall see at once.

    Raises:
        BadInput: neither a run nor a model, or nothing is trained yet.
        RunFailed: a damaged file, or a model that has diverged.
    """
    check_model_folder(folder, round)
    about: dict[str, Any] = {}
    run = None
    if (folder / "config.toml").is_file():
        found = trained.load(folder, round)
        model, tokenizer, longest = found.model, found.tokenizer, found.config.plan.sequence
        run, about = RunFolder(folder), {"round": found.round, "tokens": found.tokens}
    else:
        model, tokenizer = _pretrained(folder)
        longest = longest_sequence(model) or 2048
    whole = {name: t.detach() for name, t in model.named_parameters()}
    if not all(bool(torch.isfinite(t).all()) for t in whole.values()):
        raise RunFailed(f"the model of {folder} has parameters that are not finite: it has diverged, and there is nothing to evaluate")
    about |= {"parameters": sum(t.numel() for t in whole.values()), "model_sha256": sha256(whole)}
    return Subject(folder, model.to(device_named("auto")).eval(), tokenizer, length or longest, run, about)


def _pretrained(folder: Path) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
            return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises errors of many kinds
        raise BadInput(
            f"the model in {folder} cannot be loaded ({said(error, kind=True)}): give a whole one, with its tokenizer"
        ) from error


def held_out(subject: Subject, source: str | None, column: str | None = None) -> Iterator[str]:
    """Documents for the embedded suite.

    Args:
        source: "stdlib", a folder or a file, of which the part is taken that a run on it would hold out; None: the held-out part of the
            run's own data.
        column: of `source`, as of `gossamer.app.zeroshot.texts.held_out`.

    Raises:
        BadInput: no such text; or it is not the run's any more; or the subject is no run and no text is named.
    """
    if source is not None:
        return iter(texts.held_out(source, column))
    if subject.run is None:
        raise unknown_text(subject.folder)
    job = resolve(read_config([subject.folder / "config.toml"]))
    corpus = job.corpus()
    if corpus.content_hash != subject.run.facts()["corpus_sha256"]:
        raise BadInput(
            f"the data of {subject.folder} have changed since it ran, and what is held out now may have been trained on: put them back, or "
            "name another text with --text FOLDER"
        )
    return _decoded(subject.tokenizer, np.asarray(corpus.valid[:_TOKENS]), corpus.eos)


def _decoded(tokenizer: Any, ids: np.ndarray, end: int) -> Iterator[str]:
    """The documents between the end marks."""
    for part in np.split(ids, np.flatnonzero(ids == end)):
        if len(words := part[part != end]):
            yield tokenizer.decode(words, clean_up_tokenization_spaces=False)
