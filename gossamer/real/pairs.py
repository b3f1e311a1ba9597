"""Exchanges with a deadline between real workers: both sides take part, or neither does, so that gossip keeps the mean.

Of each pair and tag the lower address keeps the verdict, which is given once. *Taken*: it has said its own part, waits, and has the
other's. *Skipped*: its deadline was over first, or the other asked for it first. It tells the other at once. So the higher one has the
exchange when it has both packet and verdict; at its own deadline it asks to skip and goes on waiting for the verdict, which comes from a
thread that needs no progress of the other's program. A packet of a skipped exchange is received and let go.

All methods are called with the condition of the board held.
"""

from __future__ import annotations

from collections.abc import Callable

from gossamer.worker.effects import Addr

_KEPT_ROUNDS = 2
"""Verdicts are kept for this many rounds back."""


class Pairs:
    """The verdicts that one worker gives and gets.

    Args:
        tell: (peer, tag, taken) sends a verdict, or (to a lower peer) asks to skip.
    """

    def __init__(self, me: Addr, tell: Callable[[Addr, int, bool], None]) -> None:
        self._me, self._tell = me, tell
        self._taken: dict[tuple[int, Addr], bool] = {}
        self._first_tag = 0

    def resolved(self, tag: int, peer: Addr, here: bool) -> bool | None:
        """Whether the exchange takes place, of a worker that waits for it; None: not known yet. `here`: the peer's packet has come."""
        verdict = self._taken.get((tag, peer))
        if verdict is None and here and self._me < peer:
            verdict = self._give(tag, peer, True)
        return None if verdict and not here else verdict

    def give_up(self, tag: int, peer: Addr) -> None:
        """This worker's deadline is over."""
        if (tag, peer) in self._taken:
            return
        if self._me < peer:
            self._give(tag, peer, False)
        else:
            self._tell(peer, tag, False)

    def hear(self, src: Addr, tag: int, taken: bool) -> None:
        """A verdict of a lower peer, or a higher one's wish to skip."""
        if src < self._me:
            self._taken[tag, src] = taken
        elif (tag, src) not in self._taken and tag >= self._first_tag:  # an older one was given: it is on its way
            self._give(tag, src, False)

    def forget(self, round: int) -> None:
        """This worker has completed `round` rounds."""
        self._first_tag = 8 * max(0, round - _KEPT_ROUNDS)
        for old in [key for key in self._taken if key[0] < self._first_tag]:
            del self._taken[old]

    def _give(self, tag: int, peer: Addr, taken: bool) -> bool:
        self._taken[tag, peer] = taken
        self._tell(peer, tag, taken)
        return taken
