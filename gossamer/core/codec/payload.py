"""How every codec lays out its bytes: the parts of the layout in order, each padded with zeros to a multiple of 4 bytes, little-endian.

A codec says how many bytes one part takes (`part_nbytes`); the functions here walk tree and payload side by side and hand out flat NumPy
views, so that a codec is written as what it does to one range.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, Part, Tree, flat

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

CHUNK = 1 << 18
"""Elements worked on at a time (a multiple of 8): scratch of this size stays in cache, and no temporary is as large as a tensor."""

F4 = np.dtype("<f4")
"""float32 as it travels."""


class PartCodec(Protocol):
    """What the walk needs to know of a codec."""

    def part_nbytes(self, part: Part) -> int:
        """Bytes that `part` takes, padding included."""

    def __hash__(self) -> int:
        """A frozen dataclass has it."""


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4."""
    return -(-nbytes // 4) * 4


@lru_cache(maxsize=4096)
def nbytes(codec: PartCodec, layout: Layout) -> int:
    """Payload bytes of `layout`, remembered."""
    return sum(codec.part_nbytes(part) for part in layout)


def scratch_size(layout: Layout, step: int = CHUNK) -> int:
    """Elements of scratch that serve every part in steps of `step`."""
    return min(step, max((part.size for part in layout), default=0))


def checked_int(what: str, value: int, low: int, high: int) -> None:
    """Refuses a setting that is not a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadInput(f"{what} = {value!r}: expected a whole number from {low} to {high}")


def checked_name(what: str, value: str, known: Iterable[str]) -> None:
    """Refuses a word that is not one of `known`, naming the nearest."""
    names = list(known)
    if value not in names:
        near = difflib.get_close_matches(str(value).lower(), names, 1, 0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BadInput(f"{what} = {value!r} is not known: {hint}expected one of {', '.join(map(repr, names))}")


def range_of(tree: Tree, part: Part) -> Tensor:
    """The range of `part` as a flat view, where the tensor lives.

    Raises:
        BadInput: the tensor is missing, of another dtype or size, or not contiguous.
    """
    t = tree.get(part.name)
    if t is None:
        raise BadInput(f"the layout carries {part.name!r}, which the tree lacks: make the layout from the same tree (layout_of)")
    if t.dtype != torch.float32 or not t.is_contiguous():
        raise BadInput(f"tensor {part.name!r} is {t.dtype}, strides {t.stride()}: codecs take contiguous float32 (tree.master makes it so)")
    first, after = part.held
    if t.numel() != after - first or not 0 <= first <= part.lo <= part.hi <= after <= part.numel:
        raise BadInput(
            f"the layout says {part.name!r} has {after - first} elements and carries {part.lo} to {part.hi}, the tensor has {t.numel()}: "
            "make the layout from the same tree (layout_of)"
        )
    return flat(tree, part).detach()


def source(tree: Tree, part: Part) -> Floats:
    """The range of `part` as a flat NumPy view (a copy where the tensor is not on the CPU)."""
    values: Floats = range_of(tree, part).cpu().numpy()
    return values


def _raw(codec: PartCodec, layout: Layout, payload: Tensor, what: str) -> Bytes:
    want = nbytes(codec, layout)
    if payload.dtype != torch.uint8 or payload.ndim != 1 or payload.numel() != want or not payload.is_contiguous():
        raise BadInput(
            f"{what} is {payload.dtype} of shape {tuple(payload.shape)}: {codec} needs contiguous uint8 of nbytes(layout) = {want} here"
        )
    raw: Bytes = payload.detach().cpu().numpy()
    return raw


def to_fill(codec: PartCodec, layout: Layout, out: Tensor) -> Iterator[tuple[Part, Bytes]]:
    """(part, its bytes to fill) for each part. The last four bytes are zeroed, so that padding is always zero.

    Raises:
        BadInput: `out` is not nbytes(layout) contiguous bytes on the CPU.
    """
    if out.device.type != "cpu":
        raise BadInput(f"out is on {out.device}: packets are CPU bytes, allocate it there")
    raw = _raw(codec, layout, out, "out")
    at = 0
    for part in layout:
        end = at + codec.part_nbytes(part)
        raw[max(at, end - 4) : end] = 0
        yield part, raw[at:end]
        at = end


def encoding(codec: PartCodec, tree: Tree, layout: Layout, out: Tensor) -> Iterator[tuple[Part, Floats, Bytes]]:
    """(part, its values, its bytes to fill) for each part, as `to_fill`. What is not on the CPU is copied there.

    Raises:
        BadInput: a tensor is missing, of another dtype or size; `out` is not nbytes(layout) contiguous bytes on the CPU.
    """
    for part, raw in to_fill(codec, layout, out):
        yield part, source(tree, part), raw


def to_read(codec: PartCodec, payload: Tensor, layout: Layout) -> Iterator[tuple[Part, Bytes]]:
    """(part, its bytes) for each part.

    Raises:
        BadInput: `payload` is not nbytes(layout) contiguous bytes.
    """
    raw = _raw(codec, layout, payload, "payload")
    at = 0
    for part in layout:
        end = at + codec.part_nbytes(part)
        yield part, raw[at:end]
        at = end


def decoding(codec: PartCodec, payload: Tensor, layout: Layout, acc: Tree) -> Iterator[tuple[Part, Bytes, Floats]]:
    """(part, its bytes, the values to add to in place) for each part. What is added to a tensor elsewhere is gathered here, then added
    there, once: the codec adds to -0.0, which changes nothing, the sign of a zero included.

    Raises:
        BadInput: a tensor is missing, of another dtype or size; `payload` is not nbytes(layout) contiguous bytes.
    """
    for part, raw in to_read(codec, payload, layout):
        target = range_of(acc, part)
        host = target if target.is_cpu else torch.full(target.shape, -0.0, dtype=torch.float32)
        yield part, raw, host.numpy()
        if not target.is_cpu:
            target.add_(host.to(target.device))


def add_scaled(target: Floats, values: Floats, weight: np.float32) -> None:
    """target += weight * values: multiply, then add. Overwrites `values`."""
    if weight != 1:
        np.multiply(values, weight, out=values)
    np.add(target, values, out=target)
