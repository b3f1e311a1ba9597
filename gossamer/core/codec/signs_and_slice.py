"""One bit a number of what the inner steps did, and every number itself now and then.

Gossip with GeoMesh's signs (CSS, Shin et al. 2026): signs make the workers move together, and a slice of the parameters, another one each
round, keeps them together.

>>> import torch
>>> from gossamer.core.tree import layout_of
>>> a, b = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {"w": torch.tensor([5.0, 2.0, 3.0, 4.0])}
>>> codec, layout = SignsAndSlice(slices=4), layout_of(a)
>>> said = []
>>> for z, sign in ((a, 1.0), (b, -1.0)):
...     said.append(torch.empty(codec.nbytes(layout), dtype=torch.uint8))
...     _ = codec.encode(z, {"w": torch.full((4,), 0.5 * sign)}, layout, {}, 0, said[-1])
>>> meeting = codec.meet(a, said[0], layout, 0)
>>> meeting.hear(said[1], 0.5)
{}
>>> meeting.mixed["w"].tolist()
[3.0, 2.5, 3.5, 4.5]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec.dense import Fp32
from gossamer.core.codec.pair import Wrong
from gossamer.core.codec.sign import Sign
from gossamer.core.fragment import shards
from gossamer.core.tree import Layout, Tree, flat, numel

_EXACT = Fp32()


@dataclass(frozen=True)
class SignsAndSlice:
    """Signs and magnitudes of D = x - z, and z itself in slice (round mod `slices`) of the model.

    With Q what the signs decode to (`Sign`), the difference that two packets tell is

        delta_ij = z_j - z_i  on the slice,    -(Q(D_j) - Q(D_i))  elsewhere

    the same on both ends but for its sign, so a symmetric W keeps the mean over workers to rounding. A worker keeps its own drift exactly;
    the others' reach it by their signs, and in full when their slice comes. Drifts count by tokens (`by_tokens`). Every number is mixed
    exactly once in `slices` rounds, so old disagreement shrinks by the rate of exact mixing once in so many rounds.
    """

    slices: int = 4
    """Slices of nearly equal size that the model is cut into; 1: everything is exact."""
    sign: Sign = field(default_factory=Sign)

    id: ClassVar[int] = 8
    version: ClassVar[int] = 1
    of_drift: ClassVar[bool] = True
    by_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        p.checked_int("slices of codec signs", self.slices, 1, 2**16)

    def nbytes(self, layout: Layout) -> int:
        """The signs, and 4 bytes for each number of the largest slice."""
        return self.sign.nbytes(layout) + 4 * -(-numel(layout) // self.slices)

    def start(self, layout: Layout) -> Tree:
        """Nothing."""
        return {}

    def slice(self, layout: Layout, round: int) -> Layout:
        """What is exact in `round`."""
        return shards(layout, self.slices)[round % self.slices]

    def encode(self, z: Tree, drift: Tree, layout: Layout, memory: Tree, round: int, out: Tensor) -> int:
        """Writes signs and slice. BadInput where trees, layout and `out` do not fit."""
        split, part = self.sign.nbytes(layout), self.slice(layout, round)
        zeros = self.sign.encode(drift, layout, self.sign.stats(drift, layout), out[:split])
        end = split + _EXACT.nbytes(part)
        _EXACT.encode(z, part, {}, out[split:end])
        out[end:] = 0
        return zeros

    def meet(self, z: Tree, own: Tensor, layout: Layout, round: int) -> SignsMeeting:
        """Begins a round's mixing, from a copy of z."""
        return SignsMeeting(self, z, own, layout, round)


class SignsMeeting:
    """One worker's side of a round of `SignsAndSlice`."""

    def __init__(self, codec: SignsAndSlice, z: Tree, own: Tensor, layout: Layout, round: int) -> None:
        self._codec, self._layout = codec, layout
        self._device = next(iter(z.values())).device if z else torch.device("cpu")
        self._z = {part.name: z[part.name].cpu() for part in layout}
        self._mixed = {name: values.clone() for name, values in self._z.items()}
        self._split, self._slice = codec.sign.nbytes(layout), codec.slice(layout, round)
        self._own = own[: self._split]

    @property
    def mixed(self) -> Tree:
        """z plus what was heard so far, where z is."""
        return {name: values.to(self._device) for name, values in self._mixed.items()}

    def hear(self, payload: Tensor, weight: float) -> Wrong:
        """Adds weight * delta. BadInput where the payload does not fit."""
        sign, split, part = self._codec.sign, self._split, self._slice
        exact = {piece.name: flat(self._mixed, piece).clone() for piece in part}
        sign.accumulate(payload[:split], self._layout, self._mixed, -weight)
        sign.accumulate(self._own, self._layout, self._mixed, weight)
        peers, at = payload[split:].numpy().view(p.F4), 0
        for piece in part:
            theirs = torch.from_numpy(peers[at : at + piece.size].astype(np.float32))
            at += piece.size
            delta = theirs.sub_(flat(self._z, piece))
            flat(self._mixed, piece).copy_(exact[piece.name].add_(delta.mul_(weight)))
        return {}

    def full(self, wrong: Wrong) -> Tensor:
        """Nothing: there is no range to be outside of."""
        return torch.empty(0, dtype=torch.uint8)

    def hear_full(self, payload: Tensor, wrong: Wrong, weight: float) -> None:
        """Nothing to add."""

    def memory(self) -> Tree:
        """Nothing."""
        return {}
