"""Where time and bytes went: stacked bars, a timeline of the first rounds, bytes per worker and per round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from gossamer.report.curves import styles
from gossamer.report.read import Run
from gossamer.report.records import KINDS, Close, Round, Span
from gossamer.report.style import (
    KIND_COLORS,
    PALETTE,
    SOFT,
    WIDE_IN,
    WIDTH_IN,
    Chart,
    bytes_unit,
    canvas,
    in_unit,
    plain_ticks,
    swatches,
    thin,
    time_unit,
    to_svg,
)
from gossamer.report.words import KIND_NAMES, fixed, labels, percent, tidy, worker_name, worker_names

MOST_ROWS = 16
"""More workers than this are drawn in groups of neighbours (bars) or left out (timeline)."""
MOST_SPANS = 1500


def seconds(run: Run) -> dict[int, dict[str, float]]:
    """Seconds by kind of each worker over the whole run, its closing included."""
    out: dict[int, dict[str, float]] = {}
    events: list[Round | Close] = [*run.rounds, *run.closes]
    for event in events:
        mine = out.setdefault(event.worker, dict.fromkeys(KINDS, 0.0))
        for kind in KINDS:
            mine[kind] += event.seconds[kind]
    return dict(sorted(out.items()))


def _groups(count: int) -> list[range]:
    """Neighbouring workers together, so that at most MOST_ROWS groups result.

    >>> _groups(3), len(_groups(32)), _groups(32)[0], _groups(17)[-1]
    ([range(0, 1), range(1, 2), range(2, 3)], 16, range(0, 2), range(16, 17))
    """
    size = -(-count // MOST_ROWS)
    return [range(lo, min(lo + size, count)) for lo in range(0, count, size)]


def _bars(axes: Axes, names: Sequence[str], rows: Sequence[dict[str, float]], scale: float) -> list[str]:
    """Stacked horizontal bars, first row on top, with the compute share written in; returns the kinds that occur."""
    kinds = [k for k in KINDS if any(row[k] > 0 for row in rows)]
    left = [0.0] * len(rows)
    for kind in kinds:
        values = [row[kind] / scale for row in rows]
        axes.barh(range(len(rows)), values, left=left, height=0.68, color=KIND_COLORS[kind], lw=0)
        left = [a + v for a, v in zip(left, values, strict=True)]
    longest = max(left) or 1.0
    for y, row in enumerate(rows):
        total = sum(row.values())
        share = row["compute"] / total if total else 0.0
        if row["compute"] / scale / longest > 0.14:
            axes.annotate(
                f"{percent(share, 0)} %", (0, y), xytext=(5, 0), textcoords="offset points", va="center", color="white", fontsize=9
            )
    axes.set_yticks(range(len(rows)), list(names))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.005)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    plain_ticks(axes, y=None)
    return kinds


def time_spent(run: Run) -> Chart | None:
    """Where each worker's time went; None without round records."""
    by_worker = seconds(run)
    if not by_worker:
        return None
    every, ids = list(by_worker.values()), list(by_worker)
    names = worker_names(run)
    rows, titles = [], []
    for group in _groups(len(every)):
        rows.append({k: sum(every[i][k] for i in group) / len(group) for k in KINDS})
        first, last = ids[group[0]], ids[group[-1]]
        titles.append(worker_name(names, first) if len(group) == 1 else f"workers {first}–{last}")
    scale, unit = time_unit(max(sum(row.values()) for row in rows))
    with canvas(WIDTH_IN, 1.25 + 0.27 * max(2, len(rows))) as (figure, axes):
        kinds = _bars(axes, titles, rows, scale)
        axes.set_xlabel(f"time over the whole run ({unit})")
        swatches(figure, [(KIND_NAMES[k], KIND_COLORS[k]) for k in kinds])
        shares = []
        for title, row in zip(titles, rows, strict=True):
            total = sum(row.values()) or 1.0
            said = [f"{KIND_NAMES[kind]} {percent(row[kind] / total)} %" for kind in ("compute", "straggler_idle", "network_idle")]
            shares.append(f"{title}: {', '.join(said)}")
        alt = "Where the time went. " + "; ".join(shares) + "."
        svg = to_svg(figure, f"time-{run.folder}", alt)
    grouped = len(rows) < len(every)
    caption = (
        "Straggler idle: waiting for a slower worker's compute. Network idle: waiting for its data. In the bars: the share of compute."
    )
    return Chart("time-spent", "Where the time went", caption + (" Neighbouring workers are averaged." if grouped else ""), alt, svg)


def time_by_run(runs: Sequence[Run]) -> Chart | None:
    """Where the time of each run went, as shares of the workers' mean; None without round records."""
    rows, names = [], []
    for run, label in zip(runs, labels(runs), strict=True):
        workers = list(seconds(run).values())
        total = sum(sum(w.values()) for w in workers)
        if total:
            rows.append({k: sum(w[k] for w in workers) / total for k in KINDS})
            names.append(tidy(label, 28))
    if not rows:
        return None
    with canvas(WIDTH_IN, 1.25 + 0.3 * max(2, len(rows))) as (figure, axes):
        kinds = _bars(axes, names, rows, 0.01)
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the workers' time (%)")
        swatches(figure, [(KIND_NAMES[k], KIND_COLORS[k]) for k in kinds])
        alt = (
            "Where the time went. "
            + "; ".join(f"{n}: " + ", ".join(f"{KIND_NAMES[k]} {percent(r[k])} %" for k in kinds) for n, r in zip(names, rows, strict=True))
            + "."
        )
        svg = to_svg(figure, "time-by-run", alt)
    return Chart("time-by-run", "Where the time went", "Mean over the workers of each run. In the bars: the share of compute.", alt, svg)


def drawn(run: Run) -> list[Span]:
    """The stretches of time that timelines show. What comes after the last round, such as an exchange that lands then, counts with it."""
    spans = [s for s in run.spans if s.kind in KIND_COLORS and s.end_s > s.start_s]
    rounds = run.planned.rounds if run.planned else int(run.summary["rounds"]) if run.finished else None
    return spans if rounds is None else [s if s.round <= rounds else replace(s, round=rounds) for s in spans]


def timeline(run: Run, rounds: int = 3) -> Chart | None:
    """The first rounds, worker by worker; None without spans. Sends overlap other work, so they are drawn below it."""
    spans = drawn(run)
    if not spans:
        return None
    ids = sorted({s.worker for s in spans})
    shown = ids[:MOST_ROWS]
    numbers = sorted({s.round for s in spans})[:rounds]
    while len(numbers) > 1 and sum(s.round in numbers and s.worker in shown for s in spans) > MOST_SPANS:
        numbers.pop()
    spans = [s for s in spans if s.worker in shown and s.round in numbers]
    begin = min(s.start_s for s in spans)
    end = max(s.end_s for s in spans)
    scale, unit = time_unit(end - begin)
    names = worker_names(run)
    with canvas(WIDE_IN, 1.2 + 0.3 * max(2, len(shown))) as (figure, axes):
        for row, worker in enumerate(shown):
            for kind in KINDS:
                mine = [
                    ((s.start_s - begin) / scale, (s.end_s - s.start_s) / scale) for s in spans if s.worker == worker and s.kind == kind
                ]
                if mine:
                    place = (row + 0.22, 0.16) if kind == "send" else (row - 0.34, 0.54)
                    axes.broken_barh(mine[:MOST_SPANS], place, facecolors=KIND_COLORS[kind], lw=0)
        for number in numbers[1:]:
            first = min((s.start_s for s in spans if s.round == number), default=begin)
            axes.axvline((first - begin) / scale, color=SOFT, lw=0.7, ls=(0, (2, 2)), zorder=0)
        axes.set_yticks(range(len(shown)), [worker_name(names, w) for w in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(shown) - 0.45, -0.55)
        axes.set_xlim(0, (end - begin) / scale)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        plain_ticks(axes, x=9, y=None)
        axes.set_xlabel(f"time ({unit})")
        kinds = [k for k in KINDS if any(s.kind == k for s in spans)]
        swatches(figure, [(KIND_NAMES[k], KIND_COLORS[k]) for k in kinds])
        which = f"round {numbers[0]}" if len(numbers) == 1 else f"rounds {numbers[0]} to {numbers[-1]}"
        alt = (
            f"Timeline of {which} for {len(shown)} workers, {fixed((end - begin) / scale, 2)} {unit} long: "
            + ", ".join(KIND_NAMES[k] for k in kinds)
            + "."
        )
        svg = to_svg(figure, f"timeline-{run.folder}", alt)
    caption = f"{which.capitalize()}, a row per worker."
    if "send" in kinds:
        caption += " Sends overlap other work and run below the row."
    if len(numbers) > 1:
        caption += " A dashed line: the first worker begins the next round."
    if len(shown) < len(ids):
        caption += f" The first {len(shown)} of {len(ids)} workers."
    return Chart("timeline", "Timeline", caption, alt, svg, wide=True)


def bytes_by_worker(run: Run) -> Chart | None:
    """Packet bytes that each worker sent and received over the run; None for a run that sent nothing."""
    sent, received = run.bytes_sent, run.bytes_received
    if not any(sent) and not any(received):
        return None
    count = max(len(sent), len(received))
    sent, received = sent + (0,) * (count - len(sent)), received + (0,) * (count - len(received)) if received else ()
    groups = _groups(count)
    names = worker_names(run)
    titles = [worker_name(names, g[0]) if len(g) == 1 else f"workers {g[0]}–{g[-1]}" for g in groups]
    scale, unit = bytes_unit(max([*sent, *received]))
    lanes = [(sent, PALETTE[0], "sent")] + ([(received, PALETTE[5], "received")] if received else [])
    with canvas(WIDTH_IN, 1.1 + 0.32 * max(2, len(groups))) as (figure, axes):
        height = 0.74 / len(lanes)
        for lane, (values, color, _) in enumerate(lanes):
            means = [sum(values[i] for i in g) / len(g) / scale for g in groups]
            axes.barh(
                [y + (lane - (len(lanes) - 1) / 2) * height for y in range(len(groups))], means, height=height * 0.94, color=color, lw=0
            )
        axes.set_yticks(range(len(groups)), titles)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(groups) - 0.45, -0.55)
        axes.set_xlim(0, max([*sent, *received]) / scale * 1.03)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        plain_ticks(axes, y=None)
        axes.set_xlabel(f"{unit} over the whole run")
        swatches(figure, [(name, color) for _, color, name in lanes])
        alt = (
            "Bytes per worker: "
            + "; ".join(f"{t} sent {in_unit(sum(sent[i] for i in g) / len(g) / scale)} {unit}" for t, g in zip(titles, groups, strict=True))
            + "."
        )
        svg = to_svg(figure, f"bytes-{run.folder}", alt)
    caption = "Packets with their headers." + (" Neighbouring workers are averaged." if len(groups) < count else "")
    if (ratio := against_fp32(run)) is not None:
        caption += f" In the mean a worker sends {fixed(ratio, 3)} times the model in float32 (4 bytes a parameter) a round"
        caption += f", {fixed(1 / ratio, 1)} times less than that." if 0 < ratio < 0.67 else "."
    return Chart("bytes-by-worker", "Bytes per worker", caption, alt, svg)


def against_fp32(run: Run) -> float | None:
    """Bytes that a worker sends in a round, the mean over both, over those of the parameters in float32; None: not known."""
    parameters = run.number("parameters")
    if not parameters or not run.rounds:
        return None
    return sum(r.bytes_sent for r in run.rounds) / len(run.rounds) / (4 * parameters)


def bytes_by_round(run: Run) -> Chart | None:
    """Packet bytes sent in each round: the workers' mean, and their extremes as a band; None for a run that sent nothing."""
    groups: dict[int, list[int]] = defaultdict(list)
    for event in run.rounds:
        groups[event.round].append(round(event.bytes_sent * run.bytes_charge))
    if not any(b for sent in groups.values() for b in sent):
        return None
    numbers = sorted(groups)
    scale, unit = bytes_unit(max(max(sent) for sent in groups.values()))
    mean = [sum(groups[t]) / len(groups[t]) / scale for t in numbers]
    low, high = [min(groups[t]) / scale for t in numbers], [max(groups[t]) / scale for t in numbers]
    spreads = any(h > lo for h, lo in zip(high, low, strict=True))
    with canvas(WIDTH_IN, 3.0) as (figure, axes):
        if len(numbers) <= 40:
            axes.bar(numbers, mean, width=0.72, color=PALETTE[0], lw=0)
            if spreads:
                both = [[m - lo for m, lo in zip(mean, low, strict=True)], [h - m for m, h in zip(mean, high, strict=True)]]
                axes.errorbar(numbers, mean, yerr=both, fmt="none", ecolor=SOFT, elinewidth=1.2, capsize=2.5)
        else:
            xs = thin([(float(t), m) for t, m in zip(numbers, mean, strict=True)])
            axes.plot(*zip(*xs, strict=True), color=PALETTE[0])
            if spreads:
                axes.fill_between(numbers, low, high, color=PALETTE[0], alpha=0.18, lw=0)
        axes.set_ylim(0, max(high) * 1.08)
        axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
        axes.grid(axis="y")
        plain_ticks(axes, whole_x=True)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{unit} sent per worker")
        alt = f"Sent per worker: {fixed(mean[0], 3)} {unit} in round {numbers[0]}, {fixed(mean[-1], 3)} in round {numbers[-1]}."
        svg = to_svg(figure, f"rounds-{run.folder}", alt)
    return Chart(
        "bytes-by-round",
        "Bytes per round",
        "Mean over the workers" + ("; the whiskers or the band span them." if spreads else "."),
        alt,
        svg,
    )


def bytes_by_run(runs: Sequence[Run]) -> Chart | None:
    """Bytes sent per worker in each run of a comparison; None when no run sent anything."""
    means = [sum(r.bytes_sent) / max(1, len(r.bytes_sent)) for r in runs]
    if not any(means):
        return None
    scale, unit = bytes_unit(max(means))
    names = [tidy(label, 28) for label in labels(runs)]
    colors = [color for color, _ in styles(runs)]
    with canvas(WIDTH_IN, 0.95 + 0.3 * max(2, len(runs))) as (figure, axes):
        axes.barh(range(len(runs)), [m / scale for m in means], height=0.68, color=colors, lw=0)
        for y, value in enumerate(means):
            axes.annotate(
                f"{in_unit(value / scale)} {unit}", (value / scale, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
            )
        axes.set_yticks(range(len(runs)), names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(runs) - 0.45, -0.55)
        axes.set_xlim(0, max(means) / scale * 1.22)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        plain_ticks(axes, y=None)
        axes.set_xlabel(f"{unit} sent per worker over the whole run")
        alt = "Sent per worker: " + "; ".join(f"{n} {in_unit(m / scale)} {unit}" for n, m in zip(names, means, strict=True)) + "."
        svg = to_svg(figure, "bytes-by-run", alt)
    return Chart("bytes-by-run", "Bytes sent per worker", "Packets with their headers, mean over the workers.", alt, svg)
