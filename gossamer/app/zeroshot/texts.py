"""The text that `--text` names, by the loaders of training: the part of it that a run would hold out."""

from __future__ import annotations

from gossamer.app import corpora
from gossamer.app.config import parse
from gossamer.core.errors import BadInput
from gossamer.train import corpus, prepared


def held_out(source: str, column: str | None = None) -> list[str]:
    """The documents of a text that a run on it would not train on: of a text to be tokenised as a whole the files, or the end, as
    `gossamer.train.corpus.find` splits them; of documents that are packed the first ones (`gossamer.train.prepared`).

    Args:
        source: as `data.source`, but for names on the hub.
        column: as `data.text`; None: its default.

    Raises:
        BadInput: it cannot be read, or has too little to hold anything out.
    """
    try:
        settings = parse({"data": {"source": source} | ({} if column is None else {"text": column})}).data
        if corpora.packed(settings):
            return [text for one in corpora.sources(settings) for text in prepared.held_out(one, settings.valid_documents)]
        return list(corpus.documents(corpus.find(source).valid))
    except BadInput as error:
        raise BadInput(f"--text is read as data.source is, and --column is its data.text: {error}") from error
