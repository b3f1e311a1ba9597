"""The text that a configuration names: by which loader it is read, and what marks its content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.app.settings import Config
from gossamer.app.settings.data import DataSection
from gossamer.train import corpus
from gossamer.train.documents import Source, by_name, exists, files_of

if TYPE_CHECKING:
    from gossamer.train.data import Corpus


def load(config: Config) -> Corpus:
    """Tokens, or documents to be packed; from the cache, or made now.

    Raises:
        BadInput: the text is not there, or cannot be trained on.
    """
    from gossamer.train import data, prepared

    settings = config.data
    if packed(settings):
        return prepared.load(
            sources(settings),
            sequence=config.plan.sequence,
            vocab_size=settings.vocab_size,
            tokenizer=settings.tokenizer,
            valid_documents=settings.valid_documents,
            shuffle=settings.shuffle,
        )
    return data.load(
        settings.source,
        sequence=config.plan.sequence,
        vocab_size=settings.vocab_size,
        tokenizer=settings.tokenizer,
        limit_bytes=round(settings.limit_mb * 1e6),
    )


def content_mark(settings: DataSection) -> str:
    """A hash of the text, whatever it is tokenised with.

    Raises:
        BadInput: it is not there.
    """
    if packed(settings):
        from gossamer.train import prepared

        return prepared.mark(sources(settings))
    return corpus.find(settings.source, round(settings.limit_mb * 1e6)).content_hash


def check_there(settings: DataSection) -> None:
    """Refuses a text to be tokenised as a whole whose path is wrong, before anything of it is read.

    Raises:
        BadInput: there is no such file or folder.
    """
    if not packed(settings) and not exists(settings.source):
        raise corpus.missing(settings.source)


def packed(settings: DataSection) -> bool:
    """Whether documents are packed as they come, rather than windows drawn from a text that is tokenised as a whole."""
    if settings.loader != "auto":
        return settings.loader == "packed"
    if settings.packed_keys or by_name(settings.source):
        return True
    if settings.source == corpus.STDLIB or not exists(settings.source):
        return False
    path = Path(settings.source).expanduser()
    endings = {file.suffix.lower() for file in (files_of(path) if path.is_dir() else [path])}
    return bool(endings & {".parquet", ".arrow"}) or (bool(endings) and not endings & set(corpus.SUFFIXES))


def sources(settings: DataSection) -> list[Source]:
    """Where packed documents come from, with their weights."""
    usual = {key: getattr(settings, key) for key in ("subset", "split", "text", "revision", "valid")}
    if not settings.mix:
        return [Source(settings.source, **usual)]
    return [
        Source(
            each.source, weight=each.weight, **{key: value if (own := getattr(each, key)) is None else own for key, value in usual.items()}
        )
        for each in settings.mix
    ]
