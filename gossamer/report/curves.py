"""Loss figures: against tokens, against time, and worker by worker."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gossamer.report.read import Run
from gossamer.report.records import Evaluation, Round
from gossamer.report.style import (
    DASHES,
    PALETTE,
    SOFT,
    WIDTH_IN,
    Chart,
    canvas,
    count_unit,
    label_ends,
    plain_ticks,
    run_styles,
    thin,
    time_unit,
    to_svg,
)
from gossamer.report.words import fixed, labels, recipe, tidy, worker_name, worker_names

DIRECT = 8
"""Up to this many lines carry their own names and colours; more become a grey bundle with its mean."""


@dataclass(frozen=True)
class Point:
    """Loss of the fleet at one round; `low` and `high` are the extremes over the workers."""

    round: int
    tokens: int
    time_s: float
    loss: float
    low: float
    high: float


def styles(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """Each run's (colour, dash), the same in every figure and table of a page."""
    return run_styles([run.summary["method"] for run in runs], [recipe(run) for run in runs])


def evaluated(run: Run) -> list[Point]:
    """Evaluations by round: the mean model's loss where it was evaluated, the workers' mean loss elsewhere."""
    groups: dict[int, list[Evaluation]] = defaultdict(list)
    for event in run.evaluations:
        if math.isfinite(event.loss):
            groups[event.round].append(event)
    points = []
    for number, events in sorted(groups.items()):
        losses = [e.loss for e in events if e.worker is not None]
        fleet = [e for e in events if e.worker is None]
        loss = fleet[-1].loss if fleet else sum(losses) / len(losses)
        every = [*losses, loss]
        points.append(Point(number, max(e.tokens for e in events), max(e.time_s for e in events), loss, min(every), max(every)))
    return points


def trained(run: Run) -> list[Point]:
    """Training loss by round, the token-weighted mean over the workers that took part."""
    groups: dict[int, list[Round]] = defaultdict(list)
    for event in run.rounds:
        if math.isfinite(event.loss):
            groups[event.round].append(event)
    points = []
    for number, events in sorted(groups.items()):
        weight = sum(e.tokens for e in events)
        loss = sum(e.loss * e.tokens for e in events) / weight if weight else sum(e.loss for e in events) / len(events)
        losses = [e.loss for e in events]
        points.append(Point(number, max(e.tokens_total for e in events), max(e.time_s for e in events), loss, min(losses), max(losses)))
    return points


def curves(runs: Sequence[Run]) -> tuple[list[list[Point]], str]:
    """One curve per run and what it shows: evaluation loss when every run has some, otherwise training loss, never a mixture."""
    points = [evaluated(run) for run in runs]
    return (points, "evaluation loss") if all(points) else ([trained(run) for run in runs], "training loss")


def _frame(axes: Axes, losses: Sequence[Sequence[float]], always: Sequence[float] = ()) -> bool:
    """Sets the loss limits. A steep start is cut off when it would flatten the rest; True when it was."""
    every = [v for line in losses for v in line]
    low, high = min([*every, *always]), max([*every, *always])
    late = [v for line in losses for v in line[max(1, len(line) // 8) :]] if min(len(line) for line in losses) >= 8 else every
    top = max([*late, *always])
    cut = high - low > 1.6 * (top - low) and top > low
    top = top if cut else high
    pad = (top - low) * 0.06 or max(abs(low) * 0.02, 0.01)
    axes.set_ylim(low - pad, top + pad * (2 if cut else 1))
    return cut


def _target(axes: Axes, target: float, lines: Sequence[Sequence[tuple[float, float]]]) -> None:
    """A target perplexity as a dashed line at its logarithm, named where the fewest of `lines` pass. Call when the limits are final."""
    level = math.log(target)
    axes.axhline(level, color=SOFT, lw=1.1, ls=(0, (4, 3)), zorder=1)
    right, (low, high) = axes.get_xlim()[1], axes.get_ylim()
    width, height = 0.36 * right, 0.08 * (high - low)

    def crowd(place: tuple[float, bool]) -> int:
        x, above = place
        bottom = level if above else level - height
        spots = np.linspace(x * right, x * right + width, 24)
        return sum(
            int(np.sum((heights > bottom) & (heights < bottom + height)))
            for line in lines
            for heights in [np.interp(spots, [p for p, _ in line], [q for _, q in line], left=np.inf, right=np.inf)]
        )

    x, above = min([(x, above) for above in (False, True) for x in (0.005, 0.32, 0.635)], key=crowd)
    axes.annotate(
        f"target: perplexity {target:g}",
        xy=(x, level),
        xycoords=("axes fraction", "data"),
        xytext=(2, 3 if above else -3),
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=8.5,
        color=SOFT,
    )


def _loss(runs: Sequence[Run], against: str) -> Chart | None:
    """Loss of each run against "tokens" or "time"."""
    lines, what = curves(runs)
    kept = [(run, label, style, line) for run, label, style, line in zip(runs, labels(runs), styles(runs), lines, strict=True) if line]
    if not kept:
        return None

    def x_of(p: Point) -> float:
        return p.tokens if against == "tokens" else p.time_s

    largest = max(x_of(p) for *_, line in kept for p in line)
    scale, unit = count_unit(largest) if against == "tokens" else time_unit(largest)
    with canvas(WIDTH_IN, 3.5) as (figure, axes):
        targets = sorted({t for run, *_ in kept if (t := run.number("target_perplexity")) is not None and t > 0})
        goals = [math.log(t) for t in targets] if what == "evaluation loss" else []  # training loss is not compared with a target
        for run, _, (color, dash), line in kept:
            shown = thin([(x_of(p) / scale, p.loss) for p in line])
            marks = "o" if len(line) <= 40 else ""
            axes.plot(*zip(*shown, strict=True), color=color, ls=dash, marker=marks, ms=3.4, zorder=3)
            if any(p.high - p.low > 0.002 for p in line) and what == "evaluation loss":
                low, high = (
                    thin([(x_of(p) / scale, v) for p, v in zip(line, side, strict=True)])
                    for side in ([p.low for p in line], [p.high for p in line])
                )
                axes.fill_between([x for x, _ in low], [y for _, y in low], [y for _, y in high], color=color, alpha=0.16, lw=0, zorder=2)
            reached = run.number("time_to_target_s")
            wanted = run.number("target_perplexity")
            if against == "time" and reached is not None and goals and wanted:
                axes.plot([reached / scale], [math.log(wanted)], marker="D", ms=6, mfc="white", mec=color, mew=1.7, ls="none", zorder=5)
        axes.set_xlim(0, largest / scale * 1.01 or 1)
        cut = _frame(axes, [[p.loss for p in line] for *_, line in kept], goals)
        for goal in goals:
            _target(axes, math.exp(goal), [[(x_of(p) / scale, p.loss) for p in line] for *_, line in kept])
        axes.grid(axis="y")
        plain_ticks(axes)
        axes.set_ylabel(f"{what} (nats per token)")
        axes.set_xlabel(f"tokens ({unit})" if unit and against == "tokens" else "tokens" if against == "tokens" else f"time ({unit})")
        if len(kept) <= DIRECT:
            label_ends(
                figure, axes, [(x_of(line[-1]) / scale, line[-1].loss, tidy(label, 26), color) for _, label, (color, _), line in kept]
            )
        else:
            handles = [axes.plot([], [], color=color, ls=dash, label=tidy(label, 26))[0] for _, label, (color, dash), _ in kept]
            figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5, handlelength=1.8)
            figure.set_size_inches(WIDTH_IN, 3.5 + 0.19 * math.ceil(len(kept) / 2))
        ends = "; ".join(f"{label} ends at {fixed(line[-1].loss, 3)}" for _, label, _, line in kept)
        alt = f"{what.capitalize()} against {against}. {ends}."
        svg = to_svg(figure, f"loss-{against}", alt)
    caption = [
        "Loss of the mean model of the fleet where it was evaluated, otherwise the mean over workers."
        if what == "evaluation loss"
        else "No evaluation in every run: token-weighted mean of the training loss."
    ]
    if what == "evaluation loss" and any(p.high - p.low > 0.002 for *_, line in kept for p in line):
        caption.append("The band spans the workers.")
    if against == "time" and goals and any(run.number("time_to_target_s") is not None for run, *_ in kept):
        caption.append("A diamond marks the moment at which the target was reached.")
    if cut:
        caption.append("The steep start lies above the frame.")
    return Chart(f"loss-{against}", f"Loss against {against}", " ".join(caption), alt, svg)


def loss_against_tokens(runs: Sequence[Run]) -> Chart | None:
    """Loss of every run against global tokens; None without any loss."""
    return _loss(runs, "tokens")


def loss_against_time(runs: Sequence[Run]) -> Chart | None:
    """Loss of every run against time, with the target and the moment of reaching it; None without any loss."""
    return _loss(runs, "time")


def training_loss(run: Run) -> Chart | None:
    """Training loss of each worker by round; more than DIRECT workers become a grey bundle with its mean."""
    series: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in run.rounds:
        if math.isfinite(event.loss):
            series[event.worker].append((event.round, event.loss))
    if not series:
        return None
    names = worker_names(run)
    mean = [(float(p.round), p.loss) for p in trained(run)]
    few = len(series) <= DIRECT
    with canvas(WIDTH_IN, 3.5) as (figure, axes):
        ends = []
        for i, (worker, points) in enumerate(sorted(series.items())):
            color = PALETTE[i % len(PALETTE)] if few else "#b4bcc4"
            shown = thin(sorted(points), 500 if few else 150)
            axes.plot(
                *zip(*shown, strict=True),
                color=color,
                lw=1.5 if few else 0.7,
                marker="o" if len(points) <= 20 and few else "",
                ms=3,
                ls=DASHES[0],
                zorder=3 if few else 2,
            )
            ends.append((shown[-1][0], shown[-1][1], worker_name(names, worker), color))
        if not few:
            axes.plot(*zip(*thin(mean), strict=True), color=PALETTE[0], lw=2.2, marker="o" if len(mean) == 1 else "", zorder=4)
            ends = [(*mean[-1], f"mean of {len(series)}", PALETTE[0])]
        first, last = min(x for line in series.values() for x, _ in line), max(x for line in series.values() for x, _ in line)
        axes.set_xlim(first - (0.5 if first == last else 0), last + (0.5 if first == last else (last - first) * 0.01))
        cut = _frame(axes, [[y for _, y in sorted(line)] for line in series.values()])
        axes.grid(axis="y")
        plain_ticks(axes, whole_x=True)
        if first == last:
            axes.set_xticks([first])
        axes.set_xlabel("round")
        axes.set_ylabel("training loss (nats per token)")
        label_ends(figure, axes, ends)
        low, high = min(y for _, y, _, _ in ends), max(y for _, y, _, _ in ends)
        alt = f"Training loss of {len(series)} workers by round; after the last round between {low:.3f} and {high:.3f}."
        svg = to_svg(figure, f"training-{run.folder}", alt)
    caption = "Each worker's own mean over its round, on its own data" + ("." if few else "; grey: each worker, blue: token-weighted mean.")
    return Chart("training-loss", "Training loss per worker", caption + (" The steep start lies above the frame." if cut else ""), alt, svg)
