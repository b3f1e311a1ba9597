"""Tokenizers: byte-level BPE trained on the corpus itself, plain bytes, or a tokenizer.json of yours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.core.errors import BadInput

END = "<|endoftext|>"
"""Stands after each document."""
SAMPLE_BYTES = 4_000_000
"""BPE learns its merges from so much text, taken evenly from all documents: seconds, whatever the size of the corpus."""
FILE = "tokenizer.json"
_BATCH = 64


class Tokenizer(Protocol):
    """Text to token ids."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""

    @property
    def eos(self) -> int:
        """The id that stands after each document."""

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """The ids of each text, without `eos`."""


@dataclass(frozen=True)
class Bytes:
    """One id a UTF-8 byte, and 256 for the end of a document."""

    vocab_size: int = 257
    eos: int = 256

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """See :class:`Tokenizer`.

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

    @property
    def vocab_size(self) -> int:
        """Including special tokens."""
        return int(self.inner.get_vocab_size())

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """See :class:`Tokenizer`."""
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


def read(path: Path) -> Trained:
    """A tokenizer.json, with the end mark it has: <|endoftext|>, </s>, <|end_of_text|> or <eos>.

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
    for mark in (END, "</s>", "<|end_of_text|>", "<eos>"):
        if (eos := backend.token_to_id(mark)) is not None:
            return Trained(backend, int(eos))
    raise BadInput(f"{path} has no end-of-text token; expected {END}, </s>, <|end_of_text|> or <eos> in its vocabulary")


def as_transformers(tokenizer: Tokenizer | str | Path | None, longest: int | None = None) -> Any:
    """The same tokenizer as transformers has them: the same ids for every text, and `save_pretrained`.

    >>> as_transformers("bytes")("hé<|endoftext|>").input_ids[:4]
    [104, 195, 169, 60]

    Args:
        tokenizer: one of this module; "bytes" or None (what a corpus of plain bytes names); or the path of a tokenizer.json. Where a
            tokenizer_config.json lies beside that, its special tokens and chat template are kept.
        longest: tokens that the model takes at most.

    Returns:
        A `transformers.PreTrainedTokenizerFast`. Where the tokenizer names no padding, its end mark stands for it.

    Raises:
        BadInput: not a tokenizer; or "bpe", which is trained on a corpus: give the tokenizer.json that came of it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
        path = Path(tokenizer).expanduser()
        path = path / FILE if path.is_dir() else path
        tokenizer = read(path)
        if path.name == FILE and (path.parent / "tokenizer_config.json").is_file():
            found = AutoTokenizer.from_pretrained(path.parent, **limit)
            if found.pad_token is None:
                found.pad_token = found.eos_token or tokenizer.inner.id_to_token(tokenizer.eos)
            return found
    assert isinstance(tokenizer, Trained)
    end = tokenizer.inner.id_to_token(tokenizer.eos)
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
