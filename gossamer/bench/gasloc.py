"""`gossamer bench gasloc`: the tables and figures of Cagnasso, Belilovsky and Oyallon 2026, small, and gossip that goes past them.

All methods of the two main tables are tuned side by side; what else is compared takes their values. What comes out is one result file; docs
and figures are made from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from gossamer.app.config import override
from gossamer.app.grids.cell import Cell
from gossamer.app.job import resolve
from gossamer.app.planning.forecast import modelled_s
from gossamer.bench import gasloc_rows as rows
from gossamer.bench.curve import Curve
from gossamer.bench.record import found_record, row_record
from gossamer.bench.search import Found
from gossamer.bench.study import Row, Study, settings_of

ROWS: Mapping[str, Row] = {row.key: row for row in (*rows.T1A, *rows.T1B, *rows.FORMS, *rows.F7, *rows.F3, *rows.OURS)}


def bench(study: Study) -> dict[str, Any]:
    """Runs what is missing and returns the content of the result file."""
    found = study.tune(rows.T1B)
    many = _table(study, found, rows.T1B, study.seeds)
    ours = _table(study, found, rows.OURS, study.seeds[: rows.OURS_SEEDS], rows.wide_area(rows.FLEETS["10"]))
    time = {share: _time(study, found, rows.wide_area(fleet)) for share, fleet in rows.FLEETS.items()}
    found |= study.tune(rows.T1A)
    once = _table(study, found, rows.T1A, study.seeds)
    steps = _steps(study, found)
    found |= study.tune(rows.F7)
    outer = _table(study, found, rows.F7, study.seeds[: rows.F7_SEEDS])
    forms = _table(study, found, rows.FORMS, study.seeds)
    surface = {key: _surface(study, found, ROWS[key]) for key in rows.F8}
    wide = {str(n): _wide(study, found, n) for n in rows.WIDE}
    second = _table(study, found, rows.T1A, study.seeds[:1], rows.SECOND_SIZE)
    return {
        "study": _facts(study),
        "tuning": {key: {"title": ROWS[key].title} | found_record(f) for key, f in found.items()},
        "tables": {"once": once, "many": many, "outer": outer, "forms": forms, "ours": ours, "second": second},
        "wide": wide,
        "time": time,
        "steps": steps,
        "surface": surface,
    }


def budget(study: Study) -> tuple[int, int]:
    """The most runs that the bench makes, and their tokens, said before the first."""
    once = len(rows.T1A) * (study.trials + len(study.seeds) + 1)
    many = (len(rows.T1B) + sum(bool(row.start) for row in rows.F7)) * study.trials
    many += (len(rows.T1B) + len(rows.FORMS)) * len(study.seeds) + len(rows.OURS) * rows.OURS_SEEDS + len(rows.F7) * rows.F7_SEEDS
    many += len(rows.F3) * len(rows.FLEETS) + len(rows.F4) * len(rows.F4_STEPS) + sum(sum(keys.values()) for keys in rows.WIDE.values())
    many += len(rows.F8) * len(rows.F8_OUTER_LR) * len(rows.F8_MOMENTUM)
    tokens = rows.SEQUENCES * int(rows.BASE["plan"]["sequence"])
    return once + many, tokens * (once * rows.ONCE_ROUNDS + many * rows.ROUNDS * rows.STEPS)


def _table(
    study: Study, found: Mapping[str, Found], table: Sequence[Row], seeds: Sequence[int], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Every row on every seed, in one pool; `more`: settings on top of all of them."""
    tuned = {row.key: settings_of(row, ROWS, found) for row in table}
    configs = [override(study.config(row, tuned[row.key], seed), more or {}) for row in table for seed in seeds]
    cells = iter(study.run(configs))
    return {row.key: row_record(row, tuned[row.key], list(islice(cells, len(seeds))), _seed) for row in table}


def _time(study: Study, found: Mapping[str, Found], clock: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of loss against time on one fleet, each with the published model of its round."""
    table = _table(study, found, rows.F3, study.seeds[:1], clock)
    for row in rows.F3:
        config = override(study.config(row, settings_of(row, ROWS, found), study.seeds[0]), clock)
        table[row.key]["model_s"] = modelled_s(resolve(config))
    return table


def _seed(cell: Cell) -> dict[str, Any]:
    """Of a run that ended. Bytes are of the charged model, mean over the workers."""
    s, curve = cell.summary or {}, Curve.of(cell)
    return {
        "loss": s["final_loss"],
        "total_s": s["wall_s"],
        "rounds": s["rounds"],
        "utilisation": s["utilisation"]["mean"],
        "mb_sent": statistics.mean(s["bytes_sent"]) * s["bytes_charge"] / 1e6,
        "curve": [curve.tokens, curve.time_s, curve.loss],
    }


def _wide(study: Study, found: Mapping[str, Found], n: int) -> dict[str, Any]:
    """Rows of the table of 30 steps with n workers, in one pool."""
    shape, tuned = rows.shape(n, rows.STEPS, rows.ROUNDS), {key: settings_of(ROWS[key], ROWS, found) for key in rows.WIDE[n]}
    configs = [override(study.config(ROWS[key], tuned[key], seed), shape) for key, k in rows.WIDE[n].items() for seed in study.seeds[:k]]
    cells = iter(study.run(configs))
    return {key: row_record(ROWS[key], tuned[key], list(islice(cells, k)), _seed) for key, k in rows.WIDE[n].items()}


def _steps(study: Study, found: Mapping[str, Found]) -> dict[str, Any]:
    """Loss by the number of inner steps a round, on one seed."""
    asked = [(key, steps, found[rows.ONCE.get(key, f"{key}_h1") if steps <= 5 else key].best) for key in rows.F4 for steps in rows.F4_STEPS]
    configs = [
        override(study.config(ROWS[key], best, study.seeds[0]), rows.shape(rows.WORKERS, steps, round(rows.ROUNDS * rows.STEPS / steps)))
        for key, steps, best in asked
    ]
    points: dict[str, Any] = {key: [] for key in rows.F4}
    for (key, steps, best), cell in zip(asked, study.run(configs), strict=True):
        points[key].append({"steps": steps, "tuned": dict(best), "cell": cell.hash, "loss": _finite(cell)})
    return points


def _surface(study: Study, found: Mapping[str, Found], row: Row) -> list[dict[str, Any]]:
    """Loss over outer learning rate and momentum, at the tuned inner rate, on the seed that was tuned on."""
    points = [{"method.outer_lr": lr, "method.outer_momentum": m} for lr in rows.F8_OUTER_LR for m in rows.F8_MOMENTUM]
    cells = study.run([study.config(row, {**found[row.key].best, **point}, study.tune_seed) for point in points])
    return [
        {"outer_lr": p["method.outer_lr"], "outer_momentum": p["method.outer_momentum"], "cell": cell.hash, "loss": _finite(cell)}
        for p, cell in zip(points, cells, strict=True)
    ]


def _loss(cell: Cell) -> float:
    """The final loss; infinity where there is none."""
    loss = cell.number("final_loss")
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _finite(cell: Cell) -> float | None:
    loss = _loss(cell)
    return loss if loss < math.inf else None


def _facts(study: Study) -> dict[str, Any]:
    job = resolve(study.config(ROWS["diloco"], ROWS["diloco"].start, 0))
    parameters = sum(part.numel for part in job.layout)
    return {
        "title": f"Losses of a {job.config.model.preset} model ({parameters / 1e6:.2f}M parameters)",
        **study.facts(),
        "tokens": job.method.total_tokens,
    }
