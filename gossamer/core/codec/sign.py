"""One bit a number and one magnitude a group: what GeoMesh calls CSS (Shin et al. 2026).

>>> import torch
>>> from gossamer.core.tree import layout_of, zeros_like
>>> tree = {"w": torch.tensor([3.0, -1.0, 0.5, -0.5])}
>>> codec, layout = Sign(), layout_of(tree)
>>> out = torch.empty(codec.nbytes(layout), dtype=torch.uint8)
>>> codec.encode(tree, layout, codec.stats(tree, layout), out), out.numel()
(0, 8)
>>> mean = zeros_like(tree)
>>> codec.accumulate(out, layout, mean, 1.0)
>>> mean["w"].tolist()
[1.25, -1.25, 1.25, -1.25]
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from gossamer.core.codec import payload as p
from gossamer.core.codec import signs, signs_device
from gossamer.core.codec.base import Stats
from gossamer.core.errors import BadInput
from gossamer.core.feedback import Feedback
from gossamer.core.tree import Layout, Part, Tree


@dataclass(frozen=True)
class Sign:
    """Bits s = [D >= 0] and magnitudes m = mean|D| of each group; decoded m * (2s - 1).

    mean|D| is the scale of a sign that minimises sum (D - m * sign D)^2. Groups are counted in the full tensor, so that the slices of
    a tensor decode to what the whole does; the statistics may be those of a larger layout than the one encoded. A group of magnitude 0
    (an embedding row that no token touched) decodes to zero; elsewhere an exact zero takes bit 1 and is counted by `encode`.
    A part's bytes: the magnitudes (float32) of every group that the range touches, then its bits in linear order, lowest bit of a byte
    first, then padding.
    """

    magnitude: Literal["tensor", "row", "block"] = "tensor"
    """What shares a magnitude: a tensor, a row of it (numel / shape[0] elements), or a block of `block` elements."""
    block: int = 256
    """Elements of a block, where magnitude = "block"."""
    embeddings: Literal["row", "same"] = "row"
    """Parts marked `by_row` (embeddings, output layers) take one magnitude a row whatever `magnitude` says, or the same as all."""

    id: ClassVar[int] = 5
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        p.checked_name("magnitude of codec sign", self.magnitude, ("tensor", "row", "block"))
        p.checked_name("embeddings of codec sign", self.embeddings, ("row", "same"))
        p.checked_int("block of codec sign", self.block, 1, 2**31 - 1)

    @property
    def lossy(self) -> bool:
        """True."""
        return True

    def group(self, part: Part) -> int:
        """Elements of the full tensor that share a magnitude."""
        if self.magnitude == "row" or (part.by_row and self.embeddings == "row"):
            return part.row
        return self.block if self.magnitude == "block" else max(1, part.numel)

    def _place(self, part: Part) -> signs.Place:
        group = self.group(part)
        first = part.lo // group
        return signs.Place(part.lo, group, first, -(-part.hi // group) if part.size else first)

    def part_nbytes(self, part: Part) -> int:
        """Bytes of one part."""
        place = self._place(part)
        return 4 * (place.after - place.first) + p.padded(-(-part.size // 8))

    def nbytes(self, layout: Layout) -> int:
        """1 bit a number, each part padded to 4 bytes, and 4 bytes a magnitude."""
        return p.nbytes(self, layout)

    def stats(self, tree: Tree, layout: Layout) -> Stats:
        """Per tensor [2, groups of the full tensor], float64: sum|D| over the elements carried, and how many they are. Sums of disjoint
        layouts (the ranks of a site) add up."""
        result: Stats = {}
        for part in layout:
            if part.name not in result:
                result[part.name] = self._no_stats(part)
            self._scan(p.range_of(tree, part), part, None, result[part.name])
        return result

    def encode(self, tree: Tree, layout: Layout, stats: Stats, out: Tensor) -> int:
        """Writes magnitudes and bits. Returns how many exact zeros will be decoded as +m with m > 0.
        BadInput where tree, layout, statistics and `out` do not fit."""
        lost = 0
        for part, raw in p.to_fill(self, layout, out):
            values = p.range_of(tree, part)
            m = self._magnitudes(stats.get(part.name), part)
            bits = self._fill(raw, m)
            zeros = self._scan(values, part, bits, None)
            lost += 0 if zeros is None else int(zeros[m > 0].sum())
        return lost

    def write(
        self, tree: Tree, layout: Layout, pieces: Sequence[tuple[Layout, Tensor]], feedback: Feedback | None, residual: Tree | None
    ) -> Generator[Tensor, Tensor, list[int]]:
        """What gossamer.core.codec.write says, tensor by tensor: bits and sums of |D| are taken in the pass that absorbs; what is decoded
        is taken off again when the sums are back, while the tensor is still in cache, if it fits. No other pass, nothing as large as a
        tensor beside it."""
        e = tree if residual is None else residual
        ranges: dict[str, list[tuple[int, Part, p.Bytes]]] = {}
        for k, (piece, out) in enumerate(pieces):
            for part, raw in p.to_fill(self, piece, out):
                ranges.setdefault(part.name, []).append((k, part, raw))
        lost = [0] * len(pieces)
        for found in ranges.values():
            sums, zeros = self._no_stats(found[0][1]), []
            for _, part, raw in found:
                said = None if residual is None else p.range_of(tree, part)
                bits = raw[4 * self._groups(part) :]
                zeros.append(self._scan(p.range_of(e, part), part, bits, sums, said, feedback.decay if feedback else 1.0))
            sums = yield sums
            for (k, part, raw), zero in zip(found, zeros, strict=True):
                m = self._magnitudes(sums, part)
                bits = self._fill(raw, m)
                lost[k] += 0 if zero is None else int(zero[m > 0].sum())
                if residual is not None:
                    self._add(p.range_of(e, part), part, bits, -m)
        return lost

    def accumulate(self, payload: Tensor, layout: Layout, acc: Tree, weight: float) -> None:
        """acc += (weight * m) * (2s - 1) with weight * m rounded to float32 once, which is the same as weight * decoded.
        BadInput where payload, layout and `acc` do not fit."""
        w = np.float32(weight)
        for part, raw in p.to_read(self, payload, layout):
            split = 4 * self._groups(part)
            self._add(p.range_of(acc, part), part, raw[split:], raw[:split].view(p.F4) * w)

    def _groups(self, part: Part) -> int:
        """How many groups the range touches."""
        place = self._place(part)
        return place.after - place.first

    def _no_stats(self, part: Part) -> Tensor:
        return torch.zeros(2, -(-part.numel // self.group(part)), dtype=torch.float64)

    def _magnitudes(self, stats: Tensor | None, part: Part) -> p.Floats:
        """float32(sum|D| / count) of the groups that the range touches; 0 where nothing was counted."""
        place = self._place(part)
        want = (2, -(-part.numel // place.group))
        if stats is None or stats.dtype != torch.float64 or tuple(stats.shape) != want:
            got = "nothing" if stats is None else f"{stats.dtype} of shape {tuple(stats.shape)}"
            raise BadInput(
                f"the statistics hold {got} for {part.name!r}, expected float64 of shape {want}: pass what {self}.stats returned"
            )
        both = stats.detach().cpu().numpy()[:, place.first : place.after]
        mean = np.zeros(place.after - place.first)
        np.divide(both[0], both[1], out=mean, where=both[1] != 0)
        return mean.astype(np.float32)

    def _fill(self, raw: p.Bytes, m: p.Floats) -> p.Bytes:
        """Writes the magnitudes of a part. Returns the place of its bits."""
        raw[: 4 * m.size].view(p.F4)[:] = m
        return raw[4 * m.size :]

    def _scan(
        self, values: Tensor, part: Part, bits: p.Bytes | None, sums: Tensor | None, said: Tensor | None = None, decay: float = 1.0
    ) -> signs.Counts | None:
        """signs.scan where the tensor is."""
        host = None if sums is None else sums.numpy()
        if values.device.type != "cpu":
            return signs_device.scan(values, self._place(part), bits, host, said, decay)
        return signs.scan(values.numpy(), self._place(part), bits, host, None if said is None else said.numpy(), decay)

    def _add(self, target: Tensor, part: Part, bits: p.Bytes, scaled: p.Floats) -> None:
        """signs.add where the tensor is."""
        if not part.size:
            return
        if target.device.type != "cpu":
            signs_device.add(target, bits, self._place(part), scaled)
        else:
            signs.add(target.numpy(), bits, self._place(part), scaled)
