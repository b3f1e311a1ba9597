"""The index page of a grid: its table, with a link from every row to the files of its cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gossamer.report.words import listed

Links = Sequence[tuple[str, str]]
"""(name, address) each."""
FIRST = ("loss", "±", "against the best")
"""Columns that come right behind the configuration: what one looks for, on a narrow page too."""


def heading(sources: Sequence[str], keys: Sequence[str]) -> str:
    """What a grid is of: its configurations, and the settings that it varies.

    >>> heading(["diloco", "diloco", "gasloc"], ["inner.lr"]), heading(["diloco"], [])
    ('diloco and gasloc by inner.lr', 'diloco')
    """
    return listed(list(dict.fromkeys(sources))) + (f" by {listed(keys)}" if keys else "")


def grid_page(
    heading: str,
    lead: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[tuple[Sequence[str], Links]],
    notes: Sequence[str],
    axes: int,
) -> str:
    """The page as HTML.

    Args:
        lead: what the numbers are.
        columns: (name, unit); the first one is the configuration, `axes` ones are settings that the grid varies, the others numbers.
        rows: (cells, links) each.
    """
    css = (Path(__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
    keys = [name for name, _ in columns[1 : 1 + axes]]
    numbers = range(1 + axes, len(columns))
    order = sorted(numbers, key=lambda i: (FIRST.index(columns[i][0]) if columns[i][0] in FIRST else len(FIRST), i))
    heads = [
        f'<th scope="col" class=num>{escape(name)}{f" <small>({escape(unit)})</small>" if unit else ""}</th>'
        for name, unit in (columns[i] for i in order)
    ]
    body = []
    for cells, links in rows:
        varied = "".join(f"<small>{_whole(key)} = {_whole(value)}</small>" for key, value in zip(keys, cells[1:], strict=False))
        numbered = "".join(f"<td class=num>{escape(cells[i])}</td>" for i in order)
        files = " ".join(f'<a href="{escape(to)}">{escape(name)}</a>' for name, to in links)
        body.append(f'<tr><th scope="row">{_whole(cells[0])}{varied}</th>{numbered}<td class="cells">{files}</td></tr>')
    said = "".join(f'<p class="note">{escape(line)}</p>' for line in notes)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)} · Gossamer</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f'<p class="kicker">Gossamer · Grid</p>\n<h1>{_whole(heading)}</h1>\n<p class="lead">{escape(lead)}</p>\n'
        '<p class="small more">The table goes on to the right: it can be moved sideways.</p>\n'
        f'<div class="scroll grid"><table><thead><tr><th scope="col">{escape(columns[0][0])}</th>{"".join(heads)}'
        f'<th scope="col">files</th></tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div>\n{said}\n'
        '<p class="small">* marks the best of each configuration. Files: the cell of each seed, and the folder of a run that was kept. '
        "The same table is in grid.json.</p>\n</main>\n</body>\n</html>\n"
    )


def _whole(text: str) -> str:
    """A name that is broken, where it is too long, behind a dot, a line or a slash.

    >>> _whole("my_methods.heavy <b>")
    'my_<wbr>methods.<wbr>heavy &lt;b&gt;'
    """
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[._/])(?=.)", text))
