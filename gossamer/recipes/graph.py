"""The graph that a gossip method mixes on, from its options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from gossamer.core.averaging import Averaged
from gossamer.core.errors import BadInput
from gossamer.core.matching import Preferred
from gossamer.core.topology import Graph, Topology
from gossamer.core.topology import topology as topology_by_name
from gossamer.recipes.setting import Setting

TopologyName: TypeAlias = Literal["ring", "complete", "one_peer", "two_peer", "one_peer_exp"]
Admissible: TypeAlias = Literal["all", "regions"] | tuple[tuple[int, int], ...]


def graph_of(
    setting: Setting,
    name: TopologyName,
    *,
    alpha: float = 1.0,
    perfect: bool = False,
    prefer: float = 0.0,
    admissible: Admissible = "all",
    min_mbps: float = 0.0,
    average_every: int = 0,
) -> Topology:
    """The graphs of `_between` with, every `average_every` rounds, the complete one; 0: never.

    Raises:
        BadInput: what `_between` says; average_every of 1 or below 0, or on the complete graph.
    """
    plain = _between(setting, name, alpha=alpha, perfect=perfect, prefer=prefer, admissible=admissible, min_mbps=min_mbps)
    if not average_every:
        return plain
    if name == "complete":
        raise BadInput(f"average_every = {average_every} with topology 'complete', which averages in every round: leave it out")
    return Averaged(plain, average_every)


def _between(
    setting: Setting, name: TopologyName, *, alpha: float, perfect: bool, prefer: float, admissible: Admissible, min_mbps: float
) -> Topology:
    """A topology by name among the workers of `setting`. With `prefer` above 0 one_peer and two_peer draw peers by link; with `admissible`
    or `min_mbps` they draw among the pairs that `admissible_graph` leaves.

    Raises:
        BadInput: a fixed topology with `prefer` or a restriction, both of these together, link rates that are not known, or pairs that do
            not connect the workers.
    """
    random = name in ("one_peer", "two_peer")
    graph = admissible_graph(setting, admissible, min_mbps)
    if graph is not None and not random:
        raise BadInput(f"topology {name!r} is one graph for all workers, so pairs cannot be left out of it: use one_peer or two_peer")
    if graph is not None and prefer:
        raise BadInput(f"prefer = {prefer} draws peers among all workers: leave admissible and min_mbps out, or set prefer to 0")
    plain = topology_by_name(name, setting.n, seed=setting.seed, alpha=alpha, perfect=perfect, admissible=graph)
    if not prefer or setting.n < 2:
        return plain
    if not random:
        raise BadInput(f"prefer = {prefer} with topology {name!r}, whose peers are fixed: use one_peer or two_peer, or set prefer to 0")
    if setting.rates is None:
        raise BadInput(f"prefer = {prefer} draws peers by the rates of their links, which this setting does not know: give it rates")
    return Preferred(setting.n, setting.seed, 1 if name == "one_peer" else 2, setting.rates(), prefer, alpha, perfect)


def admissible_graph(setting: Setting, admissible: Admissible, min_mbps: float) -> Graph | None:
    """Which workers may be peers; None: all of them.

    Args:
        admissible: "all"; "regions": workers of one region, and the first worker of each region with the first of every other; or pairs of
            workers, in any order.
        min_mbps: pairs whose link carries less, in the slower direction, are left out (rates as in `gossamer.core.matching`); 0: none.

    Raises:
        BadInput: no such workers, a rate below 0, rates that are not known, or workers that cannot reach one another.
    """
    if not 0.0 <= min_mbps < float("inf"):
        raise BadInput(f"min_mbps = {min_mbps}: expected 0 (any link will do) or more Mbit/s")
    if admissible == () and setting.n > 1:
        raise BadInput("admissible names no pair of workers: give pairs as [[0, 1], [1, 2]], or leave it out")
    if (admissible == "all" and not min_mbps) or setting.n < 2:
        return None
    pairs = _pairs(setting, admissible)
    if min_mbps:
        if setting.rates is None:
            raise BadInput(f"min_mbps = {min_mbps} leaves slow links out, and this setting does not know the rates of links: give it rates")
        rates = setting.rates()
        kind, fast = np.array(rates.kind), rates.between() >= min_mbps
        pairs = [(i, j) for i, j in pairs if fast[kind[i], kind[j]]]
    try:
        return Graph.of(setting.n, pairs)
    except BadInput as error:
        left = f" (min_mbps = {min_mbps:g} has left links out)" if min_mbps else ""
        raise BadInput(f"admissible pairs{left}: {error}") from None


def _pairs(setting: Setting, admissible: Admissible) -> Sequence[tuple[int, int]]:
    n = setting.n
    if admissible == "all":
        return list(combinations(range(n), 2))
    if admissible == "regions":
        region = setting.regions or (0,) * n
        first = [region.index(r) for r in dict.fromkeys(region)]
        return [(i, j) for i, j in combinations(range(n), 2) if region[i] == region[j] or (i in first and j in first)]
    if isinstance(admissible, str):
        raise BadInput(f"admissible = {admissible!r}: expected all, regions, or pairs of workers as [[0, 1], [1, 2]]")
    for i, j in admissible:
        if i == j or not (0 <= i < n and 0 <= j < n):
            raise BadInput(f"admissible pair [{i}, {j}]: expected two unlike workers from 0 to {n - 1}")
    return admissible
