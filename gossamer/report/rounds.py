"""Where each worker's time went, round by round: a strip of stacked columns a worker, or of shades where there are many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from gossamer.report.read import Run
from gossamer.report.records import KINDS
from gossamer.report.style import KIND_COLORS, Chart, legend, time_unit
from gossamer.report.words import KIND_NAMES, fixed, percent, worker_name, worker_names

MOST_STRIPS = 16
MOST_ROWS = 64
MOST_COLUMNS = 80
"""Longer runs show neighbouring rounds together, as means."""
_WIDTH, _STRIP, _GAP, _LEFT = 720.0, 38.0, 9.0, 92.0
Cells = Mapping[tuple[int, int], Mapping[str, float]]
"""(worker, column) -> mean seconds of a round, by kind."""


def columns(numbers: Sequence[int], most: int = MOST_COLUMNS) -> list[tuple[int, int]]:
    """Rounds put together so that at most `most` columns result: (first, last) of each.

    >>> columns([1, 2, 3]), columns(range(1, 8), 3)
    ([(1, 1), (2, 2), (3, 3)], [(1, 3), (4, 6), (7, 7)])
    """
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    size = -(-(high - low + 1) // most)
    return [(a, min(a + size - 1, high)) for a in range(low, high + 1, size)]


def cells_of(run: Run, spans: Sequence[tuple[int, int]]) -> Cells:
    """Mean seconds by kind of each worker in each span of rounds."""
    column = {t: k for k, (a, b) in enumerate(spans) for t in range(a, b + 1)}
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    count: dict[tuple[int, int], int] = defaultdict(int)
    for r in run.rounds:
        key = (r.worker, column[r.round])
        count[key] += 1
        for kind in KINDS:
            sums[key][kind] += r.seconds[kind]
    return {key: {kind: s / count[key] for kind, s in found.items()} for key, found in sums.items()}


def time_by_round(run: Run) -> Chart | None:
    """A strip a worker: seconds of each round by kind, on one scale; of many workers shares of compute, as shades. None: too few rounds."""
    spans = columns(sorted({r.round for r in run.rounds}))
    ids = sorted({r.worker for r in run.rounds})
    if not ids or len(spans) < 2:
        return None
    cells = cells_of(run, spans)
    names = worker_names(run)
    titles = [worker_name(names, i) for i in ids]
    together = any(a != b for a, b in spans)
    said = " Neighbouring rounds are put together, as means." if together else ""
    if len(ids) > MOST_STRIPS:
        return _shades(run, cells, ids[:MOST_ROWS], titles, spans, said)
    highest = max(sum(found.values()) for found in cells.values()) or 1.0
    scale, unit = time_unit(highest)
    kinds = [k for k in KINDS if any(found[k] > 0 for found in cells.values())]
    step = (_WIDTH - _LEFT) / len(spans)
    drawn = []
    for row, (worker, title) in enumerate(zip(ids, titles, strict=True)):
        base = (row + 1) * (_STRIP + _GAP)
        drawn.append(f'<text x="{_LEFT - 10:.0f}" y="{base - _STRIP / 2 + 4:.1f}" text-anchor="end" class="t-ink">{escape(title)}</text>')
        drawn.append(f'<path d="M{_LEFT:.0f} {base:.1f}H{_WIDTH:.0f}" class="s-line"/>')
        below = [0.0] * len(spans)
        for kind in kinds:
            path = []
            for k in range(len(spans)):
                height = cells.get((worker, k), {}).get(kind, 0.0) / highest * _STRIP
                if height > 0:
                    y = base - below[k] - height
                    path.append(f"M{_LEFT + k * step:.1f} {y:.2f}h{step * 0.88:.2f}v{height:.2f}h-{step * 0.88:.2f}z")
                    below[k] += height
            if path:
                drawn.append(f'<path d="{"".join(path)}" fill="{KIND_COLORS[kind]}"/>')
    bottom = len(ids) * (_STRIP + _GAP)
    drawn.append(_axis(spans, step, bottom))
    whole = sum(sum(found.values()) for found in cells.values())
    means = {kind: sum(found[kind] for found in cells.values()) / whole for kind in kinds}
    alt = "Time by worker and round: in the mean " + ", ".join(f"{KIND_NAMES[k]} {percent(v)} %" for k, v in means.items()) + "."
    svg = _svg(alt, bottom + 20, drawn)
    keys = legend((KIND_NAMES[k], KIND_COLORS[k]) for k in kinds)
    caption = f"A strip a worker, a column a round; the tallest is {fixed(highest / scale, 2)} {unit}, the same scale for all.{said}"
    return Chart("time-by-round", "Where the time went, round by round", caption, alt, f"<div>{keys}{svg}</div>", wide=True)


def _shades(run: Run, cells: Cells, ids: Sequence[int], titles: Sequence[str], spans: Sequence[tuple[int, int]], said: str) -> Chart:
    step, height = (_WIDTH - _LEFT) / len(spans), max(7.0, 420.0 / len(ids))
    paths: dict[int, list[str]] = defaultdict(list)
    shares = []
    for row, worker in enumerate(ids):
        for k in range(len(spans)):
            found = cells.get((worker, k))
            if found and (total := sum(found.values())):
                share = found["compute"] / total
                shares.append(share)
                paths[round(share * 10)].append(f"M{_LEFT + k * step:.1f} {row * height:.1f}h{step:.2f}v{height:.2f}h-{step:.2f}z")
    drawn = [
        f'<path d="{"".join(path)}" fill="{KIND_COLORS["compute"]}" fill-opacity="{0.04 + 0.096 * level:.2f}"/>'
        for level, path in sorted(paths.items())
    ]
    every = max(1, round(14 / height))
    for row in range(0, len(ids), every):
        y = (row + 0.5) * height + 4
        drawn.append(f'<text x="{_LEFT - 10:.0f}" y="{y:.1f}" text-anchor="end" class="t-ink">{escape(titles[row])}</text>')
    bottom = len(ids) * height
    drawn.append(_axis(spans, step, bottom + 2))
    mean = sum(shares) / len(shares) if shares else 0.0
    alt = f"Share of compute by worker and round, {percent(mean)} % in the mean."
    caption = "A row a worker, a column a round; the darker, the more of the round was compute (white: none, full blue: all)." + said
    if len(ids) < len(titles):
        caption += f" The first {len(ids)} of {len(titles)} workers."
    return Chart("time-by-round", "Where the time went, round by round", caption, alt, _svg(alt, bottom + 22, drawn), wide=True)


def _axis(spans: Sequence[tuple[int, int]], step: float, y: float) -> str:
    """Numbers of rounds below the columns."""
    every = max(1, -(-len(spans) // 10))
    out = [
        f'<text x="{_LEFT + (k + 0.44) * step:.1f}" y="{y + 15:.1f}" text-anchor="middle" class="t-ink">{spans[k][0]}</text>'
        for k in range(0, len(spans), every)
    ]
    out.append(f'<text x="{_LEFT - 10:.0f}" y="{y + 15:.1f}" text-anchor="end" class="t-soft">round</text>')
    return "".join(out)


def _svg(alt: str, height: float, drawn: Sequence[str]) -> str:
    label = escape(alt)
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-size="10">{"".join(drawn)}</svg>'
