"""One mean for all who ask for the same: logical workers of a synchronous method decode the same packets with the same weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gossamer.core.codec.base import Codec
from gossamer.core.combine import Piece, combine
from gossamer.core.tree import Tree


class MemoCombine:
    """`gossamer.core.combine.combine`, remembering its last few results. Whoever is given one must not write to it."""

    def __init__(self, entries: int = 4) -> None:
        self._entries = entries
        self._memo: OrderedDict[tuple[object, ...], tuple[Sequence[Piece], Tree]] = OrderedDict()

    def __call__(self, pieces: Sequence[Piece], codec: Codec, like: Tree) -> Tree:
        # An entry keeps its payloads alive, so that an address in a key can't come to mean another payload.
        key = (codec, *((p.weight, p.payload.data_ptr(), p.payload.numel(), id(p.layout)) for p in pieces))
        if key in self._memo:
            self._memo.move_to_end(key)
            return self._memo[key][1]
        tree = combine(pieces, codec, like)
        self._memo[key] = (pieces, tree)
        if len(self._memo) > self._entries:
            self._memo.popitem(last=False)
        return tree
