"""Gossip with a mean over all workers every so many rounds (gossip-PGA: Chen, Yuan, Zhang, Pan, Xu and Yin 2021, arXiv 2105.09080, sec. 3).

It bounds how far replicas drift apart on sparse graphs, and in its rounds everybody waits for everybody.

>>> from gossamer.core.topology import OnePeer
>>> [len(Averaged(OnePeer(8, seed=0), 3).at(t).row(0)) for t in range(6)]
[2, 2, 8, 2, 2, 8]
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.core.errors import BadInput
from gossamer.core.mixing import Mixing
from gossamer.core.topology import Complete, Topology


@dataclass(frozen=True)
class Averaged:
    """The graphs of `base`, but the complete one in every `every`-th round (rounds every - 1, 2 every - 1, ... from 0).

    Raises:
        BadInput: every < 2.
    """

    base: Topology
    every: int

    def __post_init__(self) -> None:
        if self.every < 2:
            raise BadInput(f"a mean over all workers every {self.every} rounds: expected 2 or more (every round is topology 'complete')")

    @property
    def n(self) -> int:
        """Workers."""
        return self.base.n

    @property
    def random(self) -> bool:
        """Whether the rounds between are drawn anew."""
        return self.base.random

    def at(self, round: int) -> Mixing:
        """W = 11^T / n in its rounds, that of `base` in the others."""
        return Complete(self.n).at(round) if (round + 1) % self.every == 0 else self.base.at(round)
