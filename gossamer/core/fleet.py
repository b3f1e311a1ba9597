"""Who trains, and what lies between them: sites with their GPUs, and directed links between sites or regions.

A worker is a seat, an integer 0 .. n-1; the fleet maps it to (site, rank), counting the sites in their order. Nothing here grows with the
square of the number of workers: a fleet of ten thousand is a list of sites and a few links between regions.

>>> a100 = Gpu("A100 80GB", tflops=312.0, memory_gb=80.0)
>>> one = Site("lab", "here", a100, workers=2, mfu=0.5, up_mbps=1000.0, down_mbps=1000.0)
>>> two = Site("farm", "there", a100, mfu=0.25, up_mbps=100.0, down_mbps=100.0)
>>> wire = Link(rate_mbps=1000.0, latency_ms=10.0)
>>> fleet = Fleet("pair", (one, two), {("here", "there"): wire, ("there", "here"): wire})
>>> fleet.n, fleet.site(2).name, fleet.rank(1), fleet.link(0, 2).latency_ms
(3, 'farm', 1, 10.0)
>>> fleet.speeds(batch=1, sequence=1000, flops_per_token=1e9)
[156.0, 156.0, 78.0]
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gossamer.core.errors import BadInput
from gossamer.core.trace import LARGEST, SMALLEST, Trace, above_zero, not_negative, rising

MSS_BYTES = 1460
"""Payload of one TCP segment on Ethernet."""
MAX_WORKERS = 100_000
"""Of a fleet: so many are simulated in minutes and fit in memory."""
MAX_RANKS = 1024
"""Of a worker."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, by its data sheet."""

    name: str
    tflops: float
    """Dense bf16 peak, 1e12 floating-point operations a second (without 2:4 sparsity)."""
    memory_gb: float

    def __post_init__(self) -> None:
        above_zero(self.tflops, f"tflops of GPU {self.name!r}")
        above_zero(self.memory_gb, f"memory_gb of GPU {self.name!r}")


@dataclass(frozen=True, slots=True)
class Site:
    """Workers of one kind in one place, `ranks` GPUs each."""

    name: str
    region: str
    gpu: Gpu
    up_mbps: float
    """What each worker can send, over all its messages together, in Mbit/s (infinity: only links limit)."""
    down_mbps: float
    """What each worker can receive, likewise."""
    workers: int = 1
    mfu: float = 0.4
    """Model FLOPs utilisation: the part of the peak that training really reaches, above 0, at most 1."""
    overhead_s: float = 0.0
    """t0: what every step costs apart from its tokens, in seconds."""
    speed: float = 1.0
    """Relative speed of the host: divides the whole step time (a shared card, a throttled machine)."""
    step_s: tuple[tuple[int, float], ...] = ()
    """A measured profile: (tokens of a step, seconds), tokens rising. When given it replaces mfu and overhead_s."""
    trace: Trace | None = None
    """Factor over time on both up_mbps and down_mbps."""
    memory_gb: tuple[tuple[int, float], ...] = ()
    """Measured peak memory of a step on the fullest GPU: (tokens of the worker's step, GB = 1e9 bytes), tokens rising, two points or
    more."""
    memory_limit_gb: float | None = None
    """What training may use at most, in GB; None: the card's memory."""
    ranks: int = field(default=1, repr=False)
    """GPUs of each worker, over which its model and its batches are cut. Not in what tells one run from another: a run may go on with
    other rank counts."""
    price_gpu_h: float | None = field(default=None, repr=False, compare=False)
    """What an hour of one GPU costs, in the fleet's currency; None: not known. Prices tell no run from another."""
    price_egress_gb: float | None = field(default=None, repr=False, compare=False)
    """What 1e9 bytes sent to another region cost, likewise."""

    def __post_init__(self) -> None:
        me = f"of site {self.name!r}"
        for key, price in (("price_gpu_h", self.price_gpu_h), ("price_egress_gb", self.price_egress_gb)):
            if price is not None:
                not_negative(price, f"{key} {me}")
        if self.workers < 1:
            raise BadInput(f"workers {me} is {self.workers}: expected 1 or more (leave an empty site out)")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise BadInput(f"ranks {me} is {self.ranks}: expected the GPUs of one worker, 1 to {MAX_RANKS}")
        if not SMALLEST <= self.mfu <= 1:
            raise BadInput(f"mfu {me} is {self.mfu}: expected a part of the peak, above 0 and at most 1 (0.4 is usual)")
        not_negative(self.overhead_s, f"overhead_s {me}")
        above_zero(self.speed, f"speed {me}")
        above_zero(self.up_mbps, f"up_mbps {me}", finite=False)
        above_zero(self.down_mbps, f"down_mbps {me}", finite=False)
        rising(self.step_s, f"step_s {me}", "seconds")
        rising(self.memory_gb, f"memory_gb {me}", "GB")
        if len(self.memory_gb) == 1:
            raise BadInput(f"memory_gb {me} has one point, through which no line is known: give two or more, of unlike tokens")
        if self.memory_limit_gb is not None:
            above_zero(self.memory_limit_gb, f"memory_limit_gb {me}")
        if self.step_s and self.speed != 1.0:
            raise BadInput(f"site {self.name!r} has a measured step_s and speed {self.speed}: a measured time needs no factor; drop one")

    def time_s(self, tokens: int, flops_per_token: float) -> float:
        """Seconds of one inner step on `tokens` tokens: t = (t0 + tokens * flops_per_token / (ranks * mfu * peak)) / speed.

        With a measured profile: interpolated between its points, continued along the outer segments beyond them (never below half of
        what the nearest point gives per token), in proportion to tokens when there is one point.
        """
        if not self.step_s:
            return (self.overhead_s + tokens * flops_per_token / (self.ranks * self.mfu * self.gpu.tflops * 1e12)) / self.speed
        points = self.step_s
        k = min(max(bisect_right([t for t, _ in points], tokens), 1), len(points) - 1)
        near_t, near_s = points[0] if tokens <= points[0][0] else points[-1]
        if len(points) == 1:
            return near_s * tokens / near_t
        (t0, s0), (t1, s1) = points[k - 1], points[k]
        line_s = s0 + (s1 - s0) * (tokens - t0) / (t1 - t0)
        return line_s if t0 <= tokens <= t1 else max(line_s, 0.5 * near_s * tokens / near_t)

    @property
    def limit_gb(self) -> float:
        """The memory that a step may use: the declared limit, else the card's, in GB."""
        return self.gpu.memory_gb if self.memory_limit_gb is None else self.memory_limit_gb

    def memory_line(self) -> tuple[float, float]:
        """(GB of a step without tokens, GB per token): the least-squares line through `memory_gb`, which is exact for two points.

        Where the points do not rise, the flat line through their mean: memory does not fall with tokens.

        Raises:
            BadInput: the site has no memory points.
        """
        if not self.memory_gb:
            raise BadInput(
                f"site {self.name!r} has no memory_gb: give its peak memory at two numbers of tokens (gossamer profile measures it)"
            )
        t_mean = math.fsum(t for t, _ in self.memory_gb) / len(self.memory_gb)
        m_mean = math.fsum(m for _, m in self.memory_gb) / len(self.memory_gb)
        spread = math.fsum((t - t_mean) ** 2 for t, _ in self.memory_gb)
        slope = max(0.0, math.fsum((t - t_mean) * (m - m_mean) for t, m in self.memory_gb) / spread)
        return m_mean - slope * t_mean, slope

    def batch_max(self, sequence: int, headroom: float = 0.1) -> int | None:
        """The largest B with fixed + per_token * B * sequence <= (1 - headroom) * limit_gb (see `memory_line`).

        0 where not even one sequence fits, None without memory points; the largest measured (at least 1) where the points do not rise.

        Args:
            sequence: L, tokens per sequence.
            headroom: share of the limit to keep free, 0 or more and below 1.

        >>> card = Gpu("card", tflops=1.0, memory_gb=10.0)
        >>> site = Site("a", "x", card, 1.0, 1.0, memory_gb=((1000, 3.0), (2000, 4.0)))
        >>> site.memory_line(), site.batch_max(sequence=500, headroom=0.1)
        ((2.0, 0.001), 14)
        """
        if sequence < 1 or not 0 <= headroom < 1:
            raise BadInput(f"sequence {sequence}, headroom {headroom}: expected at least 1 token, and a share from 0 to below 1")
        if not self.memory_gb:
            return None
        fixed_gb, token_gb = self.memory_line()
        free_gb, one_gb = (1 - headroom) * self.limit_gb, token_gb * sequence
        if fixed_gb + one_gb > free_gb:
            return 0
        if one_gb <= SMALLEST * (free_gb - fixed_gb):
            return max(1, self.memory_gb[-1][0] // sequence)
        most = int((free_gb - fixed_gb) / one_gb)
        while fixed_gb + token_gb * (most * sequence) > free_gb:  # by one, where the division rounded
            most -= 1
        return most + (fixed_gb + token_gb * ((most + 1) * sequence) <= free_gb)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two workers. Every ordered pair of workers has its own; what they share are their up- and downlinks."""

    rate_mbps: float
    latency_ms: float
    """One way: half the round-trip time."""
    jitter_ms: float = 0.0
    """Mean of an exponential delay added to each message (order within a pair is kept)."""
    loss: float = 0.0
    """Packet loss rate, 0 <= loss < 1. It limits TCP's rate; it never loses a message."""
    window_bytes: int | None = None
    """TCP window of one connection."""
    connections: int = 1
    """TCP connections that carry one message side by side: window and loss limit each of them, rate_mbps limits all."""
    trace: Trace | None = None
    """Factor on the rate over time."""

    def __post_init__(self) -> None:
        above_zero(self.rate_mbps, "rate_mbps of a link")
        not_negative(self.latency_ms, "latency_ms of a link")
        not_negative(self.jitter_ms, "jitter_ms of a link")
        if self.loss != 0 and not SMALLEST <= self.loss < 1:
            raise BadInput(f"loss of a link is {self.loss}: expected a packet loss rate from 0 to below 1 (0.001 for 0.1 %)")
        if self.window_bytes is not None and not MSS_BYTES <= self.window_bytes <= LARGEST:
            raise BadInput(
                f"window_bytes of a link is {self.window_bytes}: expected at least one segment of {MSS_BYTES} bytes, at most {LARGEST:g}"
            )
        if not 1 <= self.connections <= LARGEST:
            raise BadInput(f"connections of a link is {self.connections}: expected 1 or more, at most {LARGEST:g}")

    @property
    def flow_mbps(self) -> float:
        """What one message can get when it is alone, in Mbit/s.

        min(rate, connections * min(window / RTT, MSS / (RTT * sqrt(2 p / 3)))), RTT = 2 * latency, p the loss; the last term is the
        steady state of TCP under random loss (Mathis, Semke, Mahdavi, Ott 1997).

        >>> Link(rate_mbps=1000.0, latency_ms=50.0, window_bytes=1_250_000).flow_mbps
        100.0
        """
        rtt_s = 2e-3 * self.latency_ms
        one_bytes_s = math.inf
        if rtt_s > 0 and self.window_bytes is not None:
            one_bytes_s = self.window_bytes / rtt_s
        if rtt_s > 0 and self.loss > 0:
            one_bytes_s = min(one_bytes_s, MSS_BYTES / (rtt_s * math.sqrt(2 * self.loss / 3)))
        return min(self.rate_mbps, self.connections * one_bytes_s * 8e-6)


LAN = Link(rate_mbps=100_000.0, latency_ms=0.05)
"""Between workers of one site unless the fleet says otherwise: 100 Gbit/s, 0.05 ms."""


@dataclass(frozen=True)
class Fleet:
    """All workers and links.

    `links` is directed, keyed (from, to); each end names a site or a region. The most exact key wins: (site, site), (site, region),
    (region, site), (region, region). Workers of one site are joined by `local`; two sites of one region by (region, region).

    Raises:
        BadInput: a pair of sites without a link, a link to nowhere, a name used twice.
    """

    name: str
    sites: tuple[Site, ...]
    links: Mapping[tuple[str, str], Link]
    local: Link = LAN
    message_s: float = 0.0
    """What every message costs apart from rate and latency, in seconds."""
    source: str = ""
    """Where the numbers come from, for people."""
    currency: str = field(default="USD", repr=False, compare=False)
    """Of the sites' prices."""
    _site_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _first: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _place_of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        not_negative(self.message_s, f"message_s of fleet {self.name!r}")
        if not self.sites:
            raise BadInput(f"fleet {self.name!r} has no sites: give at least one")
        if (workers := sum(site.workers for site in self.sites)) > MAX_WORKERS:
            raise BadInput(f"fleet {self.name!r} has {workers} workers: expected at most {MAX_WORKERS}")
        self._check_names()
        self._check_links()
        named = {end for pair in self.links for end in pair}
        first: list[int] = []
        site_of: list[int] = []
        places: dict[int, tuple[str, int]] = {}
        for s, site in enumerate(self.sites):
            first.append(len(site_of))
            site_of += [s] * site.workers
            alone = site.workers > 1 or (site.name in named and site.name != site.region)
            places[s] = (site.name, s) if alone else (site.region, -1)
        index = {place: k for k, place in enumerate(dict.fromkeys(places.values()))}
        object.__setattr__(self, "_first", tuple(first))
        object.__setattr__(self, "_site_of", tuple(site_of))
        object.__setattr__(self, "_place_of", tuple(index[places[s]] for s in site_of))

    def _check_names(self) -> None:
        regions = {site.region for site in self.sites}
        seen: set[str] = set()
        for site in self.sites:
            if site.name in seen:
                raise BadInput(f"fleet {self.name!r} has two sites named {site.name!r}: give each its own name")
            if site.name in regions and site.name != site.region:
                raise BadInput(f"site {site.name!r} lies in region {site.region!r} and has the name of another region: rename it")
            seen.add(site.name)
        for pair in self.links:
            for end in pair:
                if end not in seen and end not in regions:
                    raise BadInput(
                        f"the link {pair[0]!r} -> {pair[1]!r} names {end!r}, which is no site or region of fleet {self.name!r}: "
                        f"expected one of {', '.join(sorted(regions | seen)[:20])}"
                    )

    def _check_links(self) -> None:
        by_region: dict[str, list[Site]] = {}
        for site in self.sites:
            by_region.setdefault(site.region, []).append(site)
        for from_region, senders in by_region.items():
            for to_region, receivers in by_region.items():
                if (from_region, to_region) in self.links:
                    continue
                for a in senders:
                    for b in receivers:
                        if a is not b:
                            self._between(a, b)

    def _between(self, a: Site, b: Site) -> Link:
        for key in ((a.name, b.name), (a.name, b.region), (a.region, b.name), (a.region, b.region)):
            if key in self.links:
                return self.links[key]
        raise BadInput(
            f"fleet {self.name!r} has no link from site {a.name!r} (region {a.region!r}) to site {b.name!r} (region {b.region!r}): "
            f"add one with from = {a.region!r}, to = {b.region!r} (or between = [{a.region!r}, {b.region!r}] for both directions)"
        )

    @property
    def n(self) -> int:
        """Workers."""
        return len(self._site_of)

    def _check_seat(self, i: int) -> int:
        if not 0 <= i < len(self._site_of):
            raise BadInput(f"worker {i} is not in fleet {self.name!r}: its workers are 0 to {self.n - 1}")
        return i

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks (GPUs) of each worker."""
        return tuple(self.sites[s].ranks for s in self._site_of)

    def site(self, i: int) -> Site:
        """The site of worker i."""
        return self.sites[self._site_of[self._check_seat(i)]]

    def rank(self, i: int) -> int:
        """The number of worker i within its site."""
        return i - self._first[self._site_of[self._check_seat(i)]]

    def place(self, i: int) -> int:
        """A small number such that link(i, j) depends on (place(i), place(j)) alone when i != j."""
        return self._place_of[self._check_seat(i)]

    def link(self, i: int, j: int) -> Link:
        """The link from worker i to worker j, in O(1). Within a site (i = j included) it is `local`."""
        a, b = self.site(i), self.site(j)
        return self.local if a is b else self._between(a, b)

    def step_s(self, i: int, batch: int, sequence: int, flops_per_token: float) -> float:
        """Seconds of one inner step of worker i on `batch` sequences of `sequence` tokens, without noise."""
        return self.site(i).time_s(batch * sequence, flops_per_token)

    def speeds(self, batch: int | Sequence[int], sequence: int, flops_per_token: float) -> list[float]:
        """Steps per second of each worker; `batch` is one number or one per worker."""
        batches = [batch] * self.n if isinstance(batch, int) else list(batch)
        if len(batches) != self.n:
            raise BadInput(f"{len(batches)} batch sizes for the {self.n} workers of fleet {self.name!r}: give one each, or one number")
        return [1.0 / self.step_s(i, b, sequence, flops_per_token) for i, b in enumerate(batches)]
