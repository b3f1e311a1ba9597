"""Colours of pictures on a dark page: each colour of a chart becomes a variable, which the dark page sets to one that can be read there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gossamer.report.style import DARK_TEXT, GRID, INK, READABLE, SOFT, as_color, channels, luminance

CARD = "#1b222a"
"""What charts lie on."""
_FIXED = {INK: "#e6ebf0", SOFT: "#a3afba", GRID: "#303a44", "#9aa5af": "#66727d", "#ffffff": CARD, DARK_TEXT: CARD, "#b4bcc4": "#5c6873"}
_COLOR = re.compile(r"((?:fill|stroke|background|background-color)\s*[:=]\s*\"?\s*)(#[0-9a-f]{6})\b")


def themed(html: str) -> str:
    """The chart with variables in place of its colours; where nobody sets them they are what they were.

    >>> themed('<path style="fill: #0072b2"/>')
    '<path style="fill: var(--c0072b2,#0072b2)"/>'
    """
    return _COLOR.sub(lambda m: f"{m[1]}var(--c{m[2][1:]},{m[2]})", html)


def variables(pages: Iterable[str]) -> str:
    """CSS that sets the variables of these charts for a dark page."""
    found = sorted({color for page in pages for color in re.findall(r"var\(--c([0-9a-f]{6}),", page)})
    return " ".join(f"--c{color}: {on_dark('#' + color)};" for color in found)


def on_dark(color: str) -> str:
    """The colour, made lighter until it stands out from a dark card.

    >>> on_dark("#f3c14b"), on_dark("#0072b2") != "#0072b2"
    ('#f3c14b', True)
    """
    if color in _FIXED:
        return _FIXED[color]
    rgb, card = channels(color), luminance(channels(CARD))
    while (luminance(rgb) + 0.05) / (card + 0.05) < READABLE:
        rgb = [c + 0.05 * (1 - c) for c in rgb]
    return as_color(rgb)
