"""Who mixed with whom: the graphs of the first rounds as small pictures in a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

from gossamer.report.read import Run
from gossamer.report.style import PALETTE, SOFT, Chart, legend, on
from gossamer.report.words import tidy

ROUNDS = 8
"""Pictures of single rounds."""
MOST = 64
"""Workers up to which there are pictures."""
NUMBERED = 16
"""Workers up to which they carry their numbers."""
Edges: TypeAlias = Mapping[tuple[int, int], float]
"""Weights by pair, the lower number first; pairs of a worker with itself are left out."""
_SIZE, _RADIUS = 132, 52


def rounds_of(run: Run) -> dict[int, Edges]:
    """The pairs that mixed in each round, as far as workers said whom they heard."""
    graphs: dict[int, dict[tuple[int, int], float]] = {}
    for record in run.rounds:
        if record.weights:
            edges = graphs.setdefault(record.round, {})
            for j, w in record.weights.items():
                if j != record.worker:
                    pair = (min(j, record.worker), max(j, record.worker))
                    edges[pair] = max(w, edges.get(pair, 0.0))
    return dict(sorted(graphs.items()))


def heard_by_all(n: int, graphs: Sequence[Edges]) -> int | None:
    """How many of these rounds it takes until everybody has heard of everybody, directly or through others; None: more.

    >>> heard_by_all(4, [{(0, 1): 0.5, (2, 3): 0.5}, {(0, 2): 0.5, (1, 3): 0.5}])
    2
    """
    known = [{i} for i in range(n)]
    for count, edges in enumerate(graphs, 1):
        before = [set(k) for k in known]
        for i, j in edges:
            known[i] |= before[j]
            known[j] |= before[i]
        if all(len(k) == n for k in known):
            return count
    return None


def graphs(run: Run) -> Chart | None:
    """Small pictures of the first rounds' graphs, and of all of them together; None where all hear one mean, or nobody anybody."""
    n = run.workers
    found = rounds_of(run)
    first = dict(list(found.items())[:ROUNDS])
    if not 2 <= n <= MOST or not any(first.values()) or run.summary.get("consensus_distance") in (None, 0):
        return None
    same = len({tuple(sorted(edges)) for edges in found.values()}) == 1
    if same:
        first = dict([next(iter(first.items()))])
    colors, regions = colors_of(run)
    present = {t: {r.worker for r in run.rounds if r.round == t} for t in first}
    pictures = [_picture(n, edges, colors, present[t], f"round {t}" if not same else "every round") for t, edges in first.items()]
    if len(first) > 1:
        counts = Counter(pair for edges in first.values() for pair in edges)
        together = {pair: count / len(first) for pair, count in counts.items()}
        pictures.append(_picture(n, together, colors, set(range(n)), f"rounds {min(first)}–{max(first)}"))
    below = legend(regions, round=True) if len(regions) > 1 else ""
    svg = f'<div><div class="graphs">{"".join(pictures)}</div>{below}</div>'
    return Chart("graphs", "Who mixed with whom", _caption(run, found, same, len(regions) > 1), _alt(first), svg, wide=True, flows=True)


def _caption(run: Run, found: Mapping[int, Edges], same: bool, regions: bool) -> str:
    said = ["A line joins two workers that mixed; the thicker, the more weight." + (" Colours are regions." if regions else "")]
    if same:
        said.append("The graph is the same in every round.")
    if run.workers <= NUMBERED:
        said.append("Numbers are workers, in the order of the table of workers.")
    took = heard_by_all(run.workers, list(found.values()))
    if took is not None:
        said.append(f"After {took} round{'s' * (took != 1)} every worker had heard from every other, directly or through others.")
    return " ".join(said)


def _alt(first: Mapping[int, Edges]) -> str:
    told = [f"round {t}: " + (", ".join(f"{i}–{j}" for i, j in sorted(edges)) or "none") for t, edges in first.items()]
    return tidy("Pairs of workers that mixed. " + "; ".join(told) + ".", 1500)


def colors_of(run: Run) -> tuple[list[str], list[tuple[str, str]]]:
    """Each worker's colour, and the regions that they stand for."""
    given = run.summary.get("worker_regions")
    regions = [tidy(r, 24) for r in given] if isinstance(given, list) and len(given) == run.workers else [""] * run.workers
    names = list(dict.fromkeys(regions))
    wheel = (*PALETTE, "#8fb339", "#7a5195", "#d1495b", "#2f8f9d")
    color = {name: wheel[k % len(wheel)] for k, name in enumerate(names)}
    return [color[r] for r in regions], list(color.items())


def place(i: int, n: int, size: float = _SIZE, radius: float = _RADIUS) -> tuple[float, float]:
    """Where worker i of n is, on a circle in a square of that size."""
    angle = 2 * math.pi * i / n - math.pi / 2
    return size / 2 + radius * math.cos(angle), size / 2 + radius * math.sin(angle)


def _picture(n: int, edges: Edges, colors: Sequence[str], present: set[int], title: str) -> str:
    radius = 7.5 if n <= NUMBERED else max(2.2, 100 / n)
    drawn = []
    heavy = max(edges.values(), default=1.0)
    for (i, j), w in sorted(edges.items(), key=lambda item: item[1]):
        (x1, y1), (x2, y2) = place(i, n), place(j, n)
        bend = 0.22  # towards the centre, so that lines between neighbours of neighbours come apart
        cx, cy = ((x1 + x2) / 2 * (1 - bend) + _SIZE / 2 * bend), ((y1 + y2) / 2 * (1 - bend) + _SIZE / 2 * bend)
        color = colors[i] if colors[i] == colors[j] and len(set(colors)) > 1 else "#5b7c99"
        width = (0.6 + 2.6 * w / heavy * min(1.0, 2 * heavy + 0.3)) * (1.0 if n <= NUMBERED else 0.6)
        drawn.append(
            f'<path d="M{x1:.1f} {y1:.1f}Q{cx:.1f} {cy:.1f} {x2:.1f} {y2:.1f}" stroke="{color}" '
            f'stroke-width="{width:.2f}" stroke-opacity="{0.3 + 0.6 * w / heavy:.2f}"/>'
        )
    for i in range(n):
        x, y = place(i, n)
        here = i in present
        fill, line = (colors[i], "#ffffff") if here else ("#ffffff", SOFT)
        dash = "" if here else ' stroke-dasharray="2 1.5"'
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" stroke="{line}" stroke-width="1.2"{dash}/>')
        if n <= NUMBERED:
            text = on(fill) if here else SOFT
            drawn.append(f'<text x="{x:.1f}" y="{y + 2.9:.1f}" fill="{text}" font-size="8.2" text-anchor="middle">{i}</text>')
    label = escape(f"Graph of {title}")
    return (
        f'<span class="graph"><svg role="img" aria-label="{label}" viewBox="0 0 {_SIZE} {_SIZE}" fill="none">{"".join(drawn)}</svg>'
        f"<small>{escape(title)}</small></span>"
    )
