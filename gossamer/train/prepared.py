"""What must be known before documents are packed as they come: the tokenizer, and the documents that are held out for validation. Both are
made once and cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.core.errors import BadInput
from gossamer.train import tokenizer as tok
from gossamer.train.cache import cache_dir, make, unreadable
from gossamer.train.data import Corpus, concatenated
from gossamer.train.documents import Documents, Source, open_documents, open_valid
from gossamer.train.packed import Lane, Packing

_FORMAT = 1
HELD_OUT = 12
"""Of fewer than so many times the documents to hold out, the so manieth part is held out."""


def mark(sources: Sequence[Source]) -> str:
    """SHA-256 of which documents these are, in training and validation.

    Raises:
        BadInput: as `load`.
    """
    return _mark(sources, [(open_documents(s), open_valid(s)) for s in sources])


def load(
    sources: Sequence[Source],
    *,
    sequence: int,
    vocab_size: int = 1024,
    tokenizer: str = "bpe",
    valid_documents: int = 512,
    shuffle: int = 1024,
) -> Corpus:
    """Documents to be packed as they come, from one source or several.

    Args:
        sources: mixed by their weights, which are shares of the sequences.
        sequence: L; what is held out must have at least one window of L + 1 tokens.
        vocab_size: of a "bpe" tokenizer, which is trained on the first 4 MB to train on (of several sources, by their weights).
        tokenizer: "bpe", "bytes", or one by path or name.
        valid_documents: held out for validation: of each source the first ones of what `valid` names, or of itself: these nobody trains on.
            Of a source with fewer than 12 times as many it is the first twelfth.
        shuffle: documents that are put into a random order among themselves; 0: as they come.

    Raises:
        BadInput: see `gossamer.train.documents.open_documents`; too few documents, a bad tokenizer, or an unwritable cache.
    """
    opened = [(open_documents(s), open_valid(s)) for s in sources]
    documents = _mark(sources, opened)
    made_from = tok.mark_of(tokenizer, vocab_size)
    weights = [s.weight for s in sources] if tokenizer == "bpe" else []
    key = hashlib.sha256(f"{_FORMAT},{documents},{made_from},{valid_documents},{weights},{tok.SAMPLE_BYTES}".encode()).hexdigest()
    folder = cache_dir() / "packed" / key[:24]
    about = _about(folder)
    if about is None:
        _make(folder, sources, opened, tokenizer, vocab_size, valid_documents, documents)
        about = _about(folder)
        if about is None:
            raise unreadable(folder)
    path = folder / tok.FILE
    ours: tok.Tokenizer = tok.read(path, about["eos"]) if path.is_file() else tok.Bytes()
    valid = np.load(folder / "valid.npy", mmap_mode="r")
    name = " + ".join(training.name for training, _ in opened)
    if len(valid) < sequence + 1:
        raise BadInput(
            f"{len(valid)} tokens are held out of {name}, too few for one window of {sequence} + 1: raise data.valid_documents, "
            "name others with data.valid, or shorten plan.sequence"
        )
    lanes = [Lane(training, first, head, s.weight) for (training, _), (first, head), s in zip(opened, about["held"], sources, strict=True)]
    return Corpus(
        name,
        np.empty(0, valid.dtype),
        valid,
        ours.vocab_size,
        about["sha256"],
        path if path.is_file() else None,
        ours.eos,
        Packing(tuple(lanes), ours, shuffle, about["sha256"]),
    )


def held_out(source: Source, most: int) -> list[str]:
    """The documents of `source` that `load` holds out, with `valid_documents` = `most`.

    Raises:
        BadInput: as `gossamer.train.documents.open_documents`; too few documents.
    """
    return _hold_out(open_documents(source), open_valid(source), most)[0]


def _mark(sources: Sequence[Source], opened: Sequence[tuple[Documents, Documents | None]]) -> str:
    parts = [[training.fingerprint, held.fingerprint if held else ""] for training, held in opened]
    return hashlib.sha256(json.dumps([parts, [s.weight for s in sources] if len(sources) > 1 else []]).encode()).hexdigest()


def _make(
    folder: Path,
    sources: Sequence[Source],
    opened: Sequence[tuple[Documents, Documents | None]],
    kind: str,
    vocab_size: int,
    valid_documents: int,
    documents: str,
) -> None:
    def fill(scratch: Path) -> None:
        held: list[tuple[int, int]] = []
        texts: list[str] = []
        for training, valid in opened:
            some, place = _hold_out(training, valid, valid_documents)
            texts += some
            held.append(place)
        tokenizer = tok.made(kind, lambda: _train(sources, [training for training, _ in opened], held, vocab_size), scratch)
        ids = concatenated(tokenizer, texts)
        np.save(scratch / "valid.npy", ids)
        sha = hashlib.sha256(f"{documents},{tokenizer.mark},{held},{ids.dtype},{len(ids)}".encode())
        sha.update(ids.tobytes())
        about = {"format": _FORMAT, "eos": tokenizer.eos, "held": held, "valid_tokens": len(ids), "sha256": sha.hexdigest()}
        (scratch / "about.json").write_text(json.dumps(about))

    make(folder, fill, sound=lambda: _about(folder) is not None)


def _about(folder: Path) -> dict[str, Any] | None:
    """What was found out before; None where it is missing or not whole."""
    try:
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
        valid = np.load(folder / "valid.npy", mmap_mode="r")
        if about["format"] != _FORMAT or valid.shape != (about["valid_tokens"],) or valid.dtype not in (np.uint16, np.uint32):
            return None
        if not isinstance(about["sha256"], str) or not isinstance(about["eos"], int):
            return None
        about["held"] = [(int(first), int(head)) for first, head in about["held"]]
        return about
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError):
        return None


def _hold_out(training: Documents, valid: Documents | None, most: int) -> tuple[list[str], tuple[int, int]]:
    """(texts to validate on, (files, rows of the next file) that are not trained on)."""
    if valid is not None:
        texts: list[str] = []
        for _, _, some in _all(valid):
            texts += _texts(some)
            if len(texts) >= most:
                break
        return texts[:most], (0, 0)
    total = 0
    for _, _, some in _all(training):
        total += len(some)
        if total >= most * HELD_OUT:
            break
    take = min(most, max(1, total // HELD_OUT))
    if total < 2:
        raise BadInput(
            f"the data set {training.name} has {total} documents, too few to hold any out: give more, or name others to validate on with "
            'data.valid; a text of one document is for data.loader = "windows"'
        )
    taken: list[str | None] = []
    for file, row, some in _all(training):
        if len(taken) == take:
            return _texts(taken), (file, row)
        n = min(len(some), take - len(taken))
        taken += some[:n]
        if n < len(some):
            return _texts(taken), (file, row + n)
    raise BadInput(f"the data set {training.name} was longer a moment ago: leave it as it is while it is read")


def _texts(rows: list[str | None]) -> list[str]:
    return [text for text in rows if text and text.strip()]


def _all(documents: Documents, first: int = 0, head: int = 0) -> Iterator[tuple[int, int, list[str | None]]]:
    """(file, row, texts from there on) from a row on, to the end."""
    for file in range(first, documents.files):
        for row, some in documents.rows(file, head if file == first else 0):
            yield file, row, some


def _train(sources: Sequence[Source], documents: Sequence[Documents], held: Sequence[tuple[int, int]], vocab_size: int) -> tok.Trained:
    """A BPE of the first documents that are trained on."""
    whole = sum(s.weight for s in sources)

    def texts() -> Iterator[str]:
        for source, training, place in zip(sources, documents, held, strict=True):
            left = int(tok.SAMPLE_BYTES * source.weight / whole)
            for _, _, some in _all(training, *place):
                for text in _texts(some):
                    if left > 0:
                        yield text[:left]
                    left -= len(text.encode("utf-8", errors="replace"))
                if left <= 0:
                    break

    return tok.train_bpe(texts(), 1, vocab_size)
