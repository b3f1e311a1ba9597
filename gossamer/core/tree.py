"""Named tensors, and the flat ranges of them that travel.

A `Tree` is one seat's parameters (or anything of their shape: a drift, a gradient, a momentum). A `Layout` says which flat
range of which tensor a payload carries, in which order: the whole model, one shard of it, one fragment of it.

>>> import torch
>>> layout = layout_of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
>>> [(part.name, part.lo, part.hi) for part in layout], numel(layout)
([('w', 0, 6), ('b', 0, 2)], 8)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Tree: TypeAlias = dict[str, Tensor]
"""Named tensors in a fixed order. Pseudo-gradients and outer state are float32 whatever the parameter dtype."""


@dataclass(frozen=True, slots=True)
class Part:
    """A flat range of one tensor."""

    name: str
    numel: int
    """Elements of the full tensor."""
    lo: int
    hi: int
    """The range carried: elements lo (included) to hi (excluded) in row-major order."""
    row: int
    """Elements of one row of the full tensor (numel / shape[0]); numel itself for a vector or a scalar."""
    by_row: bool = False
    """True for embeddings and output layers, whose rows live apart: a codec with one magnitude a tensor takes one a row here."""
    dtype: torch.dtype = torch.float32
    """The dtype that the parameter has in the model. What is exchanged is float32 (or coded from it)."""
    within: tuple[int, int] | None = None
    """The flat range of the full tensor that the tree's tensor holds (a shard); None: all of it."""

    @property
    def size(self) -> int:
        """Elements carried."""
        return self.hi - self.lo

    @property
    def held(self) -> tuple[int, int]:
        """The flat range of the full tensor that the tree's tensor holds."""
        return self.within or (0, self.numel)


Layout: TypeAlias = tuple[Part, ...]

_PIECE = 1 << 14
"""Elements that are squared in one go: 128 KiB of float64 stay in a cache."""


def layout_of(tree: Mapping[str, Tensor], by_row: Collection[str] = ()) -> Layout:
    """The layout that carries every tensor of `tree` whole. `by_row` names embeddings and output layers."""
    return tuple(
        Part(
            name=name,
            numel=t.numel(),
            lo=0,
            hi=t.numel(),
            row=max(1, t.numel() // max(1, t.shape[0])) if t.ndim >= 2 else max(1, t.numel()),
            by_row=name in by_row,
            dtype=t.dtype,
        )
        for name, t in tree.items()
    )


def numel(layout: Layout) -> int:
    """Elements that `layout` carries."""
    return sum(part.hi - part.lo for part in layout)


def flat(tree: Mapping[str, Tensor], part: Part) -> Tensor:
    """The range of `part` as a one-dimensional view (the tensor must be contiguous)."""
    start = part.held[0]
    return tree[part.name].view(-1)[part.lo - start : part.hi - start]


def master(tree: Mapping[str, Tensor]) -> Tree:
    """A float32 copy, detached and contiguous: what an anchor is made of."""
    return {k: v.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format) for k, v in tree.items()}


def zeros_like(tree: Mapping[str, Tensor]) -> Tree:
    """float32 zeros of the same names and shapes."""
    return {k: torch.zeros(v.shape, dtype=torch.float32, device=v.device) for k, v in tree.items()}


def map_tree(f: Callable[..., Tensor], *trees: Mapping[str, Tensor]) -> Tree:
    """Applies f name by name."""
    first = trees[0]
    return {k: f(*(t[k] for t in trees)) for k in first}


def rounded(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Tree:
    """cast(x): the float32 anchor as the model of y's dtype really holds it, back in float32. No copy where y is float32."""
    return {k: v if y[k].dtype == v.dtype else v.to(y[k].dtype).to(torch.float32) for k, v in x.items()}


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of `tensors`, summed in float64: a scalar, on the device of the tensors.

    On the CPU in pieces that stay in the cache: a float64 copy of a whole tensor would be several times slower.
    """
    if any(not t.is_cpu for t in tensors):
        return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square().sum()
    return torch.tensor(sum(_square(t) for t in tensors), dtype=torch.float64)


def _square(t: Tensor) -> float:
    total = 0.0
    for piece in torch.split(t.detach().reshape(-1), _PIECE):
        wide = piece.double()
        total += float(torch.dot(wide, wide))
    return total


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


def bits_of(t: Tensor) -> bytes:
    """Sum and exclusive or of the 64-bit words of `t`, the last filled up with zeros. On an accelerator they are formed there."""
    raw = _bytes(t)
    pad = -raw.numel() % 8
    if pad or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(pad)])
    words = raw.view(torch.int64)
    if not words.numel():
        return b""
    if words.is_cpu:
        host = words.numpy()
        return bytes(np.add.reduce(host).tobytes() + np.bitwise_xor.reduce(host).tobytes())
    total = words.sum()
    while (half := words.numel() // 2) > 0:
        rest, words = words[2 * half :], words[:half] ^ words[half : 2 * half]
        words[: rest.numel()] ^= rest
    return bytes(torch.stack([total, words[0]]).cpu().numpy())


def digest(*trees: Mapping[str, Tensor]) -> int:
    """A 64-bit mark of the bits of `trees`, at about the speed of reading them: it tells replicas apart, it is not cryptographic."""
    h = hashlib.blake2b(digest_size=8)
    for tree in trees:
        for name, t in tree.items():
            h.update(name.encode())
            h.update(bits_of(t))
    return int.from_bytes(h.digest(), "little")


def sha256(tree: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and bits, as hex: two trees with the same hash are the same parameters, bit for bit."""
    h = hashlib.sha256()
    for name, t in tree.items():
        h.update(f"{name}{tuple(t.shape)}{t.dtype}".encode())
        h.update(_bytes(t).cpu().numpy().data)
    return h.hexdigest()


def layout_hash(layout: Layout) -> int:
    """A 64-bit hash of the layout: two sites may exchange payloads exactly when theirs agree."""
    text = ";".join(f"{p.name},{p.numel},{p.lo},{p.hi},{p.row},{int(p.by_row)}" for p in layout)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
