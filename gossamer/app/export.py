"""`gossamer export`: the model of a run as a folder that transformers, and what builds on it, load."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from gossamer.app.card import card_of
from gossamer.app.early import check_free, unwritable
from gossamer.app.folder import RunFolder
from gossamer.app.trained import Trained, load
from gossamer.core.errors import BadInput
from gossamer.train.pretrained import quiet


def export(run: Path, to: Path, round: int | None = None, *, adapter: bool = False) -> Path:
    """Writes safetensors, configuration, tokenizer, generation settings and a model card to the new folder `to`. All of it or nothing.

    The parameters have the type of the run (`model.dtype`), tied ones are stored once.

    Args:
        run: a run folder.
        round: as of `gossamer.app.trained.load`.
        adapter: write the adapter alone, as peft has it, to be put on the checkpoint that the run went on from.

    Raises:
        BadInput: as `load`; `to` holds something already; or an adapter is asked for and there is none, or none of a checkpoint.
        RunFailed: the disk is full or cannot be written.
    """
    from safetensors import SafetensorError

    check_free(to)
    found = load(run, round, merge=not adapter)
    if adapter:
        _check_adapter(run, found)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    except OSError as error:
        raise unwritable(to, error) from error
    try:
        scratch.chmod(0o755)  # mkdtemp's is for its owner alone
        (_write_adapter if adapter else _write)(found, scratch)
        card = scratch / "README.md"
        card.write_text(card_of(found, RunFolder.existing(run)), encoding="utf-8")
        for file in scratch.iterdir():  # safetensors makes files that nobody else may read
            file.chmod(card.stat().st_mode)
        os.replace(scratch, to)  # an empty folder gives way
    except Exception as error:
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:  # as the tokenizers library raises for a full disk
            raise unwritable(to, error) from error
        raise
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
    config.eos_token_id = ends.eos_token_id if config.eos_token_id is None else config.eos_token_id
    # Not in the configuration: the embedding of a symbol for padding is not trained, and here that symbol is the end mark.
    if (said := getattr(model, "generation_config", None)) is not None:
        said.eos_token_id = ends.eos_token_id if said.eos_token_id is None else said.eos_token_id
        said.pad_token_id = ends.pad_token_id if said.pad_token_id is None else said.pad_token_id
    with quiet():
        model.save_pretrained(to)
    found.tokenizer.save_pretrained(to)


def _write_adapter(found: Trained, to: Path) -> None:
    """All but the card. Nothing of the checkpoint beside it is looked up."""
    for config in found.model.peft_config.values():
        config.base_model_name_or_path = found.config.model.checkpoint
        config.revision = found.config.model.revision or None
    found.model.save_pretrained(to, save_embedding_layers=False)
    found.tokenizer.save_pretrained(to)


def _check_adapter(run: Path, found: Trained) -> None:
    model = found.config.model
    if not model.adapter.rank:
        raise BadInput(f"the run in {run} has no adapter (model.adapter.rank = 0): leave --adapter out")
    if not model.checkpoint:
        raise BadInput(
            f"the adapter of the run in {run} is beside a model that was drawn by its seed, not beside a checkpoint (model.checkpoint), "
            "on which others could put it: leave --adapter out, to export both in one"
        )
