"""Checkpoints of the Hugging Face format to go on from: a folder, or a name on the hub. Weights are read from safetensors alone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.core.errors import BadInput, said
from gossamer.train.source import Source

WEIGHTS = "*.safetensors"
_ABOUT = ["*.json", "*.model", "*.txt"]
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def folder_of(source: Source, weights: bool = False) -> Path:
    """The folder of the checkpoint. Of a name on the hub it is that of the local cache, which is filled where it has to be.

    Args:
        weights: whether the weights are needed, too.

    Raises:
        BadInput: no such folder; no such model on the hub; or it is not in the cache, and the hub cannot be reached.
    """
    given = source.checkpoint
    try:
        path = Path(given).expanduser()
        if path.is_dir():
            return _whole(path, weights)
        there = path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of nobody
        raise BadInput(f"model.checkpoint = {given[:80]!r} cannot be read ({error}): give the path of a folder") from error
    if there:
        raise BadInput(f"model.checkpoint = {given!r} is a file: give the folder that holds config.json and *.safetensors")
    near = _meant(path)
    if not may_be_name(given):
        raise BadInput(
            f"there is no folder {given!r} (model.checkpoint): expected one with config.json and *.safetensors, or a name on the hub, "
            "such as HuggingFaceTB/SmolLM2-135M" + near
        )
    try:
        found = _fetched(given, source.revision, weights)
    except BadInput as error:
        raise BadInput(f"{error}{near}") from error
    return _whole(found, weights)


def _meant(path: Path) -> str:
    """The folder beside it whose name is most like the one that is not there, as the end of a message; empty where there is none."""
    try:
        there = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, there, n=1)
    return f". Did you mean the folder {str(path.parent / near[0])!r}?" if near else ""


def may_be_name(given: str) -> bool:
    """Whether the hub may call a model that: name, or owner/name.

    >>> [may_be_name(given) for given in ("gpt2", "HuggingFaceTB/SmolLM2-135M", "../mine", "/models/mine")]
    [True, True, False, False]
    """
    return _NAME.fullmatch(given) is not None and ".." not in given


def config_of(source: Source) -> Any:
    """The transformers configuration of the checkpoint, as it is but for caching, which training does not use.

    Raises:
        BadInput: as `folder_of`, or a configuration that the installed transformers does not know.
    """
    from transformers import AutoConfig

    folder = folder_of(source)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises errors of many kinds
            raise BadInput(
                f"the configuration of model.checkpoint = {source.checkpoint!r} cannot be used: {said(error, kind=True)}"
            ) from error
    config.use_cache = False
    return config


def load(source: Source, config: Any, attention: Mapping[str, str]) -> nn.Module:
    """The model with the weights of the checkpoint, in float32 on the CPU.

    Args:
        config: of `config_of`.
        attention: further arguments of `from_pretrained`.

    Raises:
        BadInput: weights that are not there, are not those of the configuration, or cannot be read.
    """
    from transformers import AutoModelForCausalLM

    folder = folder_of(source, weights=True)
    how: Any = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True, **attention}
    with quiet():
        try:
            model, about = AutoModelForCausalLM.from_pretrained(folder, config=config, output_loading_info=True, **how)
        except Exception as error:  # the library and torch raise errors of many kinds
            raise BadInput(f"the weights of model.checkpoint = {source.checkpoint!r} cannot be loaded: {said(error, kind=True)}") from error
    if lacking := sorted(about["missing_keys"]):
        raise BadInput(
            f"model.checkpoint = {source.checkpoint!r} lacks {len(lacking)} tensors of a {config.model_type!r} language model, such as "
            f"{lacking[0]}: give a checkpoint of a causal language model with all its weights"
        )
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says only what is an error, without bars, and talks as before afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _whole(folder: Path, weights: bool) -> Path:
    """`folder`, where it has what is needed."""
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json: give a folder as save_pretrained or gossamer export writes it (model.checkpoint)")
    if weights and not any(folder.glob(WEIGHTS)):
        old = " It has pickled weights, which are not read: save it again with safe_serialization." if any(folder.glob("*.bin")) else ""
        raise BadInput(f"{folder} has no weights in *.safetensors (model.checkpoint).{old or ' For its shape alone use model.config.'}")
    return folder


@lru_cache
def _fetched(name: str, revision: str, weights: bool) -> Path:
    """The folder of a model of the hub in the local cache. The hub is asked once: what it has under a name may change in between."""
    from huggingface_hub import errors, snapshot_download

    where = f"model.checkpoint = {name!r}"
    files = [*_ABOUT, WEIGHTS] if weights else _ABOUT
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=files))
    except errors.GatedRepoError as error:
        raise BadInput(f"{where} asks for a permit on the hub: accept its terms there, and log in with hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise BadInput(f"{where} is neither a folder nor a model on the hub that you may see: check the name, or log in") from error
    except errors.RevisionNotFoundError as error:
        raise BadInput(f"{where} has no revision {revision!r} on the hub: give a branch, tag or commit that it has") from error
    except Exception as error:  # of the library for its cache, and of its libraries for the network
        raise BadInput(
            f"{where} is not a folder, and not in the local cache of the hub, which cannot be reached from here now "
            f"({said(error, kind=True, most=120)}). With a network it is downloaded; without one, copy it here and give its folder, or "
            f"fetch it before with: hf download {name}"
        ) from error
