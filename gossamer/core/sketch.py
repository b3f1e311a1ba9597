"""Distances between models far apart, told by a few numbers of each: a linear sketch.

Every element v_k gets a sign s_k, drawn once for all workers, and falls into one of `BUCKETS` buckets; the sketch is the sum of
s_k v_k in each bucket. It is linear, sketch(a - b) = sketch(a) - sketch(b), so what workers note of themselves tells, later and elsewhere,
how far they were from each other and what mixing did to that, in real runs as in simulated ones, and nothing is sent for it. |sketch(v)|^2
is an unbiased estimate of |v|^2 with a relative standard deviation of about sqrt(2 / BUCKETS); a mean over n workers has about
sqrt(2 / (BUCKETS (n - 1))), half of it for the distance itself: 3 % for 8 workers. Ratios and curves are better than that, since all
rounds are seen through the same signs.

Source: the count sketch of Charikar, Chen and Farach-Colton 2002; Thorup and Zhang 2004 (second moments).

>>> import torch
>>> a, b = torch.ones(4, 5), torch.full((4, 5), 3.0)
>>> bool(np.allclose(2 * sketch({"w": a}) - sketch({"w": b}), -sketch({"w": a})))
True
>>> bool((read(write(sketch({"w": b}))) == sketch({"w": b})).all())
True
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, words
from gossamer.core.tree import Layout, flat

BUCKETS = 61
"""Numbers of a sketch."""
_BLOCK = BUCKETS * 512
"""Elements at a time: 122 KiB stay in a cache."""
_POOL, _STRIDE = 1 << 20, 0x9E3779B1
"""Signs that are kept, and how far apart blocks of the model begin to take them, round and round."""


def sketch(tree: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """The sketch of all tensors together, in their order, shape [BUCKETS]. Sketches of trees of the same names and shapes compare."""
    if not tree:
        return np.zeros(BUCKETS)
    values = torch.cat([tensor.detach().reshape(-1) for tensor in tree.values()])
    signs = _signs(values.device)
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=values.device)
    for number, piece in enumerate(torch.split(values, _BLOCK)):
        first = number * _STRIDE % (_POOL - _BLOCK)
        signed = piece * signs[first : first + len(piece)]
        strip = len(piece) // BUCKETS
        total += signed[: strip * BUCKETS].view(BUCKETS, strip).sum(dim=1, dtype=torch.float64)
        total[: len(piece) - strip * BUCKETS] += signed[strip * BUCKETS :]
    return total.cpu().numpy()


def sketch_of_ranges(tree: Mapping[str, Tensor], layout: Layout, whole: Layout) -> NDArray[np.float64]:
    """The share of a rank, which holds `layout` of `whole`, in the sketch of its worker's tree: the shares of all ranks add up."""
    starts, at = {}, 0
    for part in whole:
        starts[part.name, part.lo] = at
        at += part.size
    total = np.zeros(BUCKETS)
    for part in (p for p in layout if p.size):
        values, at_part = flat(tree, part).detach().cpu().numpy(), starts[part.name, part.lo]
        signs = _signs(torch.device("cpu")).numpy()
        while values.size:
            number, within = divmod(at_part, _BLOCK)
            piece, values = values[: _BLOCK - within], values[_BLOCK - within :]
            first = number * _STRIDE % (_POOL - _BLOCK) + within
            strip = min(_BLOCK, at - number * _BLOCK) // BUCKETS
            places = np.arange(within, within + piece.size)
            bucket = np.where(places < strip * BUCKETS, places // max(1, strip), places - strip * BUCKETS)
            total += np.bincount(bucket, piece.astype(np.float64) * signs[first : first + piece.size], BUCKETS)
            at_part += piece.size
    return total


def write(sketch: NDArray[np.float64]) -> str:
    """As text: float32, little-endian, base64."""
    return base64.b64encode(sketch.astype("<f4").tobytes()).decode("ascii")


def read(text: str) -> NDArray[np.float64]:
    """What `write` wrote.

    Raises:
        BadInput: it is no sketch.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raw = b""
    if len(raw) != 4 * BUCKETS:
        raise BadInput(f"a sketch of a model is damaged: expected {4 * BUCKETS} bytes in base64, not {str(text)[:40]!r}")
    return np.frombuffer(raw, "<f4").astype(np.float64)


def spread(rows: NDArray[np.float64]) -> float:
    """sqrt(mean_i |v_i - vbar|^2) of the rows, shape [workers, BUCKETS]; 0 for fewer than two."""
    return float(np.sqrt(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean())) if len(rows) > 1 else 0.0


@lru_cache(maxsize=4)
def _signs(device: torch.device) -> Tensor:
    """The pool of signs, float32."""
    bits = np.unpackbits(words(_POOL // 64, 0, Stream.SKETCH).view(np.uint8))
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1).to(device)
