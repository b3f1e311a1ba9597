"""The section `[data]`: what a run is trained on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gossamer.app.settings.base import Section
from gossamer.app.wording import nearest, show
from gossamer.core.errors import BadInput


class MixedSection(Section):
    """One of several sources. What is left out is as the section `[data]` has it."""

    source: str = Field(min_length=1)
    weight: float = Field(gt=0, le=1e9)
    subset: str | None = None
    split: str | None = None
    text: str | None = None
    revision: str | None = None
    valid: str | None = None


class DataSection(Section):
    """What it is trained on."""

    source: str = Field(
        default="stdlib",
        description='"stdlib", the text of Python\'s own library, always at hand; a file or folder; or owner/name on the Hugging Face hub',
    )
    tokenizer: str = Field(
        default="bpe",
        min_length=1,
        description="bpe: trained on the data; bytes: no training, 256 symbols; or a tokenizer's folder, tokenizer.json or hub name",
    )
    vocab_size: int = Field(default=1024, ge=300, le=10_000_000, description="symbols of the bpe tokenizer")
    limit_mb: float = Field(default=16.0, ge=1e-6, le=1e9, description="windows: megabytes of text to read at most")
    loader: Literal["auto", "windows", "packed"] = Field(
        default="auto",
        description="windows: text tokenised whole, random windows of it; packed: documents one after another, each worker its own, "
        "as they come; auto: packed for what is no folder of text, or where a key that only packed reads is given",
    )
    subset: str = Field(default="", description="packed: the subset (configuration) of a data set, such as sample-10BT; empty: its default")
    split: str = Field(default="train", min_length=1, description="packed: the split to train on")
    text: str = Field(default="text", min_length=1, description="packed: the column that holds the text")
    revision: str = Field(default="", description="packed: commit or tag of a data set of the hub; empty: the newest")
    valid: str = Field(
        default="", description="packed: a split, a file or a folder to validate on; empty: the first documents, which nobody trains on"
    )
    valid_documents: int = Field(
        default=512, ge=1, le=10_000_000, description="packed: documents to validate on, a twelfth of all at most; of each source"
    )
    shuffle: int = Field(
        default=1024, ge=0, le=10_000_000, description="packed: documents put into a random order among themselves; 0: as they come"
    )
    mix: tuple[MixedSection, ...] = Field(
        default=(), description="packed: several sources, tables with source, weight, and if need be subset, split, text, revision, valid"
    )

    @property
    def packed_keys(self) -> list[str]:
        """The keys that were given a value and that only the packed loader reads."""
        keys = ("subset", "split", "text", "revision", "valid", "valid_documents", "shuffle", "mix")
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].default]

    @field_validator("source")
    @classmethod
    def _somewhere(cls, source: str) -> str:
        if not source:
            raise BadInput('data.source = "": expected "stdlib", a folder or a file; the current folder is "."')
        return source

    @field_validator("mix", mode="before")
    @classmethod
    def _sources(cls, mix: Any) -> Any:
        known = list(MixedSection.model_fields)
        if not isinstance(mix, list | tuple):
            raise BadInput(f'data.mix = {show(mix)}: expected a list of tables, such as [{{source = "a/folder", weight = 0.5}}]')
        for number, given in enumerate(mix, 1):
            if not isinstance(given, dict):
                raise BadInput(f'data.mix: source {number} is {given!r}: expected a table such as {{source = "a/folder", weight = 0.5}}')
            for key in given:
                if key not in known:
                    near = nearest(str(key), known)
                    raise BadInput(
                        f"data.mix: source {number} has the unknown key {key}"
                        + (f"; did you mean {near}?" if near else f"; known here: {', '.join(known)}")
                    )
            if lacking := [key for key in ("source", "weight") if key not in given]:
                raise BadInput(f"data.mix: source {number} has no {' and no '.join(lacking)}: give each a source and a weight")
            weight = given["weight"]
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e9:
                raise BadInput(
                    f"data.mix: source {number} has weight {weight!r}: expected a number above 0 and up to 1e9 (weights are shares)"
                )
            for key in known:
                if key != "weight" and key in given and not isinstance(given[key], str):
                    raise BadInput(f"data.mix: source {number} has {key} = {given[key]!r}: expected text in quotes")
        return tuple(mix)  # a list could be changed, and has no hash

    @model_validator(mode="after")
    def _one_loader(self) -> DataSection:
        if self.mix and self.source != type(self).model_fields["source"].default:
            raise BadInput(f'data.source = "{self.source}" and data.mix both say where the data are: put it into the mix, or remove one')
        if self.loader == "windows" and (keys := self.packed_keys):
            raise BadInput(
                f'data.{keys[0]} is for documents that are packed, and data.loader = "windows": remove it, or set data.loader = "packed"'
            )
        return self
