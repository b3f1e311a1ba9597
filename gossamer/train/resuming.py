"""A body that does no inner step twice: when its program is broken off in the middle of a round and begins that round again, as it does
where another worker is lost, it goes on from the step that it had come to.

    body = Resuming(TrainBody(...))
    body.boundary()                  # at each boundary, and
    body.break_off()                 # where the program ends before its round does; then
    body.load_state(of_the_boundary)
    body.begin(start)                # and the program runs again from that boundary

The steps are the same ones, so the parameters are too, bit for bit: the same batches, moments and random numbers, from the same parameters.
Where anything of that differs (other parameters, another plan) the steps are taken anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gossamer.core.tree import Tree
from gossamer.train.compute import Taken, TrainBody
from gossamer.worker.effects import Done, Work


@dataclass
class _Stretch:
    """The first inner steps of a round."""

    work: Work
    taken: Taken
    tree: Tree = field(default_factory=dict)
    """Parameters after them."""
    body: dict[str, Any] = field(default_factory=dict)
    start: Tree | None = None
    """Parameters before them; None: those of the boundary."""


class Resuming:
    """Implements `gossamer.worker.effects.Body` around a TrainBody."""

    def __init__(self, body: TrainBody) -> None:
        self.inner = body
        self._first = False
        """The next stretch is the first of its round."""
        self._entering = False
        """The program is about to load the parameters that it begins from."""
        self._entered: Tree | None = None
        """Those, where the round that is under way began with that; None where it began at a boundary."""
        self._under_way: _Stretch | None = None
        self._kept: _Stretch | None = None

    @property
    def kept(self) -> int:
        """Inner steps of the round that were broken off, and will not be taken again if the round begins as it had."""
        return self._kept.taken.steps if self._kept is not None else 0

    def boundary(self) -> None:
        """A round is complete; the next one begins from the parameters of now."""
        self._first, self._entering, self._entered, self._under_way, self._kept = True, False, None, None, None

    def break_off(self) -> None:
        """The program has ended within a round: what it had done of it is kept."""
        now = self._under_way
        if now is not None and now.taken.steps:
            now.tree = _copy(self.inner.tree)
            now.body = self.inner.state()
            self._kept = now
        self._first, self._entering, self._under_way = False, False, None

    def begin(self, start: Tree | None) -> None:
        """The program begins, and loads its parameters next.

        Args:
            start: it begins at the boundary after which it was broken off last, and these were its parameters there. None: from another
                state.
        """
        if start is None:
            self._kept = None
        elif self._kept is not None and self._kept.start is None:
            self._kept.start = _copy(start)
        self._entering, self._under_way = True, None

    def compute(self, work: Work) -> Done:
        """Takes the steps of `work`, but those that it had taken before."""
        first, kept, taken = self._first, self._kept, Taken()
        self._first, self._kept, self._under_way = False, None, None
        if work.kind != "steps" or not first:
            return self.inner.compute(work)
        if self._common(kept.taken.steps if kept is not None and kept.work == work else 0) and kept is not None:
            self.inner.load(kept.tree)
            self.inner.load_state(kept.body)
            taken = kept.taken
        self._under_way = now = _Stretch(work, taken, start=self._entered)
        try:
            return self.inner.compute(work, taken)
        finally:
            now.taken = self.inner.taken

    def _common(self, mine: int) -> int:
        """Steps that need not be taken again: of several ranks those that all have, where all have as many, else none."""
        if (ranks := self.inner.ranks) is None:
            return mine
        sums = ranks.sum(torch.tensor([mine, mine**2], dtype=torch.float64)).tolist()
        return mine if sums == [ranks.size * mine, ranks.size * mine**2] else 0

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        """Sets parameters. What was under way is over with that."""
        begins = self._entering and not reset_inner
        if not begins or (self._kept is not None and (self._kept.start is None or not _equal(self._kept.start, tree))):
            self._kept = None
        self._first, self._entering, self._under_way = begins, False, None
        self._entered = _copy(tree) if begins else None
        self.inner.load(tree, reset_inner)

    def state(self) -> dict[str, Any]:
        """As of the body."""
        return self.inner.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As of the body."""
        self.inner.load_state(state)


def _copy(tree: Tree) -> Tree:
    return {name: v.clone() for name, v in tree.items()}


def _equal(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
