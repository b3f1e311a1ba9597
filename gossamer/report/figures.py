"""Which figures a page shows. Each is an inline SVG with real text; a figure without data is left out."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.report import consensus
from gossamer.report.curves import loss_against_time, loss_against_tokens, training_loss
from gossamer.report.graphs import graphs
from gossamer.report.read import Run
from gossamer.report.spent import bytes_by_round, bytes_by_run, bytes_by_worker, time_by_run, time_spent, timeline
from gossamer.report.style import Chart


def of_run(run: Run) -> list[Chart]:
    """Every figure of one run."""
    charts = [
        loss_against_tokens([run]),
        loss_against_time([run]),
        time_spent(run),
        training_loss(run),
        *consensus.charts(run),
        graphs(run),
        timeline(run),
        bytes_by_worker(run),
        bytes_by_round(run),
    ]
    return [chart for chart in charts if chart is not None]


def of_comparison(runs: Sequence[Run]) -> list[Chart]:
    """The figures that lay several runs side by side."""
    charts = [loss_against_tokens(runs), loss_against_time(runs), time_by_run(runs), bytes_by_run(runs)]
    return [chart for chart in charts if chart is not None]


def beside(run: Run) -> list[Chart]:
    """What a comparison shows of each run apart: where its time went, and its timeline."""
    charts = (time_spent(run), training_loss(run), *consensus.charts(run), graphs(run), timeline(run))
    return [chart for chart in charts if chart is not None]
