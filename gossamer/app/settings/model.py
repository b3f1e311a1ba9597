"""Settings of the model: where it comes from, what of it is trained, and how it computes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gossamer.app.settings.base import Section
from gossamer.core.errors import BadInput


class AdapterSection(Section):
    """LoRA beside the matrices of the model, which are then not trained. It needs the peft library."""

    rank: int = Field(default=0, ge=0, le=65_536, description="width of the thin matrices; 0: no adapter, the model itself is trained")
    alpha: float | None = Field(default=None, gt=0, description="their product counts alpha / rank; none: alpha = 2 rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of what enters an adapter")
    targets: str | list[str] = Field(
        default="all-linear", description="ends of the names of the modules that get one; all-linear: every matrix but the output layer"
    )
    whole: list[str] = Field(default=[], description="ends of the names of modules that are trained as they are, beside the adapters")
    rslora: bool = Field(default=False, description="alpha / sqrt(rank) in place of alpha / rank")

    @model_validator(mode="after")
    def _asked(self) -> AdapterSection:
        given = sorted(self.model_fields_set - {"rank"})
        if not self.rank and any(getattr(self, key) != type(self).model_fields[key].default for key in given):
            raise BadInput(f"model.adapter.{given[0]} is given, and model.adapter.rank = 0 means no adapter: set the rank, such as 16")
        if not self.targets:
            raise BadInput('model.adapter.targets is empty: name modules such as ["q_proj", "v_proj"], or leave it out for all-linear')
        return self


class ModelSection(Section):
    """What is trained: a preset, any causal language model by its Hugging Face configuration, or a checkpoint to go on from."""

    preset: str = Field(default="tiny", description="name of a built-in model; ignored when config or checkpoint is given")
    config: str | dict[str, Any] = Field(
        default="", description="Hugging Face model configuration: a table with model_type, or a config.json"
    )
    checkpoint: str = Field(
        default="", description="Hugging Face checkpoint to go on from: a folder with config.json and *.safetensors, or a name on the hub"
    )
    revision: str = Field(default="", description="branch, tag or commit of a checkpoint on the hub; empty: main")
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="type of the parameters; anchors and outer state are float32 always")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="arithmetic of forward and backward passes; auto: bf16 on a GPU that has it, else fp32"
    )
    attention: Literal["", "eager", "sdpa", "flash_attention_2"] = Field(
        default="", description="how attention is computed; empty: what transformers takes for the model"
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="keep what enters a block alone, and compute the rest again on the way back: less memory, same bits",
    )
    compile: Literal["", "inductor", "aot_eager"] = Field(
        default="", description="backend of torch.compile for the blocks of the model; empty: none. Bits differ from those without"
    )
    freeze: list[str] = Field(
        default=[], description="patterns of names of parameters that are neither trained nor exchanged, such as model.embed_tokens.*"
    )
    adapter: AdapterSection = Field(default=AdapterSection(), description="LoRA beside the matrices of the model")

    @model_validator(mode="after")
    def _one(self) -> ModelSection:
        if self.checkpoint and self.config:
            raise BadInput(
                "model.config and model.checkpoint are both given: a checkpoint has its own configuration, so leave out model.config, or "
                "model.checkpoint for fresh weights"
            )
        if self.revision and not self.checkpoint:
            raise BadInput(f'model.revision = "{self.revision}" is of a checkpoint on the hub, and model.checkpoint is not given')
        return self
