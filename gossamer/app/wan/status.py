"""The tables of `gossamer wan status`. What sites and coordinator have said is shown as text, and as nothing else."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from gossamer.app.progress import duration
from gossamer.wan.roster.messages import printable
from gossamer.wan.roster.records import RunStatus, SiteStatus, Status

_WIDE = 118
"""Columns of a terminal in which there is room for addresses."""
_ROOMY = 96
"""... for two spaces between columns."""


def console() -> Console:
    """For tables: as wide as the terminal; without one, wide."""
    found = Console(emoji=False, highlight=False)
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(emoji=False, highlight=False, width=200)


def status_tables(found: Status, width: int = 200) -> Text:
    """A heading and a table for each run, below one another, in so many columns."""
    if not found.runs:
        return Text("the coordinator knows no run yet")
    return Text("\n\n").join(Text.assemble(_heading(run), "\n", _sites(run, width)) for run in found.runs)


def _heading(run: RunStatus) -> str:
    there = sum(one.standing not in ("out", "finished") for one in run.sites)
    number = run.sessions[0].number if run.sessions else 0
    if (end := run.ended) is not None:
        first = f"run {run.run}: finished after {end.round} rounds, {end.at} UTC; its summary is at site {end.site}"
    else:
        rounds = [f"round {run.newest}"] if run.newest is not None else []
        first = ", ".join(
            [f"run {run.run}: {there} of {max(run.seats, len(run.sites))} sites there", f"session {number}", f"epoch {run.epoch}", *rounds]
        )
    counts = ", ".join(f"{name} {number}" for name, number in sorted(run.counts.items()) if number)
    return "\n".join(printable(line) for line in (first, counts, run.why) if line)


def _sites(run: RunStatus, width: int) -> Text:
    """In so many columns: without addresses where there is no room for them, and names of sites cut to what is left."""
    wide = width >= _WIDE
    gap = 2 if width >= _ROOMY else 1
    names = ["site", "seat", "standing", "address", "round", "lag", "loss", "sent", "received", "last exchange", "lease"]
    rows = [[printable(cell) for cell in _row(one)] for one in run.sites]
    if not wide:
        names[9] = "exchange"
        names, rows = names[:3] + names[4:], [row[:3] + row[4:] for row in rows]
    used = [max(len(row[k]) for row in [names, *rows]) for k in range(len(names))]
    for k in (0, 3) if wide else (0,):
        over = sum(used) + gap * (len(names) - 1) - width
        used[k] = max(min(used[k], 8), used[k] - max(0, over))

    def line(cells: list[str]) -> str:
        cut = [cell if len(cell) <= most else cell[: most - 1] + "~" for cell, most in zip(cells, used, strict=True)]
        left = ("site", "standing", "address")
        fitted = (f"{c:<{n}}" if name in left else f"{c:>{n}}" for c, n, name in zip(cut, used, names, strict=True))
        return (" " * gap).join(fitted).rstrip()

    return Text.assemble((line(names), "bold"), *(f"\n{line(row)}" for row in rows))


def _row(one: SiteStatus) -> tuple[str, ...]:
    r, over = one.report, one.standing == "finished"
    return (
        one.site,
        str(one.seat),
        one.standing,
        one.address or "dials out",
        "-" if r is None else str(r.round),
        "-" if one.lag is None else str(one.lag),
        "-" if r is None or r.loss is None else f"{r.loss:.3f}",
        "-" if r is None else size(r.bytes_sent),
        "-" if r is None else size(r.bytes_received),
        "-" if r is None or r.exchange_s is None or over else f"{_short(r.exchange_s)} ago",
        "-" if one.lease_s is None else _short(one.lease_s),
    )


def _short(seconds: float) -> str:
    """A time in one unit: a live table has no room for two."""
    return " ".join(duration(seconds).split(" ")[:2])


def size(nbytes: float) -> str:
    """In the largest unit of 1000 that leaves at least 1.

    >>> size(999), size(1500), size(2.5e9)
    ('999 B', '1.5 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
