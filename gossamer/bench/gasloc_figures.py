"""Figures of the result file of `gossamer bench gasloc`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from gossamer.bench.figures import axes_of, curves_of, mean_curve
from gossamer.bench.gasloc_rows import F3, T1B, WIDE
from gossamer.bench.tables import column, mean

Found = Mapping[str, Any]


def loss_against_time(found: Found) -> Figure:
    """Validation loss against virtual hours with one slow line, a panel for each fleet; the line is DiLoCo's final loss."""
    figure = Figure(figsize=(9.5, 5.0), layout="constrained")
    figure.suptitle(
        textwrap.fill(f"{found['study']['title']}; clock and bytes charged as 134M parameters", 110), fontsize=9, ha="left", x=0.01
    )
    panels = figure.subplots(1, len(found["time"]), sharey=True)
    for axes, (share, table) in zip(panels, found["time"].items(), strict=True):
        axes.set_title(f"one line of eight at {share} % of 1 Gbit/s", fontsize=9)
        axes.set_xlabel("virtual hours")
        axes.grid(alpha=0.25)
        for k, row in enumerate(F3):
            if curves_of(table[row.key]):
                curve = mean_curve(table[row.key])
                label = row.title if axes is panels[0] else None
                axes.plot([t / 3600 for t in curve.time_s], curve.loss, label=label, lw=1.4, color="black" if k == 0 else f"C{k}")
        target = mean(column(table["diloco_wan"], "loss"))
        if target is not None:
            axes.axhline(target, color="black", lw=0.8, ls=":")
            axes.set_ylim(target - 0.15, target + 1.0)
    panels[0].set_ylabel("validation loss, nats")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def loss_against_steps(found: Found) -> Figure:
    """Final loss against H."""
    figure, axes = axes_of(
        f"{found['study']['title']}, 8 workers, equal tokens", "inner steps a round, H (logarithmic)", "validation loss, nats"
    )
    titles = {row.key: row.title for row in T1B}
    for key, points in found["steps"].items():
        known = [(p["steps"], p["loss"]) for p in points if p["loss"] is not None]
        axes.plot([h for h, _ in known], [loss for _, loss in known], marker="o", label=titles[key])
    axes.set_xscale("log")
    ticks = [p["steps"] for p in next(iter(found["steps"].values()))]
    axes.set_xticks(ticks, [str(h) for h in ticks])
    axes.minorticks_off()
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    return figure


def surface(found: Found) -> Figure:
    """Final loss over outer learning rate and momentum, a panel for each topology, on one scale."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    figure.suptitle(f"{found['study']['title']}, 8 workers, H = 30: outer settings", fontsize=9, ha="left", x=0.01)
    panels = figure.subplots(1, len(found["surface"]))
    losses = [p["loss"] for points in found["surface"].values() for p in points if p["loss"] is not None]
    low, high = min(losses), min(max(losses), min(losses) + 1.0)
    image = None
    for axes, (key, points) in zip(panels, found["surface"].items(), strict=True):
        rates = sorted({p["outer_lr"] for p in points})
        momenta = sorted({p["outer_momentum"] for p in points})
        of = {(p["outer_momentum"], p["outer_lr"]): p["loss"] for p in points}
        grid = [[math.nan if of[m, r] is None else of[m, r] for r in rates] for m in momenta]
        image = axes.imshow(grid, vmin=low, vmax=high, cmap="viridis_r", aspect="auto", origin="lower")
        for i, line in enumerate(grid):
            for j, loss in enumerate(line):
                dark = loss < low + 0.35 * (high - low)
                axes.text(
                    j,
                    i,
                    "diverged" if math.isnan(loss) else f"{loss:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="black" if dark else "white",
                )
        axes.set_title(key.removeprefix("gasloc_"), fontsize=9)
        axes.set_xticks(range(len(rates)), [f"{r:g}" for r in rates])
        axes.set_yticks(range(len(momenta)), [f"{m:g}" for m in momenta])
        axes.set_xlabel("outer learning rate")
    panels[0].set_ylabel("outer momentum")
    if image is not None:
        figure.colorbar(image, ax=panels, label="nats", shrink=0.9)
    return figure


def loss_against_workers(found: Found) -> Figure:
    """Final loss against the number of workers, the global batch the same."""
    figure, axes = axes_of(f"{found['study']['title']}, H = 30, one global batch", "workers", "validation loss, nats")
    tables = {8: found["tables"]["many"], **{n: found["wide"][str(n)] for n in WIDE}}
    for k, row in enumerate(T1B):
        known = [
            (n, loss) for n, table in tables.items() if row.key in table and (loss := mean(column(table[row.key], "loss"))) is not None
        ]
        style = ":" if row.key.startswith("local") else "-"
        axes.plot(
            [n for n, _ in known],
            [v for _, v in known],
            marker="o",
            ls=style,
            label=row.title,
            color="black" if k == 0 else f"C{(k - 1) % 4}",
        )
    axes.set_xscale("log")
    axes.set_xticks(list(tables), [str(n) for n in tables])
    axes.minorticks_off()
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def loss_against_bytes(found: Found) -> Figure:
    """Final loss of compressed, overlapped and steered gossip against what a worker sends."""
    figure, axes = axes_of(
        f"{found['study']['title']}, two_peer, H = 30", "GB sent by a worker, charged (logarithmic)", "validation loss, nats"
    )
    most = 0.0
    for k, row in enumerate(found["tables"]["ours"].values()):
        sent, loss = mean(column(row, "mb_sent")), mean(column(row, "loss"))
        if sent is not None and loss is not None:
            axes.plot([sent / 1e3], [loss], marker="o", ls="", color=f"C{k}", label=row["title"])
            most = max(most, sent / 1e3)
    axes.set_xscale("log")
    ticks = [gb for gb in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if gb <= 2 * most]
    axes.set_xticks(ticks, [f"{gb:g}" for gb in ticks])
    axes.set_xlim(left=max(most / 50, 0.05))
    axes.minorticks_off()
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


FIGURES: Mapping[str, Callable[[Found], Figure]] = {
    "time": loss_against_time,
    "steps": loss_against_steps,
    "surface": surface,
    "workers": loss_against_workers,
    "bytes": loss_against_bytes,
}
