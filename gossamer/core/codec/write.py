"""Encoding as a round needs it: error feedback, statistics, their sum over the site, payloads, and what was not said."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from gossamer.core.codec.base import Codec
from gossamer.core.feedback import Feedback
from gossamer.core.tree import Layout, Tree


@runtime_checkable
class Writer(Protocol):
    """A codec with a quicker way to do what `write` does, of the same bits."""

    def write(
        self, tree: Tree, layout: Layout, pieces: Sequence[tuple[Layout, Tensor]], feedback: Feedback | None, residual: Tree | None
    ) -> Generator[Tensor, Tensor, list[int]]:
        """As the function `write`."""


def write(
    codec: Codec,
    tree: Tree,
    layout: Layout,
    pieces: Sequence[tuple[Layout, Tensor]],
    feedback: Feedback | None = None,
    residual: Tree | None = None,
) -> Generator[Tensor, Tensor, list[int]]:
    """Encodes `tree`, whole or in pieces. Yields each float64 statistic and is sent its sum over the site (the same at one rank).

    With a residual: e <- decay * e + D; e is encoded; e <- e - decoded, in place, with `tree` = D left as it is. Without one, D is encoded.

    Args:
        layout: what is said.
        pieces: disjoint layouts that together carry `layout`, each with the buffer of its payload (uint8, nbytes of the piece).
        feedback, residual: both or neither; the residual has the names and shapes of `tree`.

    Returns:
        For each piece, how many exact zeros the codec could not represent.

    Raises:
        BadInput: tree, residual, layouts and buffers do not fit.

    >>> import torch
    >>> from gossamer.core.codec import Sign
    >>> from gossamer.core.tree import layout_of
    >>> tree, residual = {"w": torch.tensor([3.0, -1.0])}, {"w": torch.tensor([0.0, -2.0])}
    >>> layout, out = layout_of(tree), torch.empty(8, dtype=torch.uint8)
    >>> writing = write(Sign(), tree, layout, [(layout, out)], Feedback(), residual)
    >>> sums = next(writing)
    >>> sums.tolist()
    [[6.0], [2.0]]
    >>> try:
    ...     writing.send(sums)
    ... except StopIteration as end:
    ...     print(end.value, residual["w"].tolist())
    [0] [0.0, 0.0]
    """
    if isinstance(codec, Writer):
        return (yield from codec.write(tree, layout, pieces, feedback, residual))
    if feedback and residual is not None:
        tree = feedback.absorb(residual, tree)
    stats = codec.stats(tree, layout)
    for name in stats:
        stats[name] = yield stats[name]
    lost = [codec.encode(tree, piece, stats, out) for piece, out in pieces]
    if residual is not None:
        for piece, out in pieces:
            codec.accumulate(out, piece, tree, -1.0)
    return lost
