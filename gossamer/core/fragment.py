"""Cutting a layout into pieces that travel apart: shards for a reduce-scatter, fragments for streaming."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, numel


@lru_cache(maxsize=128)
def shards(layout: Layout, n: int) -> tuple[Layout, ...]:
    """`n` consecutive pieces of nearly equal size; together they carry every element of `layout` once. Some are empty if n is larger
    than the layout.

    >>> import torch
    >>> from gossamer.core.tree import layout_of
    >>> [[(p.name, p.lo, p.hi) for p in piece] for piece in shards(layout_of({"w": torch.zeros(6), "b": torch.zeros(2)}), 2)]
    [[('w', 0, 4)], [('w', 4, 6), ('b', 0, 2)]]
    """
    total = numel(layout)
    edges = [total * k // n for k in range(n + 1)]
    pieces: list[Layout] = []
    for lo, hi in itertools.pairwise(edges):
        piece = []
        start = 0
        for part in layout:
            a, b = max(lo, start), min(hi, start + part.size)
            if a < b:
                piece.append(replace(part, lo=part.lo + a - start, hi=part.lo + b - start))
            start += part.size
        pieces.append(tuple(piece))
    return tuple(pieces)


@lru_cache(maxsize=16)
def fragments(layout: Layout, count: int) -> tuple[Layout, ...]:
    """`count` consecutive pieces of whole tensors, none empty: cut between the tensors nearest to equal sizes.

    Raises:
        BadInput: more fragments than tensors, or fewer than one.

    >>> import torch
    >>> from gossamer.core.tree import layout_of
    >>> tree = {"a": torch.zeros(4), "b": torch.zeros(1), "c": torch.zeros(2), "d": torch.zeros(3)}
    >>> [[p.name for p in piece] for piece in fragments(layout_of(tree), 3)]
    [['a'], ['b', 'c'], ['d']]
    """
    tensors = [tuple(parts) for _, parts in itertools.groupby(layout, key=lambda part: part.name)]
    if not 1 <= count <= len(tensors):
        raise BadInput(
            f"{count} fragments of a model of {len(tensors)} tensors: expected 1 to {len(tensors)}, since a fragment is whole tensors"
        )
    ends = list(itertools.accumulate((numel(parts) for parts in tensors), initial=0))
    edges = [0]
    for k in range(1, count):
        target = ends[-1] * k / count
        edges.append(min(range(edges[-1] + 1, len(tensors) - count + k + 1), key=lambda i: abs(ends[i] - target)))
    return tuple(tuple(itertools.chain(*tensors[a:b])) for a, b in itertools.pairwise([*edges, len(tensors)]))
