"""A run as it stands, in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.report.standing import Progress, Standing
from gossamer.report.words import DASH, clock, duration, megabytes, percent, short, tidy

BARS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-=+*%#"
MOST = 24
"""Workers shown."""
_STYLES = {"running": "green", "done": "green", "absent": "red", "starting": "dim", "no record here": "dim"}


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """The values as so many bars at most, the highest as the tallest; neighbours are put together as means.

    >>> sparkline([3.0, 2.0, 1.0], 10), sparkline([1.0, 1.0, 5.0, 5.0], 2), sparkline([2.0], 9)
    ('█▅▁', '▁█', '▁')
    """
    known = [v for v in values if math.isfinite(v)]
    count = min(width, len(known))
    if count < 1:
        return ""
    edges = [round(k * len(known) / count) for k in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((m - low) * scale)] for m in means)


class View:
    """Renders to whatever width there is.

    Args:
        note: a last line.
    """

    def __init__(self, progress: Progress, note: str = "") -> None:
        self._progress, self._note = progress, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        p, width = self._progress, options.max_width
        plain = (options.encoding or "").lower() not in ("utf-8", "utf8")
        parts: list[object] = [self._head(), self._bar(width)]
        if p.stopped:
            parts.append(Text(p.stopped, style="yellow"))
        elif not p.finished and not p.round and not p.losses:
            parts.append(Text("no round is completed yet: its workers are loading, or in their first", style="dim"))
        if p.losses:
            line = Text(f"{p.what} ", style="dim")
            line.append(sparkline(p.losses, max(8, min(60, width - 44)), PLAIN if plain else BARS), style="cyan")
            line.append(f"  {p.losses[0]:.3f} to {p.losses[-1]:.3f}, lowest {min(p.losses):.3f}")
            parts.append(line)
        parts.append(_workers(p.workers, width, plain))
        if len(p.workers) > MOST:
            parts.append(Text(f"... and {len(p.workers) - MOST} more workers", style="dim"))
        if self._note:
            parts.append(Text(self._note, style="dim"))
        yield Group(*parts)  # type: ignore[arg-type]

    def _head(self) -> Text:
        p = self._progress
        state = "finished" if p.finished else "stopped" if p.stopped else "goes on" if p.round else "has begun"
        clock_name = "virtual clock" if p.world == "sim" else "clock"
        return Text.assemble((tidy(p.title, 40), "bold"), f"  {state}, {clock_name} {clock(p.clock_s)}")

    def _bar(self, width: int) -> Table:
        p = self._progress
        said = [f"round {p.round:,}" + (f" of {p.rounds:,}" if p.rounds else "")]
        if p.round_s is not None:
            said.append(f"{duration(p.round_s)} a round")
        if p.tokens_s is not None:
            said.append(f"{short(p.tokens_s)} tokens/s")
        if p.left_s is not None:
            said.append(f"{duration(p.left_s)} left")
        line = Table.grid(padding=(0, 1))
        text = Text(", ".join(said))
        if p.rounds and width >= 70:
            line.add_row(ProgressBar(total=p.rounds, completed=p.round, width=min(30, width // 4)), text)
        else:
            line.add_row(text)
        return line


def _workers(workers: Sequence[Standing], width: int, plain: bool) -> Table:
    wide, narrow = width >= 118, width < 72
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if wide else 0))
    for name, right in (("worker", False), ("round", True), ("loss", True), ("compute", False)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    if wide:
        table.add_column("straggler", justify="right", no_wrap=True)
        table.add_column("network", justify="right", no_wrap=True)
    table.add_column("waits for", no_wrap=True)
    if wide:
        table.add_column("sent MB", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for w in workers[:MOST]:
        used = DASH if w.shares is None else _meter(w.shares[0], 8 if wide else 0 if narrow else 5, plain)
        unknown = not w.round and w.state in ("absent", "no record here")
        cells: list[str | Text] = [
            tidy(w.name, 11) if narrow else w.name,
            DASH if unknown else f"{w.round:,}",
            DASH if w.loss is None else f"{w.loss:.3f}",
            used,
        ]
        if wide:
            cells += [DASH, DASH] if w.shares is None else [f"{percent(s, 0)} %" for s in w.shares[1:]]
        cells.append(DASH if not w.waits_for else tidy(w.waits_for, 11) if narrow else f"{w.waits_for} {percent(w.waited, 0)} %")
        if wide:
            cells.append(DASH if unknown else megabytes(w.sent_bytes))
        cells.append(Text(w.state, style=_STYLES.get(w.state, "yellow")))
        table.add_row(*(Text(c) if isinstance(c, str) else c for c in cells))
    return table


def _meter(share: float, width: int, plain: bool) -> str:
    """A share as a bar and a number.

    >>> _meter(0.5, 4, True)
    '##..  50 %'
    """
    full = round(min(1.0, max(0.0, share)) * width)
    on, off = ("#", ".") if plain else ("█", "░")
    return f"{on * full}{off * (width - full)} {percent(share, 0):>3} %".strip()
