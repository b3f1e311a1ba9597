"""The plan against what came of it: inner steps, batches, and the seconds and bytes of a round, by worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gossamer.report.planned import Planned
from gossamer.report.read import Run
from gossamer.report.records import Round
from gossamer.report.style import Chart, bytes_unit, time_unit
from gossamer.report.words import DASH, fixed, percent, worker_name, worker_names

MOST = 64
"""Workers shown."""
CLOCKS = {
    "virtual": "Seconds are the virtual clock's. The plan knows neither the noise of steps nor workers that die or slow down.",
    "fleet": "The plan's seconds are those of the fleet as it is described; a run on other machines has its own.",
    "pace": "The plan's seconds are those of the pace that was asked for, inner steps alone.",
}


@dataclass(frozen=True)
class Pair:
    """What was planned, and what was; None: not known."""

    planned: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        """Measured over planned, less 1."""
        return self.measured / self.planned - 1 if self.planned and self.measured is not None else None

    @property
    def larger(self) -> float:
        """Of the two, as far as they are known."""
        return max(self.planned or 0.0, self.measured or 0.0)


@dataclass(frozen=True)
class Line:
    """One worker: means over its rounds."""

    worker: int
    steps: Pair
    batch: Pair
    compute_s: Pair
    idle_s: Pair
    round_s: Pair
    sent: Pair


def lines(run: Run) -> tuple[Line, ...]:
    """A line a worker that has completed a round; () where nothing was planned."""
    planned = run.planned
    if planned is None:
        return ()
    rounds: dict[int, list[Round]] = defaultdict(list)
    for r in run.rounds:
        if r.worker < planned.workers:
            rounds[r.worker].append(r)
    return tuple(_line(run, planned, i, mine) for i, mine in sorted(rounds.items()))


def _line(run: Run, planned: Planned, i: int, mine: Sequence[Round]) -> Line:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def of(values: Sequence[float]) -> float | None:
        return values[i] if values else None

    forecast, steps, tokens = planned.round, sum(r.steps for r in mine), sum(r.tokens for r in mine)
    compute_s = of(forecast.compute_s) if forecast else None
    straggler_s = of(forecast.straggler_idle_s) if forecast else None
    network_s = of(forecast.network_idle_s) if forecast else None
    sent = of(forecast.bytes_sent) if forecast else None
    return Line(
        i,
        Pair(planned.steps[i], steps / len(mine) if steps else None),
        Pair(planned.batch[i], tokens / (steps * planned.sequence) if steps and tokens else None),
        Pair(compute_s, mean([r.seconds["compute"] for r in mine])),
        Pair(
            straggler_s + network_s if straggler_s is not None and network_s is not None else None,
            mean([r.seconds["straggler_idle"] + r.seconds["network_idle"] for r in mine]),
        ),
        Pair(forecast.round_s if forecast else None, mean([r.wall_s for r in mine])),
        Pair(None if sent is None else sent * run.bytes_charge, mean([r.bytes_sent for r in mine]) * run.bytes_charge),
    )


def table(run: Run) -> Chart | None:
    """The chart; None for runs that do not say what was planned."""
    found = lines(run)
    if not found:
        return None
    assert run.planned is not None
    forecast = run.planned.round
    names = worker_names(run)
    scale, unit = time_unit(max(pair.larger for line in found for pair in (line.compute_s, line.round_s)))
    size, volume = bytes_unit(max(line.sent.larger for line in found) or 1.0)
    groups: list[tuple[str, str, float, int]] = [
        ("H<sub>i</sub>", "", 1.0, 1),
        ("B<sub>i</sub>", "", 1.0, 1),
        *((name, unit, scale, 2) for name in ("compute", "idle", "round")),
        ("sent", volume, size, 2),
    ]
    top = "".join(f'<th scope="colgroup" colspan="2" class="num">{n}{f" <small>({u})</small>" if u else ""}</th>' for n, u, _, _ in groups)
    below = '<th scope="col" class="num"><small>plan</small></th><th scope="col" class="num"><small>run</small></th>' * len(groups)
    rows = []
    for line in found[:MOST]:
        cells = []
        for pair, (_, _, by, digits) in zip(
            (line.steps, line.batch, line.compute_s, line.idle_s, line.round_s, line.sent), groups, strict=True
        ):
            cells.append(f'<td class="num soft">{_number(pair.planned, by, digits)}</td>')
            mark = " off" if pair.off is not None and abs(pair.off) > 0.1 else ""
            cells.append(f'<td class="num{mark}">{_number(pair.measured, by, digits)}</td>')
        rows.append(f'<tr><th scope="row">{escape(worker_name(names, line.worker))}</th>{"".join(cells)}</tr>')
    head = f'<tr><th scope="col" rowspan="2">worker</th>{top}</tr><tr>{below}</tr>'
    html = f'<table class="tight pairs"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    alt = _sentence(found)
    caption = f"{alt} Means over the rounds; in bold what is more than a tenth off."
    caption += f" {CLOCKS.get(forecast.clock, '')}" if forecast else " Nothing is known beforehand of a round's time."
    if run.plans:
        caption += " The work was planned anew while the run went: the plan here is the first."
    if len(found) > MOST:
        caption += f" The first {MOST} of {len(found)} workers."
    return Chart("plan", "Plan against reality", caption, alt, html, wide=True, table=True)


def _sentence(found: Sequence[Line]) -> str:
    planned, measured = found[0].round_s.planned, [line.round_s.measured or 0.0 for line in found]
    mean = sum(measured) / len(measured)
    if not planned:
        return f"A round took {_seconds(mean)}."
    off = mean / planned - 1
    how = "as planned" if abs(off) < 0.005 else f"{percent(abs(off))} % {'longer' if off > 0 else 'shorter'} than planned"
    return f"A round was to take {_seconds(planned)} and took {_seconds(mean)}, {how}."


def _seconds(value: float) -> str:
    scale, unit = time_unit(value)
    return f"{fixed(value / scale, 2)} {unit}"


def _number(value: float | None, by: float, digits: int) -> str:
    if value is None:
        return DASH
    value /= by
    return f"{value:.0f}" if digits == 1 and value == int(value) else fixed(value, digits)
