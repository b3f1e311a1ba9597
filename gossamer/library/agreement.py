"""What the workers of a library run tell each other outside of their programs: how they start, and when they have all ended."""

from __future__ import annotations

import time

from gossamer.real.group import Group
from gossamer.worker.effects import Addr

_POLL_S = (0.002, 0.1)


class Agreement:
    """Short texts on the group's board. Every worker says what it is at: "begun r", the work of the round after r complete ones, or
    "ended r", no work after r rounds."""

    def __init__(self, group: Group) -> None:
        self._group, self._said = group, ""

    def everybody(self, key: str, value: str) -> dict[Addr, str]:
        """Everybody's value of `key`. Waits for all.

        Raises:
            RunFailed: a worker is gone.
        """
        group = self._group
        if group.n == 1:
            return {group.me: value}
        self.tell(key, value)
        found = group.posted_by({j: f"join/{key}/{j}" for j in group.members}, wait=True)
        assert found is not None
        return found

    def tell(self, key: str, value: str) -> None:
        """This worker's value of `key`, for others that wait for everybody's."""
        self._group.post(f"join/{key}/{self._group.me}", value)

    def begun(self, round: int) -> None:
        """This worker has work in the round after `round` complete ones."""
        self._say(f"begun {round}")

    def ended(self, round: int) -> None:
        """This worker has no work after `round` rounds."""
        self._say(f"ended {round}")

    def _say(self, text: str) -> None:
        if self._group.n > 1 and text != self._said:
            self._said = text
            self._group.post(f"join/at/{self._group.me}", text)

    def takes_place(self, round: int) -> bool:
        """Whether anybody has work in the round after `round` complete ones. Waits until that is known, the same on all workers.

        Raises:
            RunFailed: a worker is gone.
        """
        pause_s, group = _POLL_S[0], self._group
        while True:
            group.board.check()
            found = {j: self._at(j) for j in group.living if j != group.me}
            if any((kind == "begun" and at >= round) or (kind == "ended" and at > round) for kind, at in found.values()):
                return True
            if all(kind == "ended" for kind, _ in found.values()):
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def _at(self, j: Addr) -> tuple[str, int]:
        said = self._group.posted([f"join/at/{j}"])
        if not said:
            return "begun", -1
        kind, at = said[0].split()
        return kind, int(at)
