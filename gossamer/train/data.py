"""Tokens to train on, and which of them come next.

:func:`load` turns a corpus into memory-mapped arrays of token ids, once; the result is cached under its content hash. :class:`Sampler`
draws batches: sequence number c of a worker is a pure function of (seed, worker, c), whatever the batch size, so a data cursor is one
number and a resumed run sees what the uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, words
from gossamer.train import corpus as text
from gossamer.train import tokenizer as tok

CACHE_VARIABLE = "GOSSAMER_CACHE"
_FORMAT = 1
_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of training and validation text."""

    name: str
    train: NDArray[Any]
    """One-dimensional, uint16 or uint32, memory-mapped read-only."""
    valid: NDArray[Any]
    vocab_size: int
    content_hash: str
    """SHA-256 over the token ids of both splits: workers with equal hashes train on equal tokens."""
    tokenizer: Path | None
    """The tokenizer.json; None for plain bytes."""
    eos: int


class Batches(Protocol):
    """Where a worker's sequences come from."""

    @property
    def sequence(self) -> int:
        """L: tokens per sequence."""

    def batch(self, cursor: int, count: int) -> Tensor:
        """Sequences number `cursor` to `cursor + count - 1`: int64 [count, L + 1], inputs [:, :-1] and targets [:, 1:]."""


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
        """See :class:`Batches`. The words of 1024 sequences are drawn at a time."""
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
        source: "stdlib", a folder or a file (see :func:`gossamer.train.corpus.find`).
        sequence: L; both splits must hold at least one window of L + 1 tokens.
        vocab_size: of a "bpe" tokenizer: at most so many ids (a small corpus may yield fewer).
        tokenizer: "bpe" (trained on the training split), "bytes", or one by path or name (see :func:`gossamer.train.tokenizer.named`).
        limit_bytes: a sample of the corpus, for quick runs.

    Raises:
        BadInput: no corpus, too small a corpus, a bad tokenizer, or a cache folder that cannot be written.
    """
    found = text.find(source, limit_bytes)
    kind = str(tokenizer)
    own = kind not in ("bpe", "bytes")
    made_from = tok.named(kind).mark if own else f"{kind},{vocab_size if kind == 'bpe' else 257}"
    key = hashlib.sha256(f"{_FORMAT},{found.content_hash},{made_from},{tok.SAMPLE_BYTES}".encode()).hexdigest()
    folder = cache_dir() / "corpus" / key[:24]
    made = _open(folder, found.name)
    if made is None:
        _make(folder, found, kind, vocab_size)
        made = _open(folder, found.name)
        if made is None:
            raise BadInput(
                f"the cache {folder} cannot be read back after writing: free some space, or set {CACHE_VARIABLE} to another folder"
            )
    _long_enough("training", len(made.train), sequence, source)
    _long_enough("validation", len(made.valid), sequence, source)
    return made


def cache_dir() -> Path:
    """Where tokenizers and tokens are kept: $GOSSAMER_CACHE, else the user's cache folder. Deleting it costs seconds."""
    import platformdirs

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("gossamer"))


def _make(folder: Path, found: text.Text, kind: str, vocab_size: int) -> None:
    """Tokenises into a folder of its own and renames it whole, so that processes which start together cannot spoil each other's work."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise BadInput(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}): set {CACHE_VARIABLE} to one that can"
        ) from error
    try:
        tokenizer: tok.Tokenizer
        if kind == "bytes":
            tokenizer = tok.Bytes()
        else:
            trained = tok.train_bpe(text.documents(found.train), found.train_bytes, vocab_size) if kind == "bpe" else tok.named(kind)
            trained.save(scratch)
            tokenizer = trained
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        counts = {}
        sha = hashlib.sha256(f"{tokenizer.vocab_size},{tokenizer.eos}".encode())
        for split, files in (("train", found.train), ("valid", found.valid)):
            ids = _concatenated(tokenizer.encode(text.documents(files)), tokenizer.eos, dtype)
            np.save(scratch / f"{split}.npy", ids)
            counts[split] = len(ids)
            sha.update(f"{split},{ids.dtype},{len(ids)}".encode())
            sha.update(ids.tobytes())
        about = {"format": _FORMAT, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "tokens": counts, "sha256": sha.hexdigest()}
        (scratch / "about.json").write_text(json.dumps(about))
        if _open(folder, found.name) is not None:
            return  # another process was faster
        if folder.exists():  # damaged
            os.rename(folder, f"{scratch}-old")
            shutil.rmtree(f"{scratch}-old", ignore_errors=True)
        os.rename(scratch, folder)
    except OSError as error:
        if not folder.exists():  # else another process was faster by a hair
            raise BadInput(f"the corpus cannot be cached in {folder} ({error}): set {CACHE_VARIABLE} to a folder with room") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _concatenated(encoded: Iterable[NDArray[np.int64]], eos: int, dtype: Any) -> NDArray[Any]:
    parts: list[NDArray[Any]] = [np.empty(0, dtype)]
    end = np.array([eos], dtype)
    for ids in encoded:
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
