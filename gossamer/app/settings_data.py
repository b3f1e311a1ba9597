"""The section `[data]`: what a run is trained on."""

from __future__ import annotations

from pydantic import Field, field_validator

from gossamer.app.settings_base import Section
from gossamer.core.errors import BadInput


class DataSection(Section):
    """What it is trained on."""

    source: str = Field(
        default="stdlib", description='"stdlib", the text of Python\'s own library, always at hand, or a folder of text files'
    )
    tokenizer: str = Field(
        default="bpe",
        min_length=1,
        description="bpe: trained on the data; bytes: no training, 256 symbols; or a tokenizer's folder, tokenizer.json or hub name",
    )
    vocab_size: int = Field(default=1024, ge=300, le=10_000_000, description="symbols of the bpe tokenizer")
    limit_mb: float = Field(default=16.0, ge=1e-6, le=1e9, description="megabytes of text to read at most")

    @field_validator("source")
    @classmethod
    def _somewhere(cls, source: str) -> str:
        if not source:
            raise BadInput('data.source = "": expected "stdlib", a folder or a file; the current folder is "."')
        return source
