"""What a model is made of: where its shape and its first weights come from, what of it is trained, and how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

Attention: TypeAlias = Literal["", "eager", "sdpa", "flash_attention_2"]
Shape: TypeAlias = str | Path | Mapping[str, Any]
"""A preset's name, a configuration ({"model_type": "gpt2", ...}), or the path of one (a config.json or the folder that holds it)."""


@dataclass(frozen=True)
class Adapter:
    """LoRA (Hu et al. 2021, arXiv 2106.09685): beside a matrix W a product (alpha / rank) B A of two thin ones, and W is not trained.

    B [out, rank] begins at zero, A [rank, in] at random, so the first step is that of the base model.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    """Of the input of A."""
    targets: str | tuple[str, ...] = "all-linear"
    """Ends of the names of the modules that get one; "all-linear": every matrix but the output layer."""
    whole: tuple[str, ...] = ()
    """Ends of the names of modules that are trained as they are, such as "lm_head"."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""


@dataclass(frozen=True)
class Source:
    """A model, before it is built. The weights are drawn from a seed, or those of a checkpoint."""

    shape: Shape = "tiny"
    """Not looked at where there is a checkpoint."""
    checkpoint: str = ""
    """A folder with config.json and safetensors, or a name on the Hugging Face hub."""
    revision: str = ""
    """Of a name on the hub: branch, tag or commit."""
    attention: Attention = ""
    """Empty: what transformers takes for the architecture."""
    activation_checkpointing: bool = False
    """Keep only what enters a block, and compute the rest of it again for the backward pass."""
    adapter: Adapter | None = None
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained."""
    dtype: torch.dtype = torch.float32
    """Of the parameters in the workers' models. An adapter stays float32."""


Spec: TypeAlias = Shape | Source


def source_of(spec: Spec) -> Source:
    """`spec` as a `Source`: a shape alone has weights from a seed, all of them trained."""
    return spec if isinstance(spec, Source) else Source(spec)
