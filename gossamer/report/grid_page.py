"""The index page of a grid: its table, with a link from every row to the files of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

Links = Sequence[tuple[str, str]]
"""(name, address) each."""


def grid_page(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[tuple[Sequence[str], Links]], notes: Sequence[str]) -> str:
    """The page as HTML; columns as (name, unit), the first one words and the others numbers; a row as (cells, links)."""
    css = (Path(__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
    heads = [
        f'<th scope="col"{" class=num" if i else ""}>{escape(name)}{f" <small>({escape(unit)})</small>" if unit else ""}</th>'
        for i, (name, unit) in enumerate(columns)
    ]
    body = []
    for cells, links in rows:
        rest = "".join(f"<td class=num>{escape(c)}</td>" for c in cells[1:])
        files = " ".join(f'<a href="{escape(to)}">{escape(name)}</a>' for name, to in links)
        body.append(f'<tr><th scope="row">{escape(cells[0])}</th><td>{files}</td>{rest}</tr>')
    said = "".join(f'<p class="note">{escape(line)}</p>' for line in notes)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Grid · Gossamer</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f'<p class="kicker">Gossamer · Grid</p>\n<h1>Results</h1>\n<p class="lead">{escape(title)}</p>\n'
        f'<div class="scroll"><table><thead><tr>{heads[0]}<th scope="col">files</th>{"".join(heads[1:])}</tr></thead>\n'
        f"<tbody>{chr(10).join(body)}</tbody></table></div>\n{said}\n"
        '<p class="small">* marks the best of each configuration. Files: the cell of each seed, and the folder of a run that was kept. '
        "The same table is in grid.json.</p>\n</main>\n</body>\n</html>\n"
    )
