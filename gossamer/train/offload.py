"""A body whose model is on one device and whose trees are on the host, so that anchor, momentum and residuals take none of the device's
memory.

    live    the parameters, on the model's device          passing    a host buffer of each parameter, pinned beside a GPU

    compute: passing <- live, all copies at once and one wait;  load: passing <- value, live <- passing, for which nobody waits: the next
    steps stand behind it in the device's queue.

The program then works on the host: drifts, codecs and outer steps have the bits of the CPU. The buffers cost P times the size of a
parameter in pinned memory; what the program keeps is ordinary memory of the host.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gossamer.core.tree import Tree
from gossamer.train.compute import Taken, TrainBody
from gossamer.worker.effects import Done, Work

HOST = torch.device("cpu")
_NONE = Taken()


class Offloaded(TrainBody):
    """Implements `gossamer.worker.effects.Body` as `TrainBody` does.

    The trees that it gives are of the host, and valid until the next `compute` or `load`, as those of any body.
    """

    @property
    def home(self) -> torch.device:
        """Of the trees."""
        return HOST

    @cached_property
    def _passing(self) -> Tree:
        pinned = self._under_way is not None
        return {name: torch.empty(p.shape, dtype=p.dtype, device=HOST, pin_memory=pinned) for name, p in self._live.items()}

    @cached_property
    def _under_way(self) -> torch.cuda.Event | None:
        """Passed when the last copies out of or into `_passing` are done; only a GPU lets anybody go on before."""
        return torch.cuda.Event() if self.device.type == "cuda" else None

    def compute(self, work: Work, taken: Taken = _NONE) -> Done:
        """As of `TrainBody`; the tree is on the host."""
        done = super().compute(work, taken)
        return done._replace(tree=self._brought(done.tree or {}))

    @property
    def tree(self) -> Tree:
        """The parameters, on the host."""
        return self._brought(self._live)

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        """As of `TrainBody`. It returns before the device has the parameters; `tree` is free at once."""
        self._settle()
        super().load(tree, reset_inner)
        self._mark()

    def _set(self, name: str, value: Tensor) -> None:
        passing = self._passing[name]
        passing.copy_(value)  # casts
        self._live[name].copy_(passing, non_blocking=True)

    def _brought(self, tree: Tree) -> Tree:
        """`tree` in the buffers."""
        self._settle()
        for name, value in tree.items():
            self._passing[name].copy_(value, non_blocking=True)
        self._mark()
        self._settle()
        return {name: self._passing[name] for name in tree}

    def _mark(self) -> None:
        if self._under_way is not None:
            self._under_way.record(torch.cuda.current_stream(self.device))

    def _settle(self) -> None:
        """Waits until the buffers may be written to or read."""
        if self._under_way is not None:
            self._under_way.synchronize()
