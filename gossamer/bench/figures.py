"""Figures of a result file, as SVG."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gossamer.bench.curve import Curve, time_to

SHOWN = ("ddp", "diloco", "diloco_int8", "halos", "awb", "css", "geomesh", "overlap", "adamw", "adamw_replan", "muon")
_COLOURS = {key: f"C{k}" if k < 10 else "black" for k, key in enumerate(SHOWN)}
IDLE = ("compute", "straggler idle", "network idle")


def curves_of(row: Mapping[str, Any]) -> list[Curve]:
    return [Curve(*map(tuple, seed["curve"])) for seed in row["seeds"] if "curve" in seed]


def mean_curve(row: Mapping[str, Any]) -> Curve:
    """Mean over the seeds, point by point."""
    curves = curves_of(row)
    points = min(len(c.loss) for c in curves)
    return Curve(*(tuple(statistics.mean(c[k][i] for c in curves) for i in range(points)) for k in range(3)))


def axes_of(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_title(textwrap.fill(title, 90), fontsize=9, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    return figure, axes


def _shown(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Curve]]:
    """Title, colour and mean curve of each row that is drawn."""
    for key in SHOWN:
        row = found["rows"].get(key)
        if row is not None and curves_of(row):
            yield row["title"], _COLOURS[key], mean_curve(row)


def loss_against_time(found: Mapping[str, Any]) -> Figure:
    """Validation loss against virtual minutes."""
    figure, axes = axes_of(found["study"]["title"], "virtual minutes (logarithmic)", "validation loss, nats")
    for title, colour, curve in _shown(found):
        axes.plot([t / 60 for t in curve.time_s], curve.loss, label=title, lw=1.6, color=colour)
    axes.axhline(found["study"]["target_loss"], color="black", lw=0.8, ls=":", label="target")
    axes.set_xscale("log")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def loss_against_tokens(found: Mapping[str, Any]) -> Figure:
    """Validation loss against tokens: learning, without the clock."""
    figure, axes = axes_of(found["study"]["title"], "tokens of all workers, millions", "validation loss, nats")
    for title, colour, curve in _shown(found):
        axes.plot([t / 1e6 for t in curve.tokens], curve.loss, label=title, lw=1.6, color=colour)
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def speed_up(found: Mapping[str, Any]) -> Figure:
    """Time of DiLoCo to a loss over the row's time to it, for every loss that both reach."""
    figure, axes = axes_of(found["study"]["title"], "target loss, nats", "times faster than DiLoCo")
    diloco = mean_curve(found["rows"]["diloco"])
    top, low = diloco.loss[0], diloco.loss[-1]
    targets = [top + (low - top) * k / 60 for k in range(1, 61)]
    for title, colour, curve in _shown(found):
        pairs = [(x, time_to(diloco, x), time_to(curve, x)) for x in targets]
        known = [(x, a / b) for x, a, b in pairs if a is not None and b is not None and b > 0]
        if known and title != found["rows"]["diloco"]["title"]:
            axes.plot([x for x, _ in known], [r for _, r in known], label=title, lw=1.6, color=colour)
    axes.axvline(found["study"]["target_loss"], color="black", lw=0.8, ls=":")
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_yscale("log")
    axes.invert_xaxis()
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def where_time_goes(found: Mapping[str, Any]) -> Figure:
    """Compute and network idle, mean over the workers, and what is left."""
    figure, axes = axes_of(found["study"]["title"], "share of the time, mean over the workers", "")
    rows = [(key, found["rows"][key]) for key in SHOWN if key in found["rows"] and curves_of(found["rows"][key])][::-1]
    for place, (_, row) in enumerate(rows):
        of = [s for s in row["seeds"] if "curve" in s]
        compute = statistics.mean(s["utilisation"] for s in of)
        straggler = statistics.mean(statistics.mean(s["straggler_idle"]) for s in of)
        network = statistics.mean(s["network_idle"] for s in of)
        left = 0.0
        for part, colour, name in zip((compute, straggler, network), ("#2f6f4f", "#c9a227", "#9c3d3d"), IDLE, strict=True):
            axes.barh(place, part, left=left, color=colour, label=name if place == 0 else None)
            left += part
    axes.set_yticks(range(len(rows)), [row["title"] for _, row in rows], fontsize=8)
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


FIGURES: Mapping[str, Callable[[Mapping[str, Any]], Figure]] = {
    "time": loss_against_time,
    "tokens": loss_against_tokens,
    "speed-up": speed_up,
    "spent": where_time_goes,
}


def draw(
    found: Mapping[str, Any], folder: Path, name: str, figures: Mapping[str, Callable[[Mapping[str, Any]], Figure]] = FIGURES
) -> list[Path]:
    """Writes `<name>-<figure>.svg` for each figure. The same content gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for which, make in figures.items():
            path = folder / f"{name}-{which}.svg"
            make(found).savefig(path, metadata={"Date": None})
            paths.append(path)
    return paths
