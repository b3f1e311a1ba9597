"""Workers of several ranks: which flat ranges of the model each holds, and the cuts that all of them share.

A worker of R ranks (processes, one GPU each) keeps one shard of the model in each. A shard is as `torch.distributed.fsdp.fully_shard` cuts
it: of every tensor the rows r * ceil(rows / R) to (r + 1) * ceil(rows / R), the last ones fewer or none. Row-major, so a flat range.

Workers of unlike rank counts cut at unlike places. The *atoms* of a layout are its parts cut at the edges of all rank counts of the run:
each atom lies within one rank of every worker. What travels is encoded atom by atom, so that any two ranks exchange the atoms that both
hold, and every receiver decodes the same numbers, however many ranks it has.

>>> import torch
>>> from gossamer.core.tree import layout_of
>>> tree = {"w": torch.zeros(6, 2), "b": torch.zeros(2)}
>>> ranges = Ranges((1, 2, 3), {name: len(t) for name, t in tree.items()})
>>> atoms = ranges.atoms(layout_of(tree))
>>> [(p.name, p.lo, p.hi) for p in atoms]
[('w', 0, 4), ('w', 4, 6), ('w', 6, 8), ('w', 8, 12), ('b', 0, 1), ('b', 1, 2)]
>>> [(p.name, p.lo, p.hi) for p in ranges.held(atoms, 1, 0)]
[('w', 0, 4), ('w', 4, 6), ('b', 0, 1)]
>>> [(p.name, p.lo, p.hi) for p in ranges.held(atoms, 2, 2)]
[('w', 8, 12), ('b', 2, 2)]
>>> ranges.place(4), list(ranges.seats(2))
((2, 1), [3, 4, 5])
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, Part, Tree, bits_of, flat


def rows_of(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows (first, one after the last) that a rank holds of a tensor of `rows` rows.

    >>> [rows_of(7, 3, r) for r in range(3)], [rows_of(2, 3, r) for r in range(3)]
    ([(0, 3), (3, 6), (6, 7)], [(0, 1), (1, 2), (2, 2)])
    """
    step = -(-rows // ranks)
    return min(rows, step * rank), min(rows, step * (rank + 1))


@dataclass(frozen=True, eq=False)
class Ranges:
    """How the workers of a run cut the model over their ranks. Seats are the ranks of all workers, numbered worker by worker.

    Raises:
        BadInput: a worker without a rank.
    """

    ranks: tuple[int, ...]
    """Ranks of each worker."""
    rows: Mapping[str, int]
    """Rows of each tensor: its first dimension, 1 for a scalar."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise BadInput(f"ranks of the workers are {list(self.ranks)}: expected 1 or more each")

    @cached_property
    def _first(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.ranks, initial=0))

    @property
    def n(self) -> int:
        """Seats."""
        return self._first[-1]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The worker of each seat."""
        return tuple(w for w, ranks in enumerate(self.ranks) for _ in range(ranks))

    def seats(self, worker: int) -> range:
        """The seats of `worker`, in the order of its ranks."""
        return range(self._first[worker], self._first[worker + 1])

    def place(self, seat: int) -> tuple[int, int]:
        """(worker, rank) of a seat."""
        worker = self.workers[seat]
        return worker, seat - self._first[worker]

    def span(self, part: Part, ranks: int, rank: int) -> tuple[int, int]:
        """The flat range of the full tensor of `part` that a rank of a worker of `ranks` holds."""
        rows = self.rows[part.name]
        lo, hi = rows_of(rows, ranks, rank)
        width = part.numel // max(1, rows)
        return lo * width, hi * width

    def atoms(self, layout: Layout) -> Layout:
        """The parts of `layout` cut at the edges of all rank counts; none empty, but where a part is."""
        pieces: list[Part] = []
        for part in layout:
            edges = {self.span(part, ranks, rank)[0] for ranks in set(self.ranks) for rank in range(ranks)}
            inner = sorted(edge for edge in edges if part.lo < edge < part.hi)
            pieces += [replace(part, lo=a, hi=b) for a, b in itertools.pairwise([part.lo, *inner, part.hi])]
        return tuple(pieces)

    def held(self, layout: Layout, worker: int, rank: int) -> Layout:
        """What a rank holds of `layout`, made of atoms or pieces of them, as parts of its own tree. Of a tensor of which it holds nothing
        there is one empty part, so that all ranks name all tensors in one order."""
        ranks = self.ranks[worker]
        pieces: list[Part] = []
        for _, parts in itertools.groupby(layout, key=lambda part: part.name):
            of_tensor = list(parts)
            lo, hi = self.span(of_tensor[0], ranks, rank)
            mine = [replace(p, within=(lo, hi)) for p in of_tensor if lo <= p.lo and p.hi <= hi and p.size]
            pieces += mine or [replace(of_tensor[0], lo=lo, hi=lo, within=(lo, hi))]
        return tuple(pieces)

    def common(self, layout: Layout, worker: int, rank: int) -> tuple[int, ...]:
        """Which parts of `layout` (made of atoms) the rank of another worker holds, too: their places in `layout`."""
        ranks = self.ranks[worker]
        found = []
        for k, part in enumerate(layout):
            lo, hi = self.span(part, ranks, rank)
            if part.size and lo <= part.lo and part.hi <= hi:
                found.append(k)
        return tuple(found)


def mark(layout: Layout, trees: Sequence[Tree], counts: Tree | None = None) -> int:
    """A 64-bit mark of the bits of `trees` that adds up: the sum, modulo 2^64, over the ranks of a worker is the same however many there
    are, where `layout` is made of atoms.

    Args:
        counts: one number a tensor, which all ranks hold; it goes with the first element of the tensor.
    """
    total = 0
    for part in layout:
        if not part.size:
            continue
        h = hashlib.blake2b(f"{part.name},{part.lo},{part.hi}".encode(), digest_size=8)
        for tree in trees:
            h.update(bits_of(flat(tree, part)))
        if counts is not None and part.lo == 0:
            h.update(bits_of(counts[part.name]))
        total += int.from_bytes(h.digest(), "little")
    return total % 2**64
