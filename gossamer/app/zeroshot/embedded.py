"""The embedded suite: items made of held-out text, by a seed, without any download. They tell models apart that are too small, or trained
for too short a time, for the public tasks.

Text is cut into blocks of `CONTEXT` + `TARGET` words that do not overlap, so no two items share a word; the seed draws which blocks are
asked. The words keep the white space in front of them. Of each block the first `CONTEXT` words are the context.

- `word_order`: the last `TARGET` words as they stand, against the same with two of them, unequal and not neighbours, in each other's place.
  Both choices have the same words, so nothing but their order tells them apart. Chance is 1/2.
- `cloze`: the last `TARGET` words against those of three other blocks: of another document where there is one, and among 24 candidates the
  nearest in length. All begin with the same white space. Chance is 1/4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from gossamer.app.zeroshot.items import Item
from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, words

CONTEXT = 16
TARGET = 8
ITEMS = 500
"""Of a task, where the text has as many blocks."""
LEAST = 20
"""With fewer blocks a text is refused: no difference would be seen."""
NAMES = ("word_order", "cloze")
_CANDIDATES = 24
_WORD = re.compile(r"\s*\S+")


class Block(NamedTuple):
    """A stretch of one document."""

    document: int
    words: tuple[str, ...]
    """With the white space in front of each."""

    @property
    def context(self) -> str:
        return "".join(self.words[:CONTEXT]).lstrip()

    @property
    def target(self) -> str:
        return "".join(self.words[CONTEXT:])


def make(name: str, documents: Iterable[str], seed: int, count: int = ITEMS) -> list[Item]:
    """The items of the task `name`: a function of the text, the seed and the count alone.

    Args:
        count: at most so many; fewer where the text has no more blocks. A smaller count gives the first of a larger one's.

    Raises:
        BadInput: too little text.
    """
    blocks = _blocks(documents)
    if len(blocks) < LEAST:
        raise BadInput(
            f"the text has {len(blocks)} stretches of {CONTEXT + TARGET} words, and the embedded suite needs {LEAST}: "
            "give it more text, with --text FOLDER"
        )
    order = words(len(blocks), seed, Stream.ITEMS).argsort(kind="stable")
    drawn = [blocks[k] for k in order]
    return list(islice(_word_order(drawn, seed) if name == "word_order" else _cloze(drawn, seed), count))


def _blocks(documents: Iterable[str]) -> list[Block]:
    size = CONTEXT + TARGET
    found = []
    for number, text in enumerate(documents):
        all_words = _WORD.findall(text)
        found += [Block(number, tuple(all_words[lo : lo + size])) for lo in range(0, len(all_words) - size + 1, size)]
    return found


def _word_order(blocks: Sequence[Block], seed: int) -> Iterator[Item]:
    for number, block in enumerate(blocks):
        target = block.words[CONTEXT:]
        bare = [word.lstrip() for word in target]
        pairs = [(i, j) for i in range(TARGET) for j in range(i + 2, TARGET) if bare[i] != bare[j]]
        if not pairs:
            continue
        which, place = words(2, seed, Stream.ITEMS, 1, number)
        i, j = pairs[int(which % len(pairs))]
        swapped = list(target)
        swapped[i], swapped[j] = _space(target[i]) + bare[j], _space(target[j]) + bare[i]
        yield _placed(block.context, [block.target, "".join(swapped)], int(place % 2))


def _cloze(blocks: Sequence[Block], seed: int) -> Iterator[Item]:
    for number, block in enumerate(blocks):
        others = [blocks[(number + k) % len(blocks)] for k in range(1, len(blocks))]
        others = [b for b in others[: 4 * _CANDIDATES] if b.document != block.document] or others
        space, true = _space(block.target), block.target.lstrip()
        texts = dict.fromkeys(b.target.lstrip() for b in others[:_CANDIDATES])
        texts.pop(true, None)
        near = sorted(texts, key=lambda text: (abs(len(text.encode()) - len(true.encode())), text))[:3]
        if len(near) == 3:
            (place,) = words(1, seed, Stream.ITEMS, 2, number)
            yield _placed(block.context, [space + text for text in (true, *near)], int(place % 4))


def _placed(context: str, choices: list[str], gold: int) -> Item:
    """The first choice, which is the right one, moved to the place `gold`."""
    right, *wrong = choices
    return Item((context,), (*wrong[:gold], right, *wrong[gold:]), gold)


def _space(word: str) -> str:
    return word[: len(word) - len(word.lstrip())]
