"""Gates in front of what the ranks of a worker do together.

A gate is what all ranks pass, or none. Collectives among the ranks cannot be broken off: who waits in one for a rank that has gone another
way waits for ever. So in front of each there is a gate: a rank that cannot go on says so there, and all stop at that gate. After it, until
the collective, nobody may turn back.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from gossamer.real.site import Site


class Gate(Protocol):
    """Where all ranks go on together, or stop together."""

    def cross(self) -> None:
        """Passes the next gate, once all ranks have come to it and can go on.

        Raises:
            RunFailed: one of them cannot. It is the failure of the board.
        """


class Gated:
    """A site (gossamer.real.site) with a gate in front of each sum. It stays when a group that it is lent to is closed."""

    def __init__(self, site: Site, gate: Gate) -> None:
        self._site, self.gate = site, gate
        self.rank, self.size = site.rank, site.size

    @property
    def mesh(self) -> Any:
        """As of the site."""
        return self._site.mesh

    def sum(self, value: Tensor) -> Tensor:
        """As of the site.

        Raises:
            RunFailed: the gate is closed, or a rank is gone.
        """
        self.gate.cross()
        return self._site.sum(value)

    def close(self) -> None:
        """Nothing is closed."""

    def end(self) -> None:
        """The site is closed."""
        self._site.close()
