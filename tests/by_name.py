"""Reads a data set by its name, from the hub that the environment names: a process of its own, since the libraries read that once."""

from __future__ import annotations

import json
import sys

from gossamer.core.errors import BadInput
from gossamer.train import prepared
from gossamer.train.documents import Source


def refusal(source: Source) -> str:
    try:
        load(source)
    except BadInput as error:
        return str(error)
    return ""


def load(source: Source) -> prepared.Corpus:
    return prepared.load([source], sequence=16, tokenizer="bytes", valid_documents=8)


if __name__ == "__main__":
    name = sys.argv[1]
    source = Source(name, subset="en", text="content")
    corpus = load(source)
    streams = [corpus.batches(16, 0, worker, 2) for worker in (0, 1)]
    first = [stream.batch(0, 20).tolist() for stream in streams]
    again = corpus.batches(16, 0, 1, 2)
    again.load_state(streams[1].state())
    found = {
        "name": corpus.name,
        "sha": corpus.content_hash,
        "first": first,
        "next": [stream.batch(20, 5).tolist() for stream in (streams[1], again)],
        "refused": [
            refusal(s) for s in (Source(name, text="content"), Source(name, subset="fr"), Source(name, subset="en"), Source("some/other"))
        ],
    }
    print(json.dumps(found))
