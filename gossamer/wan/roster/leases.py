"""How long a site counts as there without a sign of life, by the monotonic clock of the one process that keeps the leases.

Whatever happens to the wall clock of any host does not matter. When the keeper itself was stopped (suspended, starved, a full disk), it has
heard nobody and so knows of no death: leases are then longer by that gap. After a restart all leases begin anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

FLAPS = 5
"""A site may join so often ..."""
FLAP_LEASES = 3.0
"""... within so many leases; then it waits. Each join is an epoch for everybody."""
_MAX_ASKING = 256


class Holder(NamedTuple):
    """What is known of the process that has the place of a site, when another process of that site comes."""

    state: Literal["gone", "answers", "silent"]
    """gone: its lease is over, or its standing stream has broken and it has not shown itself since. answers: it has shown itself since the
    other one came. silent: not yet."""
    left_s: float = 0.0
    """Of its lease."""
    heard_s: float | None = None
    """Seconds since it was heard of; None: not since the keeper has started."""
    since_s: float | None = None
    """Seconds since it joined; None: before the keeper has started."""


class Leases:
    """The leases of the sites of one run.

    Args:
        lease_s: their length.
        grace_s: what is left of one when the standing stream of its site breaks.
    """

    def __init__(self, lease_s: float, grace_s: float, now_s: float) -> None:
        self.lease_s, self.grace_s = lease_s, grace_s
        self._due_s: dict[str, float] = {}
        self._joined_s: dict[str, deque[float]] = {}
        self._heard_s: dict[str, float] = {}
        self._doubted: set[str] = set()
        self._asked_s: dict[tuple[str, str, str], float] = {}  # site, who has its place, who asks for it: when first
        self._begun_s = self._ticked_s = now_s

    def renew(self, site: str, now_s: float) -> None:
        """The site is alive."""
        self._due_s[site] = now_s + self.lease_s
        self._heard_s[site] = now_s
        self._doubted.discard(site)

    def doubt(self, site: str, now_s: float) -> None:
        """Its standing stream broke: it has the grace left to show that it lives."""
        if site in self._due_s:
            self._due_s[site] = min(self._due_s[site], now_s + self.grace_s)
            self._doubted.add(site)

    def drop(self, site: str) -> None:
        """The site has left."""
        self._due_s.pop(site, None)
        self._heard_s.pop(site, None)
        self._doubted.discard(site)

    def holder(self, site: str, has: str, asks: str, now_s: float) -> Holder:
        """Another process of a site comes: what is known of the one that has its place. To be asked again while that one is silent.

        Args:
            has, asks: which two.
        """
        if site not in self._due_s or site in self._doubted:
            return Holder("gone")
        first_s = self._asked_s.get((site, has, asks), now_s)
        kept = [(k, s) for k, s in self._asked_s.items() if k != (site, has, asks) and now_s - s <= 2 * self.lease_s]
        self._asked_s = {**dict(kept[-_MAX_ASKING:]), (site, has, asks): first_s}
        heard_s = self._heard_s.get(site)
        if heard_s is None and now_s - self._begun_s > self.lease_s / 2:
            return Holder("gone")  # all others have come back to this keeper by now
        joined = self._joined_s.get(site)
        return Holder(
            "answers" if heard_s is not None and heard_s > first_s else "silent",
            max(0.0, self._due_s[site] - now_s),
            None if heard_s is None else now_s - heard_s,
            now_s - joined[-1] if joined else None,
        )

    def left_s(self, site: str, now_s: float) -> float | None:
        """Seconds left; None: it has no lease."""
        return None if site not in self._due_s else max(0.0, self._due_s[site] - now_s)

    def slept(self, now_s: float) -> bool:
        """Whether the keeper has not ticked for so long that it may have missed what others did meanwhile."""
        return now_s - self._ticked_s > self.lease_s / 2

    def tick(self, now_s: float) -> list[str]:
        """Whose lease is over. To be called several times a lease; a longer gap between two calls is made up for."""
        gap_s, slept, self._ticked_s = now_s - self._ticked_s, self.slept(now_s), now_s
        if slept:
            for site in self._due_s:
                self._due_s[site] += gap_s
        over = [site for site, due_s in self._due_s.items() if due_s <= now_s]
        for site in over:
            self.drop(site)
        return over

    def retry_s(self, site: str, now_s: float) -> float:
        """Seconds that a site has to wait before it may join (again); 0: it may, and this counts as a join."""
        window_s, times = FLAP_LEASES * self.lease_s, self._joined_s.setdefault(site, deque(maxlen=FLAPS))
        if len(times) == FLAPS and now_s - times[0] < window_s:
            return times[0] + window_s - now_s
        times.append(now_s)
        return 0.0

    def keep(self, sites: Iterable[str], now_s: float) -> None:
        """Begins with these sites, each with a whole lease, and none of them heard of yet."""
        for site in sites:
            self._due_s[site] = now_s + self.lease_s
