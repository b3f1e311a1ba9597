"""The look of all figures: colours that colour-blind readers tell apart, one colour per method and per kind of time, SVG with real text."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, SOFT, GRID = "#1f2933", "#5a6772", "#e3e7eb"
DARK_TEXT = "#1b222a"
"""On light shapes; dark on a dark page too, where the shapes are light."""
READABLE = 4.5
"""The least contrast of text."""
KIND_COLORS = {
    "compute": "#2a78b5",
    "encode": "#7cc3e8",
    "send": "#0f9d76",
    "decode": "#c583ad",
    "outer": "#3b4550",
    "straggler_idle": "#d9601a",
    "network_idle": "#f3c14b",
}
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b5548f", "#e69f00", "#56b4e9", "#4d4d4d", "#8c6d31")
METHOD_COLORS = {
    "geomesh": 0,
    "diloco": 1,
    "gasloc": 2,
    "noloco": 3,
    "halos": 4,
    "local_dadam": 5,
    "ddp": 6,
    "sparse_loco": 7,
}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
WIDTH_IN, WIDE_IN = 5.1, 11.4
RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#9aa5af",
    "axes.labelcolor": SOFT,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#9aa5af",
    "ytick.color": "#9aa5af",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Chart:
    """A finished figure."""

    name: str
    title: str
    caption: str
    alt: str
    """What the picture shows, in words, for those who cannot see it."""
    svg: str
    wide: bool = False
    flows: bool = False
    """Made of small pictures that find their own places, on a narrow page too."""
    table: bool = False
    """A table: it gets a box that scrolls."""
    data: str = ""
    """JSON for the script of the page, which shows the chart in its own way; without the script `svg` is shown."""


def run_styles(methods: Sequence[object], recipes: Sequence[Hashable]) -> list[tuple[str, Any]]:
    """(colour, dash) per run. A method has its own colour where it is free, so that it looks the same in every report; runs of one recipe,
    which differ by their seed, share a colour and differ by their dashes.

    >>> [c for c, _ in run_styles(["diloco", "geomesh", "mine", "diloco"], [0, 1, 2, 0])]
    ['#d55e00', '#0072b2', '#009e73', '#d55e00']
    """
    slots: dict[Hashable, int] = {}
    keys = [str(m).lower().replace("-", "_") for m in methods]
    for key, recipe in zip(keys, recipes, strict=True):
        want = METHOD_COLORS.get(key)
        if want is not None and want not in slots.values():
            slots.setdefault(recipe, want)
    seen: Counter[Hashable] = Counter()
    out = []
    for recipe in recipes:
        if recipe not in slots:
            slots[recipe] = next(i for i in count() if i not in slots.values())
        slot = slots[recipe]
        out.append((PALETTE[slot % len(PALETTE)], DASHES[(slot // len(PALETTE) + seen[recipe]) % len(DASHES)]))
        seen[recipe] += 1
    return out


def ink(color: str) -> str:
    """The colour, darkened where text in it would be hard to read on white.

    >>> ink("#0072b2"), ink("#e69f00") < "#e69f00"
    ('#0072b2', True)
    """
    rgb = channels(color)
    while 1.05 / (luminance(rgb) + 0.05) < READABLE:
        rgb = [0.96 * c for c in rgb]
    return as_color(rgb)


def on(fill: str) -> str:
    """The colour of text on a filled shape: white, where that can be read."""
    return "#ffffff" if ink(fill) == fill else DARK_TEXT


def channels(color: str) -> list[float]:
    """Red, green and blue of a colour such as "#0072b2", each from 0 to 1."""
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def as_color(rgb: Iterable[float]) -> str:
    """As `channels` reads it."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def luminance(rgb: Iterable[float]) -> float:
    """Relative luminance, 0 to 1, as the Web Content Accessibility Guidelines have it; the contrast of two is that of l + 0.05."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@contextmanager
def canvas(width_in: float, height_in: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one pair of axes in the report's style."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an inline <svg> without external references; `name` keeps its internal ids apart from those of other figures."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**RC, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m.group(0) if m.group(1) in used else "", text)
    label = alt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).strip()


def time_unit(longest_s: float) -> tuple[float, str]:
    """What to divide seconds by, and the unit's name, so that an axis shows few digits."""
    for size, name in ((2 * 86400.0, "days"), (2 * 3600.0, "h"), (120.0, "min")):
        if longest_s >= size:
            return {"days": 86400.0, "h": 3600.0, "min": 60.0}[name], name
    return (1.0, "s") if longest_s >= 1 else (1e-3, "ms")


def count_unit(largest: float) -> tuple[float, str]:
    """The same for tokens."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if largest >= size:
            return size, name
    return 1.0, ""


def bytes_unit(largest: float) -> tuple[float, str]:
    """The same for bytes."""
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "bytes"


def in_unit(value: float) -> str:
    """A number of the unit that an axis has, for a label beside it.

    >>> in_unit(12345.6), in_unit(81.84), in_unit(2.218), in_unit(0.0214), in_unit(0)
    ('12,346', '81.8', '2.22', '0.021', '0')
    """
    if 0 < value < 0.001:
        return f"{value:.1g}"
    return f"{value:,.{0 if value >= 100 or not value else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def plain_ticks(axes: Axes, x: int | None = 6, y: int | None = 5, whole_x: bool = False) -> None:
    """Few ticks with plain numbers: no offsets, no powers."""

    def number(value: float, _position: object = None) -> str:
        return f"{value:,.10g}"

    if x:
        axes.xaxis.set_major_locator(MaxNLocator(x, integer=whole_x, steps=[1, 2, 2.5, 5, 10] if not whole_x else [1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(number))
    if y:
        axes.yaxis.set_major_locator(MaxNLocator(y, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(number))


def thin(points: Sequence[tuple[float, float]], most: int = 500) -> list[tuple[float, float]]:
    """At most about `most` points, first and last kept: a page stays small however long the run.

    >>> thin([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], 3)
    [(0, 1), (2, 3), (4, 5)]
    """
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(i * step)] for i in range(most)]


def spread(wanted: Sequence[float], gap: float, low: float = -math.inf) -> list[float]:
    """Moves label heights apart until neighbours are `gap` from each other, keeping their order and their centre of mass.

    >>> spread([1.0, 1.0, 5.0], 1.0)
    [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, int]] = []
    for i in order:
        centre, size = wanted[i], 1
        while groups and centre - (size - 1) * gap / 2 < groups[-1][0] + (groups[-1][1] - 1) * gap / 2 + gap:
            other, n = groups.pop()
            centre, size = (centre * size + other * n) / (size + n), size + n
        centre = max(centre, low + (size - 1) * gap / 2)
        groups.append((centre, size))
    flat = [centre + (k - (size - 1) / 2) * gap for centre, size in groups for k in range(size)]
    out = [0.0] * len(wanted)
    for place, i in enumerate(order):
        out[i] = flat[place]
    return out


def label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, str]], size: float = 9.5) -> None:
    """Writes each line's name to the right of the frame, near the height of its end, with a hair line from the end to the name.

    `ends`: (x, y, text, colour) in data coordinates; call when the limits are final.
    """
    low, high = axes.get_ylim()
    height_pt = figure.get_size_inches()[1] * 72 * 0.72
    gap = (size + 3.0) / height_pt
    place = math.log if axes.get_yscale() == "log" else float
    heights = [(place(min(max(y, low), high)) - place(low)) / (place(high) - place(low)) for _, y, _, _ in ends]
    for (x, y, text, color), at in zip(ends, spread(heights, gap, low=0.0), strict=True):
        axes.annotate(
            text,
            xy=(x, min(max(y, low), high)),
            xytext=(1.025, at),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=size,
            color=ink(color),
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def swatches(figure: Figure, items: Sequence[tuple[str, str]]) -> None:
    """A legend of (name, colour) above the axes, read row by row."""
    handles = [Patch(facecolor=color, label=name) for name, color in items]
    columns = min(len(handles), 4) if figure.get_size_inches()[0] < 8 else len(handles)
    figure.legend(
        handles=[handles[i] for column in range(columns) for i in range(column, len(handles), columns)],  # a legend fills columns first
        loc="outside upper left",
        ncols=columns,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.2,
        handletextpad=0.5,
        borderpad=0.2,
    )


def legend(items: Iterable[tuple[str, str]], round: bool = False) -> str:
    """Names with their colours, as a line of HTML. `round`: dots, not squares."""
    kind = "dot" if round else "dot sq"
    keys = "".join(f'<span><i class="{kind}" style="background:{color}"></i>{escape(name)}</span>' for name, color in items)
    return f'<p class="regions">{keys}</p>'
