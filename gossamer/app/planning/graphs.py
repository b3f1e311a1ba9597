"""The graphs that workers may mix on: how fast each makes them agree, and what its messages take on this fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.app.job import Job
from gossamer.core.averaging import Averaged
from gossamer.core.codec import Fp32
from gossamer.core.consensus import Form, exact, rate, rounds_to, spectral_gap
from gossamer.core.matching import Preferred
from gossamer.core.mixing import Mixing
from gossamer.core.outer import Gossip
from gossamer.core.topology import KNOWN, Complete, OnePeer, OnePeerExp, Ring, Topology, TwoPeer, topology
from gossamer.core.wires import Net, together
from gossamer.worker.packet import HEADER_BYTES

_ROUNDS = 16
"""Rounds whose exchange is worked out."""
_SPARSE = 64
"""Messages a worker and round up to which it is."""
_MEASURED = 256
"""Workers up to which rates are shown that have to be measured."""


def gap_line(job: Job) -> Iterator[str]:
    """The spectral gap of the graph that the method mixes on; nothing where all hear one mean, or where there is one worker."""
    graph = job.method.topology
    if job.method.synchronous or job.method.tiers or job.n == 1:
        return
    gap = spectral_gap(graph)
    line = f"graph: spectral gap {gap:.3g} ({_known(graph)}), so plain averaging agrees to a thousandth in {_rounds(gap, graph)} rounds"
    if isinstance(graph, Preferred):
        line += f"; peers drawn without regard to links would have {spectral_gap(_uniform(graph)):.3g}"
    yield line


def show(job: Job, names: Sequence[str], console: Console) -> None:
    """Prints a table of the named topologies among the job's workers, on its fleet; "all" is all of them.

    Where the configured method draws its peers by link, one_peer and two_peer have a second row for that. Another graph that it mixes on,
    one's own or among admissible pairs, has a row too.

    Raises:
        BadInput: an unknown name.
    """
    asked = list(dict.fromkeys(name for given in names for name in (KNOWN if given == "all" else (given,))))
    own = job.method.topology
    alpha = float(getattr(own.base if isinstance(own, Averaged) else own, "alpha", 1.0)) if not job.method.synchronous else 1.0
    rows: list[tuple[str, Topology]] = []
    for name in asked:
        graph = topology(name, job.n, job.config.seed, alpha=alpha)
        rows.append((name, graph))
        if isinstance(own, Preferred) and name in ("one_peer", "two_peer") and job.n > 1:
            peers: Literal[1, 2] = 1 if name == "one_peer" else 2
            rows.append((f"{name}, prefer {own.prefer:g}", Preferred(job.n, own.seed, peers, own.rates, own.prefer, alpha)))
    if not isinstance(own, Preferred | Ring | Complete | OnePeer | TwoPeer | OnePeerExp) or getattr(own, "admissible", None) is not None:
        rows.append((f"{type(own).__name__} (configured)", own))
    console.print(_table(job, rows))
    for line in _notes(job, alpha):
        console.print(line, highlight=False)


def _table(job: Job, rows: Sequence[tuple[str, Topology]]) -> Table:
    outer = _outer(job)
    table = Table(
        title=f"Graphs among {job.n} workers of {job.fleet.name}", box=box.SIMPLE, title_style="bold", title_justify="left", pad_edge=False
    )
    table.add_column("topology", no_wrap=True)
    heads = ["messages\na round", "spectral\ngap", "rounds to\n1/1000", "exchange s\nmean", "exchange s\nslowest"]
    for head in [*heads, *(f"rate,\n{form}" for form in get_args(Form))]:
        table.add_column(head, justify="right", no_wrap=True)
    net, nbytes = Net(job.fleet), job.bytes_charge * (HEADER_BYTES + Fp32().nbytes(job.layout))
    for name, graph in rows:
        gap = spectral_gap(graph) if job.n > 1 else 1.0
        sent = _sent(graph) if name != "complete" else job.n - 1
        mean_s, slowest_s = exchange_s(net, graph, nbytes) if sent <= _SPARSE else (None, None)
        cells = [f"{sent:.3g}", f"{gap:.4f}" + ("" if _known(graph) == "exact" else " ~"), _rounds(gap, graph), _s(mean_s), _s(slowest_s)]
        for form in get_args(Form):
            quick = job.n <= _MEASURED or exact(graph)
            cells.append(f"{rate(form, graph, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov):.3f}" if quick else "-")
        table.add_row(name, *cells)
    return table


def _outer(job: Job) -> Gossip:
    """What the rates are of: the configured outer optimizer, or else gasloc's."""
    outer = job.method.outer
    return outer if isinstance(outer, Gossip) and outer.linear else Gossip()


def _notes(job: Job, alpha: float) -> Iterator[str]:
    yield (
        "spectral gap: 1 - what plain averaging leaves of the disagreement in a round, as a root mean square (~: estimated); "
        "1 is agreement at once" + (f"; alpha {alpha:g}" if alpha != 1 else "")
    )
    yield (
        "exchange: float32 parameters, all workers at once; how long a worker waits in the mean, and the slowest of a round, over "
        f"{_ROUNDS} rounds"
    )
    outer = _outer(job)
    yield (
        f"rate: growth of the disagreement a round, as a root mean square, by where momentum acts, with outer lr {outer.lr:g} and momentum "
        f"{outer.momentum:g}{'' if outer.nesterov else ', heavy ball'}, "
        f"{f'as configured (form {outer.form})' if outer is job.method.outer else 'as in gasloc'}; at 1 or more the workers drift apart"
    )


@dataclass(frozen=True)
class _Shifted:
    """A topology from a later round on."""

    graph: Topology
    first: int
    random: bool = False

    @property
    def n(self) -> int:
        return self.graph.n

    def at(self, round: int) -> Mixing:
        return self.graph.at(self.first + round)


def exchange_s(net: Net, graph: Topology, nbytes: float) -> tuple[float, float]:
    """Seconds until workers have heard their peers when all speak at once: (mean over workers, mean over rounds of the slowest)."""
    rounds = [together(net, _Shifted(graph, r), nbytes) for r in range(_ROUNDS)]
    return float(np.mean(rounds)), float(np.mean([heard.max() for heard in rounds]))


def _uniform(graph: Preferred) -> Topology:
    return OnePeer(graph.n, graph.seed, graph.alpha) if graph.peers == 1 else TwoPeer(graph.n, graph.seed, graph.alpha)


def _known(graph: Topology) -> str:
    return "exact" if exact(graph) else "estimated"


def _sent(graph: Topology) -> float:
    """Messages a worker sends in a round, in the mean; over a period where there is a mean over all every so often."""
    if isinstance(graph, Averaged):
        between = _sent(graph.base)
        return between + (graph.n - 1 - between) / graph.every
    return float(np.mean([len(graph.at(0).out(i)) for i in range(graph.n)]))


def _rounds(gap: float, graph: Topology) -> str:
    """Where agreement is exact after a period, that period."""
    period = graph.every if isinstance(graph, Averaged) else graph.period if isinstance(graph, OnePeerExp) else 1
    rounds = float(period) if gap > 1 - 1e-6 else max(1.0, rounds_to(1.0 - gap))
    return f"{rounds:.0f}" if rounds < 1e6 else f"{rounds:.1e}"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"
