"""Causal language models: Llama presets by name, any configuration that transformers' AutoModelForCausalLM knows, or a checkpoint of one.

>>> counts = {name: round(parameter_count(name) / 1e6, 1) for name in PRESETS}
>>> counts["tiny"], counts["llama-134m"], counts["llama-551m"]
(0.6, 134.1, 551.3)
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gossamer.core.errors import BadInput, said
from gossamer.core.rng import Stream, words
from gossamer.core.tree import Layout, layout_of
from gossamer.train import pretrained
from gossamer.train.adapt import adapt, freeze, is_adapter
from gossamer.train.pretrained import quiet
from gossamer.train.source import Source, Spec, source_of


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

    Without a checkpoint the initialisation is the architecture's own (Llama: normal, 0.02), and in Llama-like blocks the two projections
    that write to the residual stream (`o_proj`, `down_proj`) are scaled by 1 / sqrt(2 layers), so that the stream's variance does not grow
    with depth; GPT-2 does so itself. An adapter is drawn by itself: it is the same whether the base was drawn or read.

    What is frozen has the values that it has in the workers' models: rounded to `Source.dtype`.

    Args:
        vocab_size: the tokenizer's; None for the preset's or the configuration's own. A checkpoint has its own.

    Raises:
        BadInput: unknown preset, model type, setting or checkpoint, or a model that cannot be built.
    """
    source = source_of(spec)
    config = configuration(source, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(words(1, seed, Stream.INIT)[0] >> 1))
        model = _instantiate(config, source)
    layers = getattr(config, "num_hidden_layers", 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if layers and not source.checkpoint and name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(1.0 / math.sqrt(2.0 * layers))
            if not p.is_contiguous():  # flat ranges of parameters travel
                p.data = p.data.contiguous()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(words(1, seed, Stream.INIT, 2)[0] >> 1))
        model = _prepared(model, source)
    if source.dtype != torch.float32:
        for p in model.parameters():
            if not p.requires_grad:
                p.data = p.data.to(source.dtype).to(torch.float32)
    return model


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model` in `dtype`, in place; an adapter beside its matrices stays as it is."""
    adapters = {name: p.data for name, p in model.named_parameters() if is_adapter(name)}
    model = model if dtype == torch.float32 else model.to(dtype)
    for name, p in model.named_parameters():
        if name in adapters:
            p.data = adapters[name]
    return model


def twin(model: nn.Module) -> nn.Module:
    """A copy of `model` that shares the parameters that are not trained. Whatever moves one of the models moves those of both."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


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
    """The model as workers hold it, without its weights (device "meta"): shapes cost no memory."""
    source = source_of(spec)
    config = configuration(source, vocab_size)
    flash = source.attention == "flash_attention_2"  # shapes do not depend on it, and the machine that asks may not have it
    shape = replace(source, checkpoint="", attention="" if flash else source.attention)
    with torch.device("meta"):
        model = _prepared(_instantiate(config, shape), source)
    return cast(model, source.dtype)


def meta_layout(spec: Spec, vocab_size: int | None = None) -> Layout:
    """`layout` of `spec`, without allocating it."""
    return layout(meta_model(spec, vocab_size))


def rows_of(model: nn.Module) -> dict[str, int]:
    """Rows of each trainable parameter of `model` (its first dimension; 1 of a scalar): what ranks cut."""
    return {name: p.shape[0] if p.ndim else 1 for name, p in parameters_of(model).items()}


def parameter_count(spec: Spec, vocab_size: int | None = None) -> int:
    """Parameters of `spec`, trained or not, tied ones once, without allocating them."""
    return sum(p.numel() for p in meta_model(spec, vocab_size).parameters())


def flops_of(model: nn.Module, sequence: int, recomputed: bool = False) -> float:
    """Floating-point operations to train on one token: 6 N + 12 layers width sequence.

    N counts the weights that multiply: all parameters, less embedding tables that are only looked up (untied ones). The second term is
    attention's two products, forward and backward, with the causal half not discounted (Chowdhery et al. 2022, appendix B).

    Of a weight that is not trained the gradient is not formed: 4 operations in place of 6, and 2 where nothing before it is trained, since
    then no gradient passes it either. The order is that of the model. `recomputed`: activations are computed twice: 2 more for each weight
    but those of the output layer, and 16 in place of 12.
    """
    head_id = id(getattr(_output_layer(model), "weight", None))
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - {head_id}
    total, trained_before = 0, False
    for p in model.parameters():
        trained_before |= p.requires_grad
        if id(p) in lookups:
            continue
        last = id(p) == head_id  # a tied one is registered first, and multiplies last
        times = 6 if p.requires_grad else 4 if trained_before or last else 2
        total += (times + 2 * (recomputed and not last)) * p.numel()
    config: Any = text_config(model)
    return float(total) + (16.0 if recomputed else 12.0) * config.num_hidden_layers * config.hidden_size * sequence


def text_config(model: nn.Module) -> Any:
    """The part of a model's configuration that its language model has; the whole one, where it is nothing else."""
    config: Any = model.config
    return config.get_text_config()


def symbols(model: nn.Module) -> int:
    """Rows of the embedding: token ids are below."""
    get: Any = getattr(model, "get_input_embeddings", None)
    return int(get().weight.shape[0])


def longest_sequence(model: nn.Module) -> int | None:
    """The most positions that the model declares; None where it declares none."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def configuration(spec: Spec, vocab_size: int | None = None) -> Any:
    """The transformers configuration of `spec`. A checkpoint has its own vocabulary.

    Raises:
        BadInput: as `build`.
    """
    source = source_of(spec)
    if source.checkpoint:
        return pretrained.config_of(source)
    shape = source.shape
    if isinstance(shape, str) and shape in PRESETS:
        return _llama(PRESETS[shape], vocab_size)
    return _auto(dict(shape) if isinstance(shape, Mapping) else _read(shape), vocab_size)


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
    with quiet():
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
    return BadInput(f"a {kind!r} model cannot be built from this configuration: {said(error, kind=True)}. Correct model.config")


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
            f"or the path of a config.json{hint}. A model with its weights, also by its name on the hub, goes by model.checkpoint"
        )
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"the model configuration {path} cannot be read as JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadInput(f"the model configuration {path} is a JSON {type(given).__name__}; expected an object")
    return {k: v for k, v in given.items() if k not in ("architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")}


def _instantiate(config: Any, source: Source) -> nn.Module:
    """The model of `config`: with the weights of the checkpoint, or drawn from torch's random state."""
    asked = {"attn_implementation": source.attention} if source.attention else {}
    if source.checkpoint:
        model = pretrained.load(source, config, asked)
    else:
        try:
            model = _of_config(config, asked)
        except Exception as error:  # the library and torch raise errors of many kinds
            if asked and _can_be(config):
                raise BadInput(
                    f"a {config.model_type!r} model cannot have {source.attention} attention here: {said(error, kind=True)}. "
                    "Set model.attention to another of eager, sdpa and flash_attention_2, or leave it out"
                ) from error
            raise _unbuildable(config.model_type, error) from error
    if not any(p.numel() for p in model.parameters()):
        raise BadInput(f"a {config.model_type!r} model of this configuration has no parameters: raise its sizes")
    return model.train()


def _of_config(config: Any, asked: Mapping[str, str]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with quiet():
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **asked)
    return model


def _can_be(config: Any) -> bool:
    """Whether a model of `config` can be built with the attention that all have."""
    try:
        with torch.device("meta"):
            _of_config(config, {"attn_implementation": "eager"})
    except Exception:
        return False
    return True


def _prepared(model: nn.Module, source: Source) -> nn.Module:
    """What of it is trained, and how it keeps activations."""
    if source.adapter is not None:
        model = adapt(model, source.adapter).train()
    if source.activation_checkpointing:
        _recompute(model)
    if source.freeze:
        freeze(model, source.freeze)
    return model


def _recompute(model: Any) -> None:
    """Keeps of a block what enters it alone. The random numbers of dropout are drawn twice alike, so the bits are the same."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # before transformers 5.20
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise BadInput(f"model.activation_checkpointing: {said(error, kind=True)} Set it to false") from error
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()  # only reentrant checkpoints need inputs that ask for gradients


def _output_layer(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None
