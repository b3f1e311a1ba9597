"""Settings of the model: where it comes from, what of it is trained, and how."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gossamer.app.settings_base import Section


class ModelSection(Section):
    """What is trained: a preset, or any causal language model by its Hugging Face configuration."""

    preset: str = Field(default="tiny", description="name of a built-in model; ignored when config is given")
    config: str | dict[str, Any] = Field(
        default="", description="Hugging Face model configuration: a table with model_type, or a config.json"
    )
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="type of the parameters; anchors and outer state are float32 always")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="arithmetic of forward and backward passes; auto: bf16 on a GPU that has it, else fp32"
    )
