"""What a pair codec is: it says parameters so that two packets, the receiver's own and its peer's, tell their difference.

Parameters are not small, their differences are. A codec of gossamer.core.codec.base decodes one packet to numbers, and what it loses of
parameters adds up. A pair codec decodes two packets to a difference, the same on both ends but for its sign, so that with a symmetric W

    mixed_i = z_i + sum_j W_ij delta_ij,    delta_ij = -delta_ji

keeps the mean over workers to rounding, however coarse, and even wrong, the differences are: z_i itself is never rounded.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gossamer.core.codec.base import Format
from gossamer.core.tree import Layout, Tree

Wrong: TypeAlias = dict[str, NDArray[np.bool_]]
"""Blocks of which a pair of packets does not tell the difference: by tensor name, one flag a block; only tensors that have such."""


class Meeting(Protocol):
    """One worker's side of a round: it hears its peers one after the other."""

    @property
    def mixed(self) -> Tree:
        """z_i plus what was heard so far, float32, where z is."""

    def hear(self, payload: Tensor, weight: float) -> Wrong:
        """Adds weight * difference to `mixed`, but for the blocks that it returns. Both ends find the same ones. `weight` is a number that
        float32 holds exactly."""

    def full(self, wrong: Wrong) -> Tensor:
        """The worker's own z of those blocks, float32, as bytes: both ends know how many."""

    def hear_full(self, payload: Tensor, wrong: Wrong, weight: float) -> None:
        """Adds weight * (z_j - z_i) in those blocks; `payload` is the peer's `full`."""

    def memory(self) -> Tree:
        """What was learnt for the codec's next `encode`: by name, the first rows of the memory, as they are now; only what changes."""


class PairCodec(Format, Protocol):
    """A frozen dataclass that is its own configuration; what it must remember between rounds is a value that it gives and takes. Payloads
    have one size in all rounds."""

    of_drift: ClassVar[bool]
    """True when it says what the inner steps did, so that they must have run."""
    by_tokens: ClassVar[bool]
    """True when a worker's drift counts by the tokens behind it: z = x - (n_i / mean of n) D, so that the mean over workers moves by the
    token-weighted mean of their drifts."""

    def start(self, layout: Layout) -> Tree:
        """The memory before the first round, by tensor name; {} for a codec without."""

    def encode(self, z: Tree, drift: Tree, layout: Layout, memory: Tree, round: int, out: Tensor) -> int:
        """Writes the payload into `out` (uint8, nbytes(layout) long), and into `memory` what it needs to remember of it. `drift` is x - z,
        x the anchor; {} where they are the same (outer rules with `before`). Returns how many exact zeros it could not represent."""

    def meet(self, z: Tree, own: Tensor, layout: Layout, round: int) -> Meeting:
        """Begins a round's mixing: z as it was encoded into the payload `own`."""
