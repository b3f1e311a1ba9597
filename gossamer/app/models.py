"""The model of a configuration: what is built, what of it travels, and what it needs of the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from gossamer.app.settings import Config
from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, digest
from gossamer.train import model
from gossamer.train.pretrained import folder_of
from gossamer.train.source import Adapter, Source
from gossamer.train.tokenizer import FILE as TOKENIZER
from gossamer.train.tokenizer import Bytes, named, vocabulary


def source_of(config: Config) -> Source:
    """What the model is made of."""
    m = config.model
    a = m.adapter
    adapter = None
    if a.rank:
        targets = a.targets if isinstance(a.targets, str) else tuple(a.targets)
        adapter = Adapter(a.rank, 2.0 * a.rank if a.alpha is None else a.alpha, a.dropout, targets, tuple(a.whole), a.rslora)
    return Source(
        shape=m.config or m.preset,
        checkpoint=m.checkpoint,
        revision=m.revision,
        attention=m.attention,
        activation_checkpointing=m.activation_checkpointing,
        adapter=adapter,
        freeze=tuple(m.freeze),
        dtype=torch.bfloat16 if m.dtype == "bf16" else torch.float32,
    )


@dataclass(frozen=True, eq=False)
class Outline:
    """A model without its weights."""

    source: Source
    vocab_size: int | None
    """Symbols that it is built for; None for those of a checkpoint or a preset."""
    meta: nn.Module
    """On the device "meta"."""

    @classmethod
    def of(cls, source: Source, vocab_size: int | None) -> Outline:
        """Built once, and asked for everything.

        Raises:
            BadInput: as `gossamer.train.model.build`.
        """
        return cls(source, vocab_size, model.meta_model(source, vocab_size))

    @cached_property
    def layout(self) -> Layout:
        """What is exchanged: the parameters that are trained."""
        return model.layout(self.meta)

    @property
    def config(self) -> Any:
        """Of transformers, of the language model alone."""
        return model.text_config(self.meta)

    @property
    def symbols(self) -> int:
        """Rows of the embedding."""
        return model.symbols(self.meta)

    @cached_property
    def frozen(self) -> tuple[int, int]:
        """Parameters that are not trained, and their bytes in a worker's model."""
        found = [p for p in self.meta.parameters() if not p.requires_grad]
        return sum(p.numel() for p in found), sum(p.nbytes for p in found)

    def flops_per_token(self, sequence: int) -> float:
        """Of training on one token of sequences of that length."""
        return model.flops_of(self.meta, sequence, self.source.activation_checkpointing)


class Models:
    """The models that one process makes of an outline. What is not trained is read once, and the same memory in all of them.

    Args:
        seed: of weights that are no checkpoint's, and of adapters.
    """

    def __init__(self, outline: Outline, seed: int) -> None:
        self._outline, self._seed = outline, seed
        self._held: Any = None

    def first(self) -> Any:
        """The model with its first weights, in float32: a function of the seed, or those of a checkpoint."""
        return model.build(self._outline.source, self._outline.vocab_size, self._seed)

    def worker(self, alone: bool = False) -> Any:
        """`first` as a worker has it.

        Args:
            alone: memory of its own, for a model that is to be cut over ranks.
        """
        if not alone and self._outline.frozen[0]:
            return model.twin(self._kept())
        found, self._held = self._held, None
        return self._made() if found is None else found

    def judge(self) -> Any:
        """`first`, for parameters to be put in."""
        return self.worker() if self._float32 else self.first()

    def whole(self) -> Any:
        """`first`, in memory of its own."""
        return self.worker(alone=True) if self._float32 else self.first()

    @cached_property
    def frozen_digest(self) -> str | None:
        """A mark of the parameters that are not trained, which all workers must have alike and a checkpoint of the run does not hold; None
        where all are trained."""
        if not self._outline.frozen[0]:
            return None
        return f"{digest({name: p.float() for name, p in self._kept().named_parameters() if not p.requires_grad}):016x}"

    def let_go(self) -> None:
        """This process makes no more."""
        self._held = None

    @property
    def _float32(self) -> bool:
        return self._outline.source.dtype == torch.float32

    def _kept(self) -> Any:
        if self._held is None:
            self._held = self._made()
        return self._held

    def _made(self) -> Any:
        return model.cast(self.first(), self._outline.source.dtype)


def outline_of(config: Config) -> Outline:
    """The model that is trained.

    Raises:
        BadInput: it cannot be built, or the tokenizer is not one for it.
    """
    source, asked = source_of(config), config.data
    if not source.checkpoint:
        return Outline.of(source, vocabulary(asked.tokenizer, asked.vocab_size))
    outline = Outline.of(source, None)
    _check_tokenizer(config)
    if asked.tokenizer != "bpe":  # which learns at most as many as it is asked for: the corpus tells
        check_symbols(config, vocabulary(asked.tokenizer, asked.vocab_size), outline.symbols)
    return outline


def charged_of(config: Config, trained: Outline) -> Outline:
    """What the clock charges: the model that is trained, or the preset that is named in its place, with as much of it trained.

    Raises:
        BadInput: there is no such preset, or what is frozen or adapted of the one does not exist in the other.
    """
    name = config.clock.charge_as
    if not name:
        return trained
    try:
        return Outline.of(replace(trained.source, shape=name, checkpoint="", revision=""), None)
    except BadInput as error:
        raise BadInput(f'clock.charge_as = "{name}": {error}') from error


def _check_tokenizer(config: Config) -> None:
    """Refuses symbols of our own for weights that know others."""
    kind, checkpoint = config.data.tokenizer, config.model.checkpoint
    folder = folder_of(source_of(config))
    own = folder / TOKENIZER
    if kind not in ("bpe", "bytes") or not own.is_file():
        return
    if kind == "bpe" or named(own).vocab_size != Bytes.vocab_size:
        raise BadInput(
            f'data.tokenizer = "{kind}", and model.checkpoint = {checkpoint!r} has a tokenizer of its own, whose symbols its weights know: '
            f'set data.tokenizer = "{checkpoint}"'
        )


def check_symbols(config: Config, found: int, room: int) -> None:
    """Refuses token ids that the model has no row for.

    Args:
        found: symbols of the tokenizer.
        room: rows of the model's embedding.

    Raises:
        BadInput: with what to change.
    """
    if found <= room:
        return
    if checkpoint := config.model.checkpoint:
        raise BadInput(
            f'data.tokenizer = "{config.data.tokenizer}" has {found} symbols, and the embedding of model.checkpoint = {checkpoint!r} has '
            f"{room} rows: they do not belong together. Set data.tokenizer to the tokenizer of the checkpoint: its folder or its name"
        )
    raise BadInput(f"the tokenizer has {found} symbols and the model room for {room}: raise data.vocab_size")


def check_machine(config: Config, device: torch.device, precision: str) -> None:
    """Refuses what this machine cannot do, before anything is made.

    Raises:
        BadInput: flash attention or a compiler that is not here.
    """
    m = config.model
    if m.attention == "flash_attention_2":
        asked, remedy = f'model.attention = "{m.attention}"', 'set model.attention = "sdpa"'
        if device.type != "cuda":
            raise BadInput(f"{asked} is for GPUs, and this run is on {device.type}: {remedy}")
        if find_spec("flash_attn") is None:
            raise BadInput(
                f"model.attention = {m.attention!r} needs the flash-attn library, which is not installed: {remedy}, or install it"
            )
        if precision != "bf16" and m.dtype != "bf16":
            raise BadInput(f'{asked} computes in 16 bits: set model.precision = "bf16", or {remedy}')
    if m.compile == "inductor":
        _check_inductor(device)
    if m.checkpoint:
        folder_of(source_of(config), weights=True)


def _check_inductor(device: torch.device) -> None:
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise BadInput('model.compile = "inductor" needs the triton library on a GPU, which is not installed: set model.compile = ""')
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise BadInput(
            'model.compile = "inductor" needs a C++ compiler on this machine, and none was found: install g++ or clang, or set '
            'model.compile = ""'
        ) from error
