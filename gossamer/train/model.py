"""Causal language models: Llama presets by name, or any configuration that transformers' AutoModelForCausalLM knows. Nothing is downloaded.

>>> counts = {name: round(parameter_count(name) / 1e6, 1) for name in PRESETS}
>>> counts["tiny"], counts["llama-134m"], counts["llama-551m"]
(0.6, 134.1, 551.3)
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, words
from gossamer.core.tree import Layout, layout_of

Spec: TypeAlias = str | Path | Mapping[str, Any]
"""A preset's name, a configuration ({"model_type": "gpt2", ...}), or the path of one (a config.json or the folder that holds it)."""


@dataclass(frozen=True)
class Llama:
    """The shape of a Llama. Multi-head attention, RoPE 10000, SwiGLU, RMS norm eps 1e-5, no biases, no dropout."""

    layers: int
    width: int
    heads: int
    ffn: int
    """Inner width of the feed-forward block."""
    vocab: int
    """Vocabulary where the data does not decide it."""
    tied: bool
    """One matrix for the embedding and the output layer."""


PRESETS: Mapping[str, Llama] = MappingProxyType(
    {
        "nano": Llama(2, 32, 2, 96, 512, tied=True),  # 0.04M: for studies of many workers and many rounds
        "micro": Llama(2, 64, 4, 192, 512, tied=True),  # 0.14M: for tables of hundreds of runs on two cores
        "tiny": Llama(2, 128, 4, 384, 1024, tied=True),  # 0.56M: a demonstration on a CPU
        "small": Llama(6, 256, 4, 704, 2048, tied=True),  # 5.3M
        # Cagnasso, Belilovsky, Oyallon 2026 (GASLoC): 134.1M and 551.3M.
        "llama-134m": Llama(12, 768, 12, 2048, 32_000, tied=False),
        "llama-551m": Llama(16, 1536, 24, 4096, 32_000, tied=False),
        # The shapes of GeoMesh's 150M, 300M and 500M are not published; these are ours: 148.3M, 296.8M, 494.7M.
        "llama-150m": Llama(14, 768, 12, 2048, 32_000, tied=False),
        "llama-300m": Llama(18, 1024, 16, 2816, 32_000, tied=False),
        "llama-500m": Llama(14, 1536, 24, 4096, 32_000, tied=False),
    }
)
POSITIONS = 8192
"""Longest sequence that a preset declares (RoPE itself has no table to outgrow)."""


def build(spec: Spec, vocab_size: int | None, seed: int) -> nn.Module:
    """A float32 model on the CPU, its weights a pure function of (spec, vocab_size, seed). The caller's random state stays as it was.

    Initialisation is the architecture's own (Llama: normal, 0.02), and in Llama-like blocks the two projections that write to the
    residual stream (`o_proj`, `down_proj`) are scaled by 1 / sqrt(2 layers), so that the stream's variance does not grow with depth;
    GPT-2 does so itself.

    Args:
        vocab_size: the tokenizer's; None for the preset's or the configuration's own.

    Raises:
        BadInput: unknown preset, model type or setting, or a configuration that cannot be built.
    """
    config = configuration(spec, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(words(1, seed, Stream.INIT)[0] >> 1))
        model = _instantiate(config)
    layers = getattr(config, "num_hidden_layers", 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if layers and name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(1.0 / math.sqrt(2.0 * layers))
            if not p.is_contiguous():  # flat ranges of parameters travel
                p.data = p.data.contiguous()
    return model


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, in the model's order; tied ones once, under their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def by_row(model: nn.Module) -> frozenset[str]:
    """Names of embeddings (of tokens and of positions) and of the output layer: tensors whose rows live apart."""
    heads = [m for m in (_output_layer(model),) if m is not None]
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)] + [m.weight for m in heads]
    found = {id(p) for p in tables}
    return frozenset(name for name, p in parameters_of(model).items() if id(p) in found)


def layout(model: nn.Module) -> Layout:
    """What an exchange of the whole model carries."""
    return layout_of(parameters_of(model), by_row(model))


def meta_model(spec: Spec, vocab_size: int | None = None) -> nn.Module:
    """The model without its weights (device "meta"): shapes cost no memory."""
    config = configuration(spec, vocab_size)
    with torch.device("meta"):
        return _instantiate(config)


def meta_layout(spec: Spec, vocab_size: int | None = None) -> Layout:
    """:func:`layout` of `spec`, without allocating it."""
    return layout(meta_model(spec, vocab_size))


def rows(spec: Spec, vocab_size: int | None = None) -> dict[str, int]:
    """Rows of each trainable parameter (its first dimension; 1 of a scalar), without allocating them: what ranks cut."""
    return {name: p.shape[0] if p.ndim else 1 for name, p in parameters_of(meta_model(spec, vocab_size)).items()}


def parameter_count(spec: Spec, vocab_size: int | None = None) -> int:
    """Parameters of `spec`, tied ones once, without allocating them."""
    return sum(p.numel() for p in meta_model(spec, vocab_size).parameters())


def flops_per_token(spec: Spec, sequence: int, vocab_size: int | None = None) -> float:
    """Floating-point operations to train on one token: 6 N + 12 layers width sequence.

    N counts the weights that multiply: all parameters, less embedding tables that are only looked up (untied ones). The second term is
    attention's two products, forward and backward, with the causal half not discounted (Chowdhery et al. 2022, appendix B).
    """
    model = meta_model(spec, vocab_size)
    head = _output_layer(model)
    lookups = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    if head is not None:
        lookups.pop(id(head.weight), None)
    n = sum(p.numel() for p in model.parameters()) - sum(lookups.values())
    config: Any = model.config
    return 6.0 * n + 12.0 * config.num_hidden_layers * config.hidden_size * sequence


def longest_sequence(model: nn.Module) -> int | None:
    """The most positions that the model declares; None where it declares none."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def configuration(spec: Spec, vocab_size: int | None = None) -> Any:
    """The transformers configuration of `spec`.

    Raises:
        BadInput: as :func:`build`.
    """
    if isinstance(spec, str) and spec in PRESETS:
        return _llama(PRESETS[spec], vocab_size)
    return _auto(dict(spec) if isinstance(spec, Mapping) else _read(spec), vocab_size)


def _llama(shape: Llama, vocab_size: int | None) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab if vocab_size is None else vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )


def _auto(given: dict[str, Any], vocab_size: int | None) -> Any:
    from transformers import AutoConfig

    kind = given.pop("model_type", None)
    if not isinstance(kind, str):
        raise BadInput(
            f"the model configuration has model_type {kind!r}; expected a name that transformers knows, such as 'gpt2' or 'llama'"
        )
    with _quiet():
        try:
            known = AutoConfig.for_model(kind)
        except ValueError as error:
            raise BadInput(
                f"model_type {kind!r} is not one that the installed transformers knows; expected for example 'llama', 'gpt2' or 'gpt_neox'"
            ) from error
        names = set(known.to_dict()) | set(known.attribute_map)
        for key in given:
            if key not in names and not key.startswith("_"):
                near = difflib.get_close_matches(key, sorted(names), n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise BadInput(f"a {kind!r} model has no setting {key!r}{hint}: correct or remove it")
        size = {} if vocab_size is None else {"vocab_size": vocab_size}
        # Ids of another vocabulary are only warned about; training does not use them.
        special = {k: given.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        try:
            return AutoConfig.for_model(kind, **{**given, **size, **special, "use_cache": False})
        except Exception as error:  # the library raises errors of many kinds
            raise _unbuildable(kind, error) from error


def _unbuildable(kind: str, error: Exception) -> BadInput:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return BadInput(f"a {kind!r} model cannot be built from this configuration: {said}. Correct model.config")


def _read(spec: str | Path) -> dict[str, Any]:
    try:
        path = Path(spec).expanduser()
        path = path / "config.json" if path.is_dir() else path
        there = path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of nobody
        raise BadInput(f"the model configuration {str(spec)[:80]!r} cannot be read ({error}): give the path of a config.json") from error
    if not there:
        near = difflib.get_close_matches(str(spec), list(PRESETS), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadInput(
            f"model {str(spec)!r} is neither a preset nor a file; expected one of {', '.join(PRESETS)}, "
            f"or the path of a config.json{hint}. Nothing is downloaded"
        )
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"the model configuration {path} cannot be read as JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadInput(f"the model configuration {path} is a JSON {type(given).__name__}; expected an object")
    return {k: v for k, v in given.items() if k not in ("architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")}


def _instantiate(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # the library and torch raise errors of many kinds
            raise _unbuildable(config.model_type, error) from error
    if not any(p.numel() for p in model.parameters()):
        raise BadInput(f"a {config.model_type!r} model of this configuration has no parameters: raise its sizes")
    return model.train()


def _output_layer(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers says only what is an error, and talks as before afterwards."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
