"""What of a model is trained: adapters beside its matrices, and parameters that stay as they are.

Whatever does not ask for a gradient is never exchanged, has no optimizer state and no anchor.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from gossamer.core.errors import BadInput, said
from gossamer.train.source import Adapter

EXTRA = "model.adapter needs the peft library: pip install 'gossamer[peft]'"


def adapt(model: nn.Module, adapter: Adapter) -> nn.Module:
    """A `PeftModel` around `model`, whose own parameters are frozen. A is drawn from torch's random state.

    Raises:
        BadInput: peft is not installed, or the targets are not modules that can have an adapter.
    """
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise BadInput(EXTRA) from error
    targets = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        modules_to_save=list(adapter.whole) or None,
        use_rslora=adapter.rslora,
    )
    absent = [name for name in adapter.whole if not any(_ends(known, name) for known, _ in model.named_modules())]
    if absent:
        raise BadInput(f"model.adapter.whole: no module of the model has a name that ends in {absent[0]!r}{_near(absent[0], model)}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"peft\.")  # that GPT-2 keeps its matrices transposed, which peft then sees to
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about names that peft still uses
        try:
            return get_peft_model(model, config)
        except Exception as error:  # the library raises errors of many kinds
            near = "" if isinstance(targets, str) else next(filter(None, (_near(t, model) for t in targets)), "")
            raise BadInput(f"model.adapter.targets = {targets!r} cannot be had: {said(error, kind=True)}{near}") from error


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Takes parameters out of training: those whose name, or the name of a module that they are in, matches a pattern (*, ? and [...]
    as in file names). A tied parameter has several names, and any will do.

    Raises:
        BadInput: a pattern that matches nothing which is trained, or nothing is left to train.
    """
    trained = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    for pattern in patterns:
        found = [p for name, p in trained if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not found:
            near = difflib.get_close_matches(pattern, [name for name, _ in trained], n=1, cutoff=0.3) or [trained[0][0]]
            raise BadInput(f"model.freeze: {pattern!r} matches no parameter that is trained; their names are like {near[0]!r}")
        for p in found:
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput(f"model.freeze = {list(patterns)} leaves nothing to train: freeze less")


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is one of the thin matrices of an adapter."""
    return ".lora_" in name


def merged(model: nn.Module) -> nn.Module:
    """The model that an adapted one computes, W + (alpha / rank) B A in one matrix, in place; a model without adapters as it is."""
    whole: Any = getattr(model, "merge_and_unload", None)
    return whole() if callable(whole) else model


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _near(word: str, model: nn.Module) -> str:
    """A hint at the module that may be meant."""
    names = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if next(m.children(), None) is None} - {""})
    near = difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near and near[0] != word else f". Modules of the model: {', '.join(names[:12])}"
