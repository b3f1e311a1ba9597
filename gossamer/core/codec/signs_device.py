"""What gossamer.core.codec.signs does, in torch, on the device where the tensor is: bits are made there and spread there, and only bits,
sums and magnitudes cross to the host or back.

Bits are those of the NumPy path; sums are float64 sums in another order; `add` gives the same float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.core.codec.payload import Bytes, Floats
from gossamer.core.codec.signs import Counts, Place, Sums, runs

CHUNK = 1 << 23
"""Elements worked on at a time (a multiple of 8): large enough to keep an accelerator busy, and far below a model."""


def packed(values: Tensor) -> Tensor:
    """[values >= 0], uint8, ceil(n / 8) long, lowest bit first, on the device of `values`."""
    positive = values >= 0
    if rest := -values.numel() % 8:
        positive = torch.cat([positive, positive.new_zeros(rest)])
    powers = (2 ** torch.arange(8, device=values.device)).to(torch.uint8)
    return (positive.view(-1, 8) * powers).sum(1, dtype=torch.uint8)


def spread(bits: Tensor, size: int) -> Tensor:
    """2s - 1 of the first `size` bits, float32, on the device of `bits`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).view(-1)[:size].to(torch.float32).mul_(2).sub_(1)


def scan(
    values: Tensor, place: Place, bits: Bytes | None, sums: Sums | None, said: Tensor | None = None, decay: float = 1.0
) -> Counts | None:
    """See gossamer.core.codec.signs.scan; `values` and `said` are tensors of one device, `bits` and `sums` on the host."""
    zeros = None
    for at in range(0, values.numel(), CHUNK):
        v = values[at : at + CHUNK]
        if said is not None:
            v.mul_(decay).add_(said[at : at + CHUNK])
        if bits is not None:
            host = packed(v).cpu().numpy()
            bits[at // 8 : at // 8 + host.size] = host
        for lo, hi, g, n in runs(place.start + at, place.start + at + v.numel(), place.group):
            grouped = v[lo:hi].view(n, -1)
            if sums is not None:
                sums[0, g : g + n] += grouped.abs().sum(1, dtype=torch.float64).cpu().numpy()
                sums[1, g : g + n] += (hi - lo) // n
            if bits is not None:
                found = (grouped == 0).sum(1).cpu().numpy()
                if found.any():
                    zeros = np.zeros(place.after - place.first, np.int64) if zeros is None else zeros
                    zeros[g - place.first : g - place.first + n] += found
    return zeros


def add(target: Tensor, bits: Bytes, place: Place, scaled: Floats) -> None:
    """See gossamer.core.codec.signs.add; `target` is a tensor, `bits` and `scaled` on the host."""
    m = torch.from_numpy(scaled).to(target.device)
    for at in range(0, target.numel(), CHUNK):
        piece = target[at : at + CHUNK]
        raw = torch.from_numpy(bits[at // 8 : at // 8 + -(-piece.numel() // 8)])
        signs = spread(raw.to(target.device), piece.numel())
        for lo, hi, g, n in runs(place.start + at, place.start + at + piece.numel(), place.group):
            mine = m[g - place.first : g - place.first + n, None]
            piece[lo:hi].view(n, -1).add_(signs[lo:hi].view(n, -1).mul_(mine))
