"""What the links between workers gave, against what they could: a map, and a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gossamer.report.graphs import colors_of, place
from gossamer.report.read import Run
from gossamer.report.style import Chart, legend, on
from gossamer.report.words import DASH, fixed, megabytes, percent, who, worker_name, worker_names

MOST = 24
"""Workers up to which there is a map."""
LISTED = 20
SHADES = ((0.25, "#b3452b"), (0.5, "#d9822b"), (0.75, "#8a9a3a"), (math.inf, "#2f8f5b"))
"""Upper end of the share of the nominal rate, and its colour."""
_UNKNOWN = "#5b7c99"


@dataclass(frozen=True)
class Traffic:
    """What came over one link."""

    nbytes: float
    """As charged to the clock."""
    seconds: float
    nominal_mbps: float | None
    """None: not known, or without limit."""
    latency_ms: float | None

    @property
    def mbps(self) -> float:
        """Achieved, over the run."""
        return self.nbytes * 8e-6 / self.seconds

    @property
    def share(self) -> float | None:
        """Achieved over nominal."""
        return self.mbps / self.nominal_mbps if self.nominal_mbps else None


Links = Mapping[tuple[int, int], Traffic]
"""(from, to) -> what came."""


def links_of(run: Run) -> Links:
    """Sums over the rounds of what each worker says came straight from each other one."""
    sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for r in run.rounds:
        for j, (nbytes, seconds) in r.links.items():
            sums[j, r.worker][0] += nbytes * run.bytes_charge
            sums[j, r.worker][1] += seconds
    lines = run.planned.lines if run.planned else None
    found = {}
    for (i, j), (charged, spent_s) in sorted(sums.items()):
        if spent_s <= 0:
            continue
        nominal, latency_ms = lines.nominal(i, j) if lines and max(i, j) < len(lines.site) else (math.inf, None)
        found[i, j] = Traffic(charged, spent_s, nominal if math.isfinite(nominal) else None, latency_ms)
    return found


def links(run: Run) -> Chart | None:
    """Map and table; None where no record tells of links."""
    found = links_of(run)
    if not found or run.workers < 2:
        return None
    given = worker_names(run)
    names = [worker_name(given, i) for i in range(max(len(given), 1 + max(map(max, found))))]
    known = {pair: share for pair, t in found.items() if (share := t.share) is not None}
    if known:
        i, j = min(known, key=lambda pair: (known[pair], pair))
        alt = f"The link that gave least of what it could is from {who(names[i])} to {who(names[j])}: {fixed(found[i, j].mbps, 0)} of "
        alt += f"{fixed(found[i, j].nominal_mbps, 0)} Mbit/s, {percent(known[i, j], 0)} %."
    else:
        i, j = min(found, key=lambda pair: (found[pair].mbps, pair))
        alt = f"The slowest link is from {who(names[i])} to {who(names[j])}: {fixed(found[i, j].mbps, 1)} Mbit/s."
    drawing = _map(run, found, alt) if len(names) <= MOST else ""
    caption = (
        f"{alt} Achieved: bytes of messages that came straight from their sender, over the seconds from the end of its compute until each "
        "was there; so encoding, and queueing behind its other messages, count as well."
    )
    if known:
        caption += " Nominal: the least of uplink, link and downlink as the fleet describes them, for one message alone."
    if run.summary["world"] != "sim" and known:
        caption += " A real run goes over the lines of its machines, whatever the fleet describes."
    html = f'<div class="beside">{drawing}<div class="scroll">{_table(found, names)}</div></div>'
    return Chart("links", "Links: achieved against nominal rate", caption, alt, html, wide=True, flows=True)


def _color(share: float | None) -> str:
    return _UNKNOWN if share is None else next(color for most, color in SHADES if share < most)


def _map(run: Run, found: Links, alt: str) -> str:
    """Workers on a circle, an arrow a link, bent to the right of its direction; the wider, the faster."""
    n = max(run.workers, max(max(pair) for pair in found) + 1)
    size, radius, dot = 340.0, 132.0, 13.0 if n <= 12 else 9.0
    colors = colors_of(run)[0]
    colors = [*colors, *[_UNKNOWN] * (n - len(colors))]
    fastest = max(t.mbps for t in found.values())

    drawn = []
    for (i, j), t in found.items():
        (x1, y1), (x2, y2) = place(i, n, size, radius), place(j, n, size, radius)
        dx, dy = x2 - x1, y2 - y1
        length = math.hypot(dx, dy) or 1.0
        ux, uy = dx / length, dy / length
        cx, cy = (x1 + x2) / 2 - uy * 0.09 * length, (y1 + y2) / 2 + ux * 0.09 * length
        x2, y2 = x2 - ux * (dot + 3) - uy * 3, y2 - uy * (dot + 3) + ux * 3
        x1, y1 = x1 + ux * dot - uy * 3, y1 + uy * dot + ux * 3
        color, width = _color(t.share), 1.2 + 3.0 * t.mbps / fastest
        back = math.atan2(y2 - cy, x2 - cx)
        tips = [(x2 - 8 * math.cos(back + s), y2 - 8 * math.sin(back + s)) for s in (-0.42, 0.42)]
        drawn.append(
            f'<path d="M{x1:.1f} {y1:.1f}Q{cx:.1f} {cy:.1f} {x2:.1f} {y2:.1f}" fill="none" stroke="{color}" '
            f'stroke-width="{width:.1f}" stroke-opacity="0.75"/>'
            f'<path d="M{x2:.1f} {y2:.1f}{"".join(f"L{x:.1f} {y:.1f}" for x, y in tips)}z" fill="{color}"/>'
        )
    for i in range(n):
        x, y = place(i, n, size, radius)
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.0f}" fill="{colors[i]}" class="s-card" stroke-width="2"/>')
        drawn.append(
            f'<text x="{x:.1f}" y="{y + 4:.1f}" fill="{on(colors[i])}" font-size="{11 if n <= 12 else 8.5}" text-anchor="middle">{i}</text>'
        )
    keys = zip(("below 25 %", "to 50 %", "to 75 %", "above 75 % of nominal"), (color for _, color in SHADES), strict=True)
    return (
        f'<div class="map"><svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {size:.0f} {size:.0f}">{"".join(drawn)}</svg>'
        f"{legend(keys)}</div>"
    )


def _table(found: Links, names: Sequence[str]) -> str:
    """The links that gave least of what they could, first."""
    order = sorted(found.items(), key=lambda item: (item[1].share if item[1].share is not None else math.inf, item[1].mbps, item[0]))
    rows = []
    for (i, j), t in order[:LISTED]:
        numbers = (
            fixed(t.mbps, 0 if t.mbps >= 100 else 1),
            fixed(t.nominal_mbps, 0),
            f'<i class="dot" style="background:{_color(t.share)}"></i>{percent(t.share, 0)}',
            DASH if t.latency_ms is None else fixed(t.latency_ms, 1),
            megabytes(t.nbytes),
        )
        cells = "".join(f'<td class="num">{number}</td>' for number in numbers)
        rows.append(f'<tr><th scope="row">{i} {escape(names[i])} → {j} {escape(names[j])}</th>{cells}</tr>')
    heads = "".join(
        f'<th scope="col" class="num">{name}{f" <small>({unit})</small>" if unit else ""}</th>'
        for name, unit in (("achieved", "Mbit/s"), ("nominal", "Mbit/s"), ("share", "%"), ("latency", "ms"), ("came", "MB"))
    )
    more = f"<caption>The {LISTED} of {len(order)} links that gave least of what they could.</caption>" if len(order) > LISTED else ""
    return f'<table class="tight">{more}<thead><tr><th scope="col">link</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
