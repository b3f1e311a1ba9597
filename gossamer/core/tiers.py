"""Asynchronous tiers (HALoS, Kim et al. 2025, arXiv 2506.04531): workers, one local server a region, and one global server over them.

Seats of a run with n workers in R regions: workers 0 .. n-1, local servers n .. n+R-1 in the order of the regions, the global server n+R.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.tree import Tree, zeros_like


@dataclass
class DelayedState:
    """What `DelayedNesterov` remembers."""

    momentum: Tree
    """m."""
    total: Tree
    """S, the sum of what has arrived since the last momentum step."""
    arrivals: int = 0
    """Since the last momentum step."""


@dataclass(frozen=True)
class DelayedNesterov:
    """A server's rule (delayed Nesterov, Liu et al. 2024, arXiv 2401.09135, with momentum activation c = 0). For each arrival D

        x <- x - (lr / N) D;   S <- S + D

    and at every N-th, N = `delay`, also

        m <- b m + S / N;   x <- x - lr b m;   S <- 0

    b = `momentum`. N arrivals stand for one step of Nesterov's method on their mean. Without momentum no state is kept.
    """

    lr: float
    """Of N arrivals together."""
    momentum: float
    delay: int

    def __post_init__(self) -> None:
        if not 0.0 < self.lr <= 1000.0:
            raise BadInput(f"a server's learning rate is {self.lr}: expected a number above 0, at most 1000 (of `delay` arrivals together)")
        if not 0.0 <= self.momentum < 1.0:
            raise BadInput(f"a server's momentum is {self.momentum}: expected at least 0 and below 1 (0.9 is usual, 0 for none)")
        if self.delay < 1:
            raise BadInput(f"a server's momentum is delayed by {self.delay} arrivals: expected 1 or more")

    def init(self, x: Tree) -> DelayedState:
        """State before the first arrival."""
        like = x if self.momentum else {}
        return DelayedState(zeros_like(like), zeros_like(like))

    def step(self, x: Tree, D: Tree, s: DelayedState) -> None:
        """One arrival. x and s change in place, D stays."""
        for k, d in D.items():
            x[k].add_(d, alpha=-self.lr / self.delay)
        if not self.momentum:
            return
        s.arrivals += 1
        for k, d in D.items():
            s.total[k].add_(d)
        if s.arrivals == self.delay:
            s.arrivals = 0
            for k, m in s.momentum.items():
                m.mul_(self.momentum).add_(s.total[k], alpha=1.0 / self.delay)
                x[k].add_(m, alpha=-self.lr * self.momentum)
                s.total[k].zero_()


@dataclass(frozen=True)
class Tiers:
    """Who serves whom, and how.

    Raises:
        BadInput: regions that are not numbered 0, 1, ... in the order in which they first occur, or a number out of range.

    >>> rule = DelayedNesterov(1.0, 0.0, 1)
    >>> tiers = Tiers((0, 0, 1), rule, rule, blocks_per_round=2.0)
    >>> tiers.home(2), tiers.clients(3), tiers.top, tiers.servers
    (4, (0, 1), 5, 3)
    """

    regions: tuple[int, ...]
    """The region of each worker."""
    local_rule: DelayedNesterov
    top_rule: DelayedNesterov
    """The global server's."""
    merge: float = 0.25
    """a: x_local <- (1 - a) x_local + a x_global."""
    report_every: int = 32
    """K: accepted updates of a local server between a merge and its next report."""
    blocks_per_round: float = 1.0
    """Blocks of a worker in which all workers take as many tokens as in one round of the setting's plan: how often to evaluate."""

    def __post_init__(self) -> None:
        seen = list(dict.fromkeys(self.regions))
        if not seen or seen != list(range(len(seen))):
            raise BadInput(f"the workers' regions are {self.regions}: number them 0, 1, ... in the order in which they first occur")
        if not 0.0 < self.merge <= 1.0:
            raise BadInput(f"merge is {self.merge}: expected the global server's weight, above 0 and at most 1 (0.25 is published)")
        if self.report_every < 1:
            raise BadInput(f"report_every is {self.report_every}: a local server reports after 1 accepted update or more (32 is published)")
        if not self.blocks_per_round > 0.0:
            raise BadInput(f"blocks_per_round is {self.blocks_per_round}: expected a number above 0")

    @property
    def n(self) -> int:
        """Workers."""
        return len(self.regions)

    @cached_property
    def servers(self) -> int:
        """Local servers and the global one."""
        return max(self.regions) + 2

    @property
    def top(self) -> int:
        """The seat of the global server."""
        return self.n + self.servers - 1

    def home(self, worker: int) -> int:
        """The seat of the local server of `worker`."""
        return self.n + self.regions[worker]

    def clients(self, server: int) -> tuple[int, ...]:
        """Whom a server serves: its region's workers; the local servers, for the global one."""
        if server == self.top:
            return tuple(range(self.n, self.top))
        return tuple(i for i, region in enumerate(self.regions) if self.n + region == server)

    def evaluates(self, every: int, block: int) -> bool:
        """Whether an evaluation is due after `block` blocks: each time that another `every` rounds' worth of tokens is used up."""
        stride = every * self.blocks_per_round
        return every > 0 and int(block / stride) > int((block - 1) / stride)


def hosts(fleet: Fleet, tiers: Tiers) -> tuple[int, ...]:
    """The worker at whose site each seat stands."""
    beside = placed(fleet, tiers, range(tiers.n))
    return (*range(tiers.n), *(beside[seat] for seat in range(tiers.n, tiers.top + 1)))


def placed(fleet: Fleet, tiers: Tiers, there: Collection[int]) -> dict[int, int]:
    """Server -> the worker at whose site it stands, of those who are there (at least one). A local server: the first of its region; where
    there is none, there is no server. The global server: of these sites the one with the highest mean rate to and from the others (a tie:
    the first)."""
    of_region = {seat: next((i for i in tiers.clients(seat) if i in there), None) for seat in range(tiers.n, tiers.top)}
    local = {seat: i for seat, i in of_region.items() if i is not None}
    first = list(local.values())

    def rate_mbps(a: int, b: int) -> float:
        return min(fleet.site(a).up_mbps, fleet.link(a, b).flow_mbps, fleet.site(b).down_mbps)

    def mean_mbps(a: int) -> float:
        others = [b for b in first if b != a]
        return sum(rate_mbps(a, b) + rate_mbps(b, a) for b in others) / (2 * len(others)) if others else 0.0

    return local | {tiers.top: max(first, key=mean_mbps)}


def regions_of(names: Sequence[str]) -> tuple[int, ...]:
    """Numbers for the workers' regions, in the order in which they first occur.

    >>> regions_of(["west", "east", "west"])
    (0, 1, 0)
    """
    order = {name: k for k, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)
