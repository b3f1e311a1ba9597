"""The text that `--text` names, by the loaders of training: the part of it that a run would hold out."""

from __future__ import annotations

import re

from gossamer.app import corpora
from gossamer.app.config import parse
from gossamer.core.errors import BadInput
from gossamer.train import corpus, prepared

_AS_OPTIONS = (
    (", or name each in data.mix", ""),
    (", or make it a source of its own in data.mix", ", or leave it out"),
    (" or data.subset", ""),
    ("to the one to train on", "to the one to read"),
    ("Set data.split to one of them", "Name a file of it with data.source"),
    ('or name others to validate on with data.valid; a text of one document is for data.loader = "windows"', "or a text file"),
)
"""Remedies that are keys of a configuration only, and what can be done here in their place."""
_OPTIONS = {"data.source": "--text", "data.text": "--column"}
_KEY = re.compile(r"(?<![\w./-])(data\.(?:source|text))(?![\w/-])")


def held_out(source: str, column: str | None = None) -> list[str]:
    """The documents of a text that a run on it would not train on: of a text to be tokenised as a whole the files, or the end, as
    `gossamer.train.corpus.find` splits them; of documents that are packed the first ones (`gossamer.train.prepared`).

    Args:
        source: as `data.source`, but for names on the hub.
        column: as `data.text`; None: its default.

    Raises:
        BadInput: it cannot be read, or has too little to hold anything out; in the words of the command line.
    """
    try:
        settings = parse({"data": {"source": source} | ({} if column is None else {"text": column})}).data
        if corpora.packed(settings):
            return [text for one in corpora.sources(settings) for text in prepared.held_out(one, settings.valid_documents)]
        return list(corpus.documents(corpus.find(source).valid))
    except BadInput as error:
        raise BadInput(_as_options(str(error))) from error


def _as_options(said: str) -> str:
    for key, option in _AS_OPTIONS:
        said = said.replace(key, option)
    return _KEY.sub(lambda found: _OPTIONS[found[1]], said)
