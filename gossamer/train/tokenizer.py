"""Tokenizers: byte-level BPE trained on the corpus itself, plain bytes, or any that transformers has a fast form of, by name or path."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.core.errors import BadInput
from gossamer.train.pretrained import may_be_name

END = "<|endoftext|>"
"""Stands after each document."""
SAMPLE_BYTES = 4_000_000
"""BPE learns its merges from so much text, taken evenly from all documents: seconds, whatever the size of the corpus."""
FILE = "tokenizer.json"
ABOUT = "tokenizer_config.json"
_MARKS = (END, "</s>", "<|end_of_text|>", "<eos>")
_BATCH = 64


class Tokenizer(Protocol):
    """Text to token ids."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""

    @property
    def eos(self) -> int:
        """The id that stands after each document."""

    @property
    def mark(self) -> str:
        """Of all that decides which ids a text has."""

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """The ids of each text, without `eos`."""


@dataclass(frozen=True)
class Bytes:
    """One id a UTF-8 byte, and 256 for the end of a document."""

    vocab_size: int = 257
    eos: int = 256
    mark: str = "bytes"

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """See `Tokenizer`.

        >>> [ids.tolist() for ids in Bytes().encode(["hé"])]
        [[104, 195, 169]]
        """
        for text in texts:
            yield np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int64)


@dataclass(frozen=True)
class Trained:
    """A tokenizer of the `tokenizers` library."""

    inner: Any
    eos: int
    words: Any = None
    """As transformers loaded it, with all its special tokens; None where it came alone."""

    @cached_property
    def vocab_size(self) -> int:
        """Including special tokens, and numbers that none has."""
        return max(int(self.inner.get_vocab_size()), 1 + max(self.inner.get_vocab().values(), default=0))

    @property
    def mark(self) -> str:
        """SHA-256 of all that decides which ids a text has."""
        return hashlib.sha256(f"{self.eos},{self.inner.to_str()}".encode()).hexdigest()

    def save(self, folder: Path) -> Path:
        """Writes tokenizer.json and what lies beside it. Returns the path of the former."""
        if self.words is not None:
            self.words.save_pretrained(folder)
        self.inner.save(str(folder / FILE))
        return folder / FILE

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """See `Tokenizer`."""
        texts = iter(texts)
        while batch := list(islice(texts, _BATCH)):
            for encoding in self.inner.encode_batch([_whole(text) for text in batch], add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int64)


def train_bpe(texts: Iterable[str], total_bytes: int, vocab_size: int) -> Trained:
    """Learns a byte-level BPE of at most `vocab_size` ids; every string can be encoded.

    Args:
        total_bytes: about how much text `texts` holds, to thin it evenly to `SAMPLE_BYTES`.

    Raises:
        BadInput: a vocabulary smaller than the 256 bytes and the end mark.
    """
    if vocab_size < 257:
        raise BadInput(f"tokenizer vocabulary {vocab_size} is too small for bytes: expected at least 257 (or tokenizer 'bytes')")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(map(_whole, _thinned(texts, total_bytes)), trainer=trainer)
    eos = backend.token_to_id(END)
    assert eos is not None
    return Trained(backend, eos)


def read(path: Path, eos: int | None = None) -> Trained:
    """A tokenizer.json, with the end mark it has: <|endoftext|>, </s>, <|end_of_text|> or <eos>.

    Args:
        eos: the end mark, where it is known.

    Raises:
        BadInput: no such file, not a tokenizer, or no end mark.
    """
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise BadInput(f"tokenizer {str(path)!r} is neither 'bpe' nor 'bytes' nor a tokenizer.json that exists")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BadInput(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return Trained(backend, _end_of(backend, str(path)) if eos is None else eos)


def named(kind: str | Path) -> Trained:
    """The tokenizer of a path (a tokenizer.json, or a folder as transformers saves it) or of a name on the Hugging Face hub.

    Raises:
        BadInput: there is none, it needs a network that is not there, it has no fast form, or no end mark.
    """
    path = Path(kind).expanduser()
    try:
        stamp = [(p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in (path, path / FILE, path / ABOUT) if p.exists()]
    except OSError as error:
        raise BadInput(f"tokenizer {str(kind)!r} cannot be read ({error.strerror}): correct data.tokenizer") from error
    return _named(str(kind), tuple(stamp))


@lru_cache(maxsize=4)
def _named(kind: str, stamp: tuple[tuple[str, int, int], ...]) -> Trained:
    path = Path(kind).expanduser()
    folder = path.parent if path.name == FILE and path.is_file() else path
    if path.is_file() and not (folder / ABOUT).is_file():
        return read(path)
    if path.is_dir() and (path / FILE).is_file() and not (path / ABOUT).is_file():
        return read(path / FILE)
    if not path.exists() and not may_be_name(kind):
        return read(path)  # refuses
    from transformers import AutoTokenizer

    try:
        words = AutoTokenizer.from_pretrained(str(folder) if path.exists() else kind)
    except Exception as error:  # whatever the libraries raise: what they cannot load is not to be had
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if path.exists():
            raise BadInput(f"tokenizer {kind!r} is a folder that transformers cannot load a tokenizer from: {why}") from error
        raise BadInput(
            f"tokenizer {kind!r} is neither 'bpe' nor 'bytes' nor a folder or tokenizer.json that exists here, and by name it could not "
            f"be had from the Hugging Face hub ({why}): correct data.tokenizer, connect once so that it is kept, or give its path"
        ) from error
    backend = getattr(words, "backend_tokenizer", None)
    if backend is None:
        raise BadInput(f"tokenizer {kind!r} has no fast form (a tokenizer.json): convert it with transformers, or choose another")
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    return Trained(backend, _end_of(backend, kind) if words.eos_token_id is None else int(words.eos_token_id), words)


def mark_of(kind: str, vocab_size: int) -> str:
    """What tells, with the sample of text that a "bpe" learns from, which tokenizer `kind` is.

    Raises:
        BadInput: as `named`.
    """
    if kind == "bpe":
        return f"bpe,{vocab_size}"
    return f"bytes,{Bytes.vocab_size}" if kind == "bytes" else named(kind).mark


def made(kind: str, train: Callable[[], Trained], folder: Path) -> Tokenizer:
    """The tokenizer of `kind`, its files in `folder`; of "bytes" there are none.

    Args:
        train: makes that of "bpe".

    Raises:
        BadInput: as `named`.
    """
    if kind == "bytes":
        return Bytes()
    found = train() if kind == "bpe" else named(kind)
    found.save(folder)
    return found


def vocabulary(kind: str, asked: int) -> int:
    """Ids that a model needs room for: `asked` of "bpe", which learns at most so many.

    Raises:
        BadInput: as `named`.
    """
    if kind == "bpe":
        return asked
    return Bytes.vocab_size if kind == "bytes" else named(kind).vocab_size


def _end_of(backend: Any, kind: str) -> int:
    for mark in _MARKS:
        if (eos := backend.token_to_id(mark)) is not None:
            return int(eos)
    raise BadInput(f"{kind} has no end-of-text token; expected {', '.join(_MARKS[:-1])} or {_MARKS[-1]} in its vocabulary")


def as_transformers(tokenizer: Tokenizer | str | Path | None, longest: int | None = None) -> Any:
    """The same tokenizer as transformers has them: the same ids for every text, and `save_pretrained`.

    >>> as_transformers("bytes")("hé<|endoftext|>").input_ids[:4]
    [104, 195, 169, 60]

    Args:
        tokenizer: one of this module; "bytes" or None (what a corpus of plain bytes names); or a path or name, as `named` takes
            them. Special tokens and a chat template that a tokenizer_config.json has are kept.
        longest: tokens that the model takes at most.

    Returns:
        A `transformers.PreTrainedTokenizerFast`. Where the tokenizer names no padding, its end mark stands for it.

    Raises:
        BadInput: not a tokenizer; or "bpe", which is trained on a corpus: give the tokenizer.json that came of it.
    """
    from transformers import PreTrainedTokenizerFast

    limit = {} if longest is None else {"model_max_length": longest}
    if tokenizer is None or tokenizer == "bytes" or isinstance(tokenizer, Bytes):
        # What looks like the end mark in a text is bytes like any other.
        return PreTrainedTokenizerFast(
            tokenizer_object=_bytes_backend(),
            eos_token=END,
            pad_token=END,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
            **limit,
        )
    if tokenizer == "bpe":
        raise BadInput("a 'bpe' tokenizer is trained on a corpus: give the path of the tokenizer.json that came of it")
    if isinstance(tokenizer, (str, Path)):
        tokenizer = named(tokenizer)
    assert isinstance(tokenizer, Trained)
    end = tokenizer.inner.id_to_token(tokenizer.eos)
    if tokenizer.words is not None:
        found = copy.deepcopy(tokenizer.words)
        if found.pad_token is None:
            found.pad_token = end
        if longest is not None:
            found.model_max_length = longest
        return found
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.inner, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False, **limit
    )


def _bytes_backend() -> Any:
    """`Bytes` in the tokenizers library: a BPE without merges, whose symbols are the 256 bytes by their value."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    # GPT-2's letters for bytes: printable ones are themselves, the others follow from 256 on, in order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + k) for k, b in enumerate(others)}
    vocab = {letters[b]: b for b in range(256)} | {END: 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _whole(text: str) -> str:
    """`text` with "?" for halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _thinned(texts: Iterable[str], total_bytes: int) -> Iterator[str]:
    """Every document's share of the sample from its own start, cut at a line: all kinds of text are seen."""
    share = min(1.0, SAMPLE_BYTES / max(1, total_bytes))
    for text in texts:
        if share == 1.0:
            yield text
        else:
            keep = int(len(text) * share)
            yield text[: max(keep, text.find("\n", keep) + 1)]
