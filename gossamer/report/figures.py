"""Which figures a page shows, and under which heading. A figure without data is left out."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.report import consensus
from gossamer.report.curves import loss_against_time, loss_against_tokens, training_loss
from gossamer.report.graphs import graphs
from gossamer.report.links import links
from gossamer.report.read import Run
from gossamer.report.reality import table
from gossamer.report.rounds import time_by_round
from gossamer.report.spent import bytes_by_round, bytes_by_run, bytes_by_worker, time_by_run, time_spent
from gossamer.report.style import Chart
from gossamer.report.timeline import MOST_SPANS, zoomable
from gossamer.report.waits import matrix

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss-tokens", "loss-time", "training-loss")),
    ("Time", ("time-spent", "time-by-run", "waits", "time-by-round", "timeline")),
    ("Plan", ("plan",)),
    ("Agreement", ("consensus", "contraction", "graphs")),
    ("Bytes and links", ("bytes-by-worker", "bytes-by-round", "bytes-by-run", "links")),
)
"""Headings, and the names of the charts below each."""
SPANS_OF_ALL = 60_000
"""Of all timelines of a page."""


def of_run(run: Run) -> list[Chart]:
    """Every figure of one run."""
    return _there([loss_against_tokens([run]), loss_against_time([run]), *_apart(run, SPANS_OF_ALL)])


def of_comparison(runs: Sequence[Run]) -> list[Chart]:
    """The figures that lay several runs side by side."""
    return _there([loss_against_tokens(runs), loss_against_time(runs), time_by_run(runs), bytes_by_run(runs)])


def beside(run: Run, runs: int) -> list[Chart]:
    """What a comparison of `runs` runs shows of each of them apart."""
    return _there(_apart(run, SPANS_OF_ALL // runs))


def parts(charts: Sequence[Chart], single: bool) -> list[tuple[str, list[Chart]]]:
    """The charts in the order of PARTS: of a single run under these headings, else under one."""
    order = {name: (k, i) for k, (_, names) in enumerate(PARTS) for i, name in enumerate(names)}
    placed = sorted(charts, key=lambda chart: order[chart.name])
    if not single:
        return [("Figures", placed)] if placed else []
    found = [(title, [chart for chart in placed if chart.name in names]) for title, names in PARTS]
    return [(title, group) for title, group in found if group]


def _apart(run: Run, spans: int) -> list[Chart | None]:
    return [
        training_loss(run),
        time_spent(run),
        matrix(run),
        time_by_round(run),
        zoomable(run, min(MOST_SPANS, spans)),
        table(run),
        *consensus.charts(run),
        graphs(run),
        bytes_by_worker(run),
        bytes_by_round(run),
        links(run),
    ]


def _there(charts: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]
