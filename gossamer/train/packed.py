"""Documents packed into sequences as they come, an end mark after each, with nothing dropped and nothing padded.

Workers share the files of a source among them, or, where there are fewer files than workers, the rows of a file: no document is seen by two
workers, over any number of rounds. When a worker's share is over it begins again, in another order.

Sequence number c of a worker is a function of (data, seed, worker, workers, c) alone. To find it again from nothing all before it are read;
so a checkpoint holds the place as well: file, row, document within the block that is shuffled, and token within the document.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, permutation, uniform
from gossamer.train.data import Batches
from gossamer.train.documents import Documents
from gossamer.train.tokenizer import Tokenizer

BLOCK = 64
"""Documents that are read together where nothing is shuffled."""
_BLOCK_CHARS = 1 << 24
"""Text that is held in memory at most, but for one document: a block ends there."""
_DRAWN = 1024
_ROWS = 1 << 48
"""More than a file has."""
_FAR = 1000
_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a worker is in its share of a source."""

    epoch: int = 0
    file: int = 0
    """Place in the order of this epoch."""
    row: int = 0
    """The first row of the block."""
    document: int = 0
    """In the block, as shuffled."""
    token: int = 0
    """In the document."""
    taken: int = 0
    """Sequences that came before."""


class Share(NamedTuple):
    """What a worker reads: of these files the rows whose number, counted from the first to train on, leaves `part` on division by
    `parts`."""

    files: tuple[int, ...]
    part: int
    parts: int


def share(files: int, worker: int, workers: int) -> Share:
    """A worker's share of `files`; those of all workers are disjoint, and together everything.

    >>> share(5, worker=1, workers=2)
    Share(files=(1, 3), part=0, parts=1)
    >>> share(2, worker=3, workers=5), share(2, worker=4, workers=5)
    (Share(files=(1,), part=1, parts=2), Share(files=(0,), part=2, parts=3))
    """
    if files >= workers:
        return Share(tuple(range(worker, files, workers)), 0, 1)
    file = worker % files
    return Share((file,), worker // files, len(range(file, workers, files)))


@dataclass(frozen=True, eq=False)
class Lane:
    """One source, as it is read for training."""

    documents: Documents
    first: int
    """Files before this one are held out for validation."""
    head: int
    """Rows of the first file that are held out."""
    weight: float
    """Share of the sequences."""

    def blocks(self, file: int, row: int, part: Share, most: int) -> Iterator[tuple[int, list[str]]]:
        """(first row, texts) of a worker's documents in a file, at most `most` at a time. Where one begins does not depend on `row`."""
        begin = max(row, self.head if file == 0 else 0)
        texts: list[str] = []
        chars = 0
        for lo, some in self.documents.rows(self.first + file, begin):
            skipped = lo - (self.head if file == 0 else 0)
            for k, text in enumerate(some):
                if (skipped + k) % part.parts != part.part or text is None or not text.strip():
                    continue
                texts.append(text)
                chars += len(text)
                if len(texts) == most or chars >= _BLOCK_CHARS:
                    yield begin, texts
                    begin, texts, chars = lo + k + 1, [], 0
        if texts:
            yield begin, texts


class _Reader:
    """The packed sequences of one source for one worker, from any place on."""

    def __init__(self, lane: Lane, number: int, tokenizer: Tokenizer, shuffle: int, sequence: int, key: tuple[int, int, int]) -> None:
        """
        Args:
            number: of the source.
            key: seed, worker, workers.
        """
        self.lane, self.number, self.tokenizer, self.shuffle, self.sequence = lane, number, tokenizer, shuffle, sequence
        self.seed, self.worker, workers = key
        self.share = share(lane.documents.files - lane.first, self.worker, workers)
        self._who = f"worker {self.worker} of {workers}"
        self.go(Place())

    def go(self, place: Place) -> None:
        """Forgets where it is; the next sequence is that of `place`."""
        self._taken, self._token, self._size = place.taken, place.token, -place.token
        self._pieces = self._read(place)
        self._held: deque[tuple[Place, NDArray[np.int64]]] = deque()
        self._start = place
        self._wanted = place if place.taken else None

    def _arrive(self, place: Place) -> None:
        """The first document after `go`: the place is in that one."""
        at, ids = self._held[0]
        if at[:4] != place[:4] or place.token >= len(ids):
            raise BadInput(
                f"the place in the data that a checkpoint holds is not there: {place} in {self.lane.documents.name} for {self._who}. Put "
                "the documents back as they were, or resume from another checkpoint"
            )
        self._wanted = None

    @property
    def place(self) -> Place:
        """Where the next sequence begins."""
        if not self._held:
            return self._start
        return self._held[0][0]._replace(token=self._token, taken=self._taken)

    def next(self) -> NDArray[np.int64]:
        """The next sequence: int64 [L + 1]. Its last token is the first of the one after it."""
        need = self.sequence + 1
        while self._size < need:
            self._held.append(next(self._pieces))
            if self._wanted is not None:
                self._arrive(self._wanted)
            self._size += len(self._held[-1][1])
        out = np.empty(need, np.int64)
        at, skip = 0, self._token
        for _, ids in self._held:
            some = ids[skip : skip + need - at]
            out[at : at + len(some)] = some
            at, skip = at + len(some), 0
            if at == need:
                break
        self._token += self.sequence
        self._size -= self.sequence
        self._taken += 1
        while self._token >= len(self._held[0][1]):
            self._token -= len(self._held.popleft()[1])
        return out

    def _read(self, place: Place) -> Iterator[tuple[Place, NDArray[np.int64]]]:
        """(place, ids and end mark) of documents, without end."""
        epoch, start, row, document = place[:4]
        end = np.array([self.tokenizer.eos], np.int64)
        while True:
            whole, found = not (start or row or document), False
            order = self._order(epoch)
            for at in range(start, len(order)):
                for begin, texts in self.lane.blocks(order[at], row, self.share, self.shuffle or BLOCK):
                    found = True
                    if self.shuffle:
                        mixed = permutation(len(texts), self.seed, Stream.DOCUMENTS, self.number, self.worker, epoch, order[at], begin)
                        texts = [texts[k] for k in mixed]
                    for k, ids in enumerate(self.tokenizer.encode(texts[document:]), document):
                        yield Place(epoch, at, begin, k), np.concatenate([ids, end])
                    document = 0
                row = 0
            if whole and not found:
                raise BadInput(
                    f"the share of {self._who} in {self.lane.documents.name} holds no document: give more text or more files, or take "
                    "fewer workers"
                )
            epoch, start = epoch + 1, 0

    def _order(self, epoch: int) -> Sequence[int]:
        files = self.share.files
        if not self.shuffle:
            return files
        return [files[k] for k in permutation(len(files), self.seed, Stream.DOCUMENTS, self.number, self.worker, epoch)]


@dataclass(frozen=True, eq=False)
class Packing:
    """What is packed, and how: a `gossamer.train.data.Reading`."""

    lanes: tuple[Lane, ...]
    tokenizer: Tokenizer
    shuffle: int
    """Documents that are put into a random order among themselves, and whether files are; 0: all as they come."""
    mark: str
    """Of the data: a place in others is no place in these."""

    def batches(self, sequence: int, seed: int, worker: int, workers: int) -> Batches:
        """See `gossamer.train.data.Reading`."""
        return Packed(self, sequence, seed, worker, workers)


@dataclass(eq=False)
class Packed:
    """The sequences of one worker. Which source sequence c comes from is drawn with the sources' weights from (seed, worker, c)."""

    packing: Packing
    sequence: int
    seed: int
    worker: int
    workers: int
    _at: int = field(default=0, init=False)
    _loaded: int = field(default=-1, init=False, repr=False)
    _marks: dict[int, list[Place]] = field(default_factory=dict, init=False, repr=False)
    """Cursor -> places that can be gone back to, beside the start: what was loaded, and the last batch."""
    _drawn: tuple[int, NDArray[np.int64]] = field(default=(-1, np.empty(0, np.int64)), init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers:
            raise BadInput(f"worker {self.worker} of {self.workers}; expected 0 to {self.workers - 1}")
        if self.sequence < 1:
            raise BadInput(f"sequence length {self.sequence}; expected at least 1 token")

    def batch(self, cursor: int, count: int) -> Tensor:
        """See `gossamer.train.data.Batches`. Any cursor will do; those that follow each other read nothing twice.

        Raises:
            BadInput: this worker's share holds no document.
            RunFailed: the documents can no longer be read.
        """
        self._go(cursor)
        self._marks = {c: p for c, p in self._marks.items() if c == self._loaded} | {cursor: self._places()}
        rows = np.stack([self._next() for _ in range(count)]) if count else np.empty((0, self.sequence + 1), np.int64)
        return torch.from_numpy(rows)

    def state(self) -> str:
        """Where it is, as JSON."""
        return json.dumps({"of": self._of, "cursor": self._at, "places": [list(place) for place in self._places()]})

    def load_state(self, state: str) -> None:
        """Takes back what `state` gave; of other data, another worker, or another number of them, nothing.

        Raises:
            BadInput: it is damaged.
        """
        try:
            said: dict[str, Any] = json.loads(state)
            if said["of"] != self._of:
                return
            cursor, places = said["cursor"], [Place._make(place) for place in said["places"]]
            self._check(cursor, places)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"the place in the data that a checkpoint holds is damaged ({error}): resume from another one") from error
        self._loaded = cursor
        self._marks[cursor] = places
        self._put(cursor)

    def _check(self, cursor: int, places: list[Place]) -> None:
        """That these can be places: see the bounds that each number has, whatever the documents.

        Raises:
            ValueError, TypeError: they cannot.
        """
        if len(places) != len(self._readers):
            raise ValueError(f"{len(places)} places, expected one for each of {len(self._readers)} sources")
        if (taken := sum(place.taken for place in places)) != cursor or type(cursor) is not int:
            raise ValueError(f"cursor {cursor!r} after {taken} sequences")
        for place, reader in zip(places, self._readers, strict=True):
            # An epoch, and a document, has a token at least: the end mark.
            tokens = place.taken * self.sequence
            most = Place(tokens, len(reader.share.files) - 1, _ROWS, tokens, tokens, cursor) if place.taken else Place()
            for name, value, limit in zip(Place._fields, place, most, strict=True):
                if type(value) is not int or not 0 <= value <= limit:
                    raise ValueError(f"{name} = {value!r}, expected 0 to {limit}")

    @cached_property
    def _readers(self) -> list[_Reader]:
        key = (self.seed, self.worker, self.workers)
        p = self.packing
        return [_Reader(lane, k, p.tokenizer, p.shuffle, self.sequence, key) for k, lane in enumerate(p.lanes)]

    @property
    def _of(self) -> list[object]:
        return [self.packing.mark, self.sequence, self.seed, self.worker, self.workers]

    def _places(self) -> list[Place]:
        return [reader.place for reader in self._readers]

    def _go(self, cursor: int) -> None:
        """Reads on, or from the nearest known place before `cursor`."""
        nearest = max((c for c in self._marks if c <= cursor), default=0)
        if not self._at <= cursor or nearest > self._at:
            self._put(nearest)
        if cursor - self._at >= _FAR:
            _log.info("Worker %d reads %d sequences of its data to come to where it goes on.", self.worker, cursor - self._at)
        while self._at < cursor:
            self._next()

    def _put(self, cursor: int) -> None:
        for reader, place in zip(self._readers, self._marks.get(cursor, [Place()] * len(self._readers)), strict=True):
            reader.go(place)
        self._at = cursor

    def _next(self) -> NDArray[np.int64]:
        reader = self._readers[self._source(self._at)]
        self._at += 1
        return reader.next()

    def _source(self, cursor: int) -> int:
        if len(self.packing.lanes) == 1:
            return 0
        block = cursor // _DRAWN
        if self._drawn[0] != block:
            weights = np.cumsum([lane.weight for lane in self.packing.lanes])
            u = uniform(_DRAWN, self.seed, Stream.MIX, self.worker, block)
            self._drawn = block, np.searchsorted(weights[:-1] / weights[-1], u, side="right")
        return int(self._drawn[1][cursor % _DRAWN])
