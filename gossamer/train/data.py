"""Tokens to train on, and which of them come next.

`load` turns a corpus into memory-mapped arrays of token ids, once; the result is cached under its content hash. `Sampler`
draws batches: sequence number c of a worker is a pure function of (seed, worker, c), whatever the batch size, so a data cursor is one
number and a resumed run sees what the uninterrupted one would have seen. What is too large for that, or better read document by document,
goes by `gossamer.train.packed`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, words
from gossamer.train import corpus as text
from gossamer.train import tokenizer as tok
from gossamer.train.cache import cache_dir, make, unreadable

_FORMAT = 1
_BLOCK = 1024


class Batches(Protocol):
    """Where a worker's sequences come from."""

    @property
    def sequence(self) -> int:
        """L: tokens per sequence."""

    def batch(self, cursor: int, count: int) -> Tensor:
        """Sequences number `cursor` to `cursor + count - 1`: int64 [count, L + 1], inputs [:, :-1] and targets [:, 1:]."""


@runtime_checkable
class Remembering(Protocol):
    """Batches whose place is more than a cursor. What they remember saves reading again from the start; without it the same come."""

    def state(self) -> str:
        """Where they are."""

    def load_state(self, state: str) -> None:
        """Takes back what `state` gave; of other data, or another worker's, nothing."""


class Reading(Protocol):
    """Documents that are packed as they come."""

    def batches(self, sequence: int, seed: int, worker: int, workers: int) -> Batches:
        """Those of one worker."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of training and validation text."""

    name: str
    train: NDArray[Any]
    """One-dimensional, uint16 or uint32, memory-mapped read-only. Empty where the documents are packed as they come."""
    valid: NDArray[Any]
    vocab_size: int
    content_hash: str
    """SHA-256 over the token ids of both splits: workers with equal hashes train on equal tokens. Where documents are packed as they come,
    over what says which these are."""
    tokenizer: Path | None
    """The tokenizer.json; None for plain bytes."""
    eos: int
    reading: Reading | None = None
    """How documents are packed as they come; None: `train` holds all tokens."""

    def batches(self, sequence: int, seed: int, worker: int, workers: int) -> Batches:
        """What a worker trains on.

        Args:
            sequence: L.
            workers: among how many the documents are dealt out, where they are packed.
        """
        if self.reading is None:
            return Sampler(self.train, sequence, seed, worker)
        return self.reading.batches(sequence, seed, worker, workers)


@dataclass(frozen=True, eq=False)
class Sampler:
    """Windows at uniformly random positions of the training tokens, drawn with replacement."""

    tokens: NDArray[Any]
    sequence: int
    seed: int
    worker: int
    _memo: dict[int, NDArray[np.uint64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _long_enough("training", len(self.tokens), self.sequence)

    def batch(self, cursor: int, count: int) -> Tensor:
        """See `Batches`. The words of 1024 sequences are drawn at a time."""
        c = np.arange(cursor, cursor + count)
        drawn = np.concatenate([self._words(b)[c[c // _BLOCK == b] % _BLOCK] for b in range(cursor // _BLOCK, c[-1] // _BLOCK + 1)])
        starts = (drawn % np.uint64(len(self.tokens) - self.sequence)).astype(np.int64)
        rows = self.tokens[starts[:, None] + np.arange(self.sequence + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def _words(self, block: int) -> NDArray[np.uint64]:
        if block not in self._memo:
            if len(self._memo) > 1:
                self._memo.clear()
            self._memo[block] = words(_BLOCK, self.seed, Stream.DATA, self.worker, block)
        return self._memo[block]


def load(
    source: str | Path = text.STDLIB,
    *,
    sequence: int,
    vocab_size: int = 1024,
    tokenizer: str | Path = "bpe",
    limit_bytes: int | None = None,
) -> Corpus:
    """The tokens of `source`, from the cache where they are there.

    Args:
        source: "stdlib", a folder or a file (see `gossamer.train.corpus.find`).
        sequence: L; both splits must hold at least one window of L + 1 tokens.
        vocab_size: of a "bpe" tokenizer: at most so many ids (a small corpus may yield fewer).
        tokenizer: "bpe" (trained on the training split), "bytes", or one by path or name (see `gossamer.train.tokenizer.named`).
        limit_bytes: a sample of the corpus, for quick runs.

    Raises:
        BadInput: no corpus, too small a corpus, a bad tokenizer, or a cache folder that cannot be written.
    """
    found = text.find(source, limit_bytes)
    kind = str(tokenizer)
    key = hashlib.sha256(f"{_FORMAT},{found.content_hash},{tok.mark_of(kind, vocab_size)},{tok.SAMPLE_BYTES}".encode()).hexdigest()
    folder = cache_dir() / "corpus" / key[:24]
    made = _open(folder, found.name)
    if made is None:
        _make(folder, found, kind, vocab_size)
        made = _open(folder, found.name)
        if made is None:
            raise unreadable(folder)
    _long_enough("training", len(made.train), sequence, source)
    _long_enough("validation", len(made.valid), sequence, source)
    return made


def _make(folder: Path, found: text.Text, kind: str, vocab_size: int) -> None:
    """Tokenises both splits into `folder`."""

    def fill(scratch: Path) -> None:
        tokenizer = tok.made(kind, lambda: tok.train_bpe(text.documents(found.train), found.train_bytes, vocab_size), scratch)
        counts = {}
        sha = hashlib.sha256(f"{tokenizer.vocab_size},{tokenizer.eos}".encode())
        for split, files in (("train", found.train), ("valid", found.valid)):
            ids = concatenated(tokenizer, text.documents(files))
            np.save(scratch / f"{split}.npy", ids)
            counts[split] = len(ids)
            sha.update(f"{split},{ids.dtype},{len(ids)}".encode())
            sha.update(ids.tobytes())
        about = {"format": _FORMAT, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "tokens": counts, "sha256": sha.hexdigest()}
        (scratch / "about.json").write_text(json.dumps(about))

    make(folder, fill, sound=lambda: _open(folder, found.name) is not None)


def concatenated(tokenizer: tok.Tokenizer, texts: Iterable[str]) -> NDArray[Any]:
    """The ids of all documents, the end mark after each: uint16, or uint32 where ids are larger."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    parts: list[NDArray[Any]] = [np.empty(0, dtype)]
    end = np.array([tokenizer.eos], dtype)
    for ids in tokenizer.encode(texts):
        parts += (ids.astype(dtype), end)
    return np.concatenate(parts)


def _open(folder: Path, name: str) -> Corpus | None:
    """The cached corpus; None where it is missing or not whole."""
    try:
        about = json.loads((folder / "about.json").read_text())
        arrays = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "valid")}
        path = folder / tok.FILE
        if about["format"] != _FORMAT or any(arrays[s].shape != (about["tokens"][s],) for s in arrays):
            return None
        if any(a.dtype not in (np.uint16, np.uint32) for a in arrays.values()) or not isinstance(about["vocab_size"] + about["eos"], int):
            return None
        return Corpus(
            name, arrays["train"], arrays["valid"], about["vocab_size"], about["sha256"], path if path.is_file() else None, about["eos"]
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError):
        return None


def _long_enough(split: str, tokens: int, sequence: int, source: str | Path = "") -> None:
    if sequence < 1:
        raise BadInput(f"sequence length {sequence}; expected at least 1 token")
    if tokens < sequence + 1:
        of = f" of {str(source)!r}" if str(source) else ""
        raise BadInput(
            f"the {split} text{of} has {tokens} tokens, too few for one window of {sequence} + 1: give more text, "
            "raise data.limit_mb, or shorten plan.sequence"
        )
