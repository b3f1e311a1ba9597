"""Who waited for whom: a matrix of workers, or the longest waits where there are many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from html import escape

from gossamer.report.read import Run
from gossamer.report.style import Chart, time_unit
from gossamer.report.words import fixed, percent, who, worker_name, worker_names

MOST = 16
"""Workers up to which there is a matrix."""
LISTED = 12
Waits = Mapping[tuple[int, int], tuple[float, float, int]]
"""(who waited, for whom) -> (straggler idle, network idle) in seconds, and rounds."""


def waits(run: Run) -> Waits:
    """All idle time of a round is put down to the worker whose message ended its longest wait."""
    found: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for r in run.rounds:
        if r.waited_for is not None and r.waited_for != r.worker:
            cell = found[r.worker, r.waited_for]
            cell[0] += r.seconds["straggler_idle"]
            cell[1] += r.seconds["network_idle"]
            cell[2] += 1
    return {pair: (cell[0], cell[1], int(cell[2])) for pair, cell in sorted(found.items()) if cell[0] + cell[1] > 0}


def matrix(run: Run) -> Chart | None:
    """The chart; None where nobody waited for anybody."""
    found = waits(run)
    if not found or run.workers < 2:
        return None
    given = worker_names(run)
    names = [worker_name(given, i) for i in range(max(len(given), 1 + max(map(max, found))))]
    total = sum(a + b for a, b, _ in found.values())
    (i, j), (straggler_s, network_s, count) = max(found.items(), key=lambda item: (item[1][0] + item[1][1], item[0]))
    scale, unit = time_unit(straggler_s + network_s)
    why = "its compute" if straggler_s > network_s else "its data"
    alt = (
        f"The longest waits: {who(names[i])} waited {fixed((straggler_s + network_s) / scale, 1)} {unit} for {who(names[j])} in {count} "
        f"rounds, most of it for {why}; {percent((straggler_s + network_s) / total, 0)} % of all waiting."
    )
    many = len(names) > MOST
    html = _list(found, names, scale, unit) if many else _matrix(found, names, scale)
    caption = f"{alt} In {unit} over the run; a round's waiting is put down to the worker whose message ended its longest wait." + (
        "" if many else " A row waits for a column; small: the share of it that was for data, not for compute."
    )
    return Chart("waits", "Who waited for whom", caption, alt, html, table=True)


def _matrix(found: Waits, names: list[str], scale: float) -> str:
    n = len(names)
    most = max(a + b for a, b, _ in found.values())
    heads = "".join(f'<th scope="col" class="num">{escape(name)}</th>' for name in names)
    rows = []
    for i in range(n):
        cells = []
        for j in range(n):
            if (i, j) in found:
                a, b, _ = found[i, j]
                heat = f'class="num heat" style="--heat:{(a + b) / most:.2f}"'
                cells.append(f"<td {heat}>{fixed((a + b) / scale, 1)}<small>{percent(b / (a + b), 0)} %</small></td>")
            else:
                cells.append(f'<td class="num soft">{"" if i == j else "·"}</td>')
        rows.append(f'<tr><th scope="row">{escape(names[i])}</th>{"".join(cells)}</tr>')
    return f'<table class="matrix"><thead><tr><th scope="col">waited for →</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _list(found: Waits, names: list[str], scale: float, unit: str) -> str:
    longest = sorted(found.items(), key=lambda item: -(item[1][0] + item[1][1]))[:LISTED]
    most = longest[0][1][0] + longest[0][1][1]
    rows = "".join(
        f'<tr><th scope="row">{escape(names[i])}</th><td>{escape(names[j])}</td>'
        f'<td class="num heat" style="--heat:{(a + b) / most:.2f}">{fixed((a + b) / scale, 1)}</td>'
        f'<td class="num">{percent(b / (a + b), 0)}</td><td class="num">{count}</td></tr>'
        for (i, j), (a, b, count) in longest
    )
    heads = f'<th scope="col">worker</th><th scope="col">waited for</th><th scope="col" class="num">time <small>({unit})</small></th>'
    heads += '<th scope="col" class="num">for data <small>(%)</small></th><th scope="col" class="num">rounds</th>'
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
