"""`gossamer export`: the model of a run as a folder that transformers, and what builds on it, load."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from gossamer.app.card import card_of
from gossamer.app.folder import RunFolder
from gossamer.app.trained import Trained, load
from gossamer.core.errors import BadInput, RunFailed
from gossamer.train.pretrained import quiet


def export(run: Path, to: Path, round: int | None = None) -> Path:
    """Writes safetensors, configuration, tokenizer, generation settings and a model card to the new folder `to`. All of it or nothing.

    The parameters have the type of the run (`model.dtype`), tied ones are stored once.

    Args:
        run: a run folder.
        round: as of :func:`gossamer.app.trained.load`.

    Raises:
        BadInput: as `load`; or `to` holds something already.
        RunFailed: the disk is full or cannot be written.
    """
    _check_new(to)
    found = load(run, round)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    except OSError as error:
        raise _unwritable(to, error) from error
    try:
        scratch.chmod(0o755)  # mkdtemp's is for its owner alone
        _write(found, scratch)
        (scratch / "README.md").write_text(card_of(found, RunFolder.existing(run)), encoding="utf-8")
        os.replace(scratch, to)  # an empty folder gives way
    except OSError as error:
        raise _unwritable(to, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return to


def _write(found: Trained, to: Path) -> None:
    """All but the card."""
    model = found.model
    if found.config.model.dtype == "bf16":
        model = model.to(torch.bfloat16)
    config, ends = model.config, found.tokenizer
    config.use_cache = True
    for place in (config, getattr(model, "generation_config", None)):
        if place is not None:
            place.eos_token_id = ends.eos_token_id if place.eos_token_id is None else place.eos_token_id
            place.pad_token_id = ends.pad_token_id if place.pad_token_id is None else place.pad_token_id
    with quiet():
        model.save_pretrained(to)
    found.tokenizer.save_pretrained(to)


def _check_new(to: Path) -> None:
    try:
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise BadInput(f"{to} exists{' and is not empty' if to.is_dir() else ', and is a file'}: choose another folder with --to")
    except OSError as error:
        raise _unwritable(to, error) from error


def _unwritable(to: Path, error: OSError) -> RunFailed:
    return RunFailed(f"{to} cannot be written ({error.strerror}): free some space, or choose another folder with --to")
