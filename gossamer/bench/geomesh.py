"""`gossamer bench geomesh`: the table of Shin et al. 2026, with its baselines, ablations and what goes past it.

The stages run in the order in which they may depend on each other: DiLoCo is tuned first and sets the target; then all rows are tuned side
by side; then every row runs on the seeds it was not tuned on. What comes out is one result file; docs and figures are made from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.app.config import override, parse
from gossamer.app.grids.cell import Cell
from gossamer.app.job import resolve
from gossamer.bench import geomesh_rows as rows
from gossamer.bench.curve import Curve, at, time_to, tokens_to
from gossamer.bench.record import found_record, row_record
from gossamer.bench.search import Value
from gossamer.bench.study import Row, Study, settings_of
from gossamer.bench.wire import wire_table
from gossamer.core.errors import RunFailed


def bench(study: Study) -> dict[str, Any]:
    """Runs what is missing and returns the content of the result file.

    Raises:
        RunFailed: a row that the others are measured against failed.
    """
    found = study.tune([rows.DILOCO])
    diloco = study.run([study.config(rows.DILOCO, found["diloco"].best, seed) for seed in study.seeds])
    target = statistics.mean(_loss_at_share(cell) for cell in diloco)
    found |= study.tune([row for row in rows.MAIN if row is not rows.DILOCO], target)
    table = (*rows.MAIN, *rows.VARIANTS, *rows.SLOWED)
    by_key = {row.key: row for row in table}
    tuned = {row.key: settings_of(row, by_key, found) for row in table}
    main = _run(study, rows.MAIN, tuned, study.seeds)
    variants = _run(study, rows.VARIANTS, tuned, study.seeds[: rows.VARIANT_SEEDS])
    slowed = _run(study, rows.SLOWED, tuned, study.seeds[: rows.VARIANT_SEEDS])
    second = _second(study, tuned)
    return {
        "study": _facts(study, target),
        "tuning": {key: found_record(f) for key, f in found.items()},
        "floor": _floor(study, main["diloco"], target),
        "rows": {row.key: _row(row, tuned[row.key], main[row.key], target) for row in rows.MAIN},
        "variants": {row.key: _row(row, tuned[row.key], variants[row.key], target) for row in rows.VARIANTS},
        "slowed": {row.key: _row(row, tuned[row.key], slowed[row.key], target) for row in rows.SLOWED},
        "second": second,
        "wire": wire_table(parse(study.base), rows.WIRE_WORKERS),
    }


def budget(study: Study) -> tuple[int, int]:
    """The most runs that the bench makes, and their tokens, said before the first."""
    tuned = sum(bool(row.start) for row in rows.MAIN) * study.trials
    seeds = len(rows.MAIN) * len(study.seeds) + (len(rows.VARIANTS) + len(rows.SLOWED)) * rows.VARIANT_SEEDS
    second = len(rows.SECOND) * rows.VARIANT_SEEDS
    runs = tuned + seeds + second
    return runs, runs * resolve(study.config(rows.DILOCO, rows.DILOCO.start, 0)).method.total_tokens


def _run(study: Study, table: Sequence[Row], tuned: Mapping[str, Mapping[str, Value]], seeds: Sequence[int]) -> dict[str, list[Cell]]:
    """Every row on every seed, in one pool."""
    cells = study.run([study.config(row, tuned[row.key], seed) for row in table for seed in seeds])
    return {row.key: cells[k * len(seeds) : (k + 1) * len(seeds)] for k, row in enumerate(table)}


def _loss_at_share(cell: Cell) -> float:
    curve = Curve.of(cell)
    return at(curve.tokens, curve.loss, rows.SHARE * curve.tokens[-1])


def _second(study: Study, tuned: Mapping[str, Mapping[str, Value]]) -> dict[str, Any]:
    """The headline rows at a second model size, with the settings tuned at the first; its own target, by the same rule."""
    by_key = {row.key: row for row in rows.MAIN}
    seeds = study.seeds[: rows.VARIANT_SEEDS]
    table = [by_key[key] for key in rows.SECOND]
    configs = [override(study.config(row, tuned[row.key], seed), rows.SECOND_SIZE) for row in table for seed in seeds]
    cells = study.run(configs)
    each = {row.key: cells[k * len(seeds) : (k + 1) * len(seeds)] for k, row in enumerate(table)}
    target = statistics.mean(_loss_at_share(cell) for cell in each["diloco"])
    return {"target": target, "rows": {row.key: _row(row, tuned[row.key], each[row.key], target) for row in table}}


def _floor(study: Study, diloco: Sequence[Cell], target: float) -> dict[str, Any]:
    """Perfect balance and no communication, with DiLoCo's learning per token: tokens over the sum of the workers' rates."""
    job = resolve(study.config(rows.DILOCO, rows.DILOCO.start, 0))
    plan = job.method.plan
    rate = sum(plan.batch[i] * plan.sequence / job.fleet.step_s(i, plan.batch[i], plan.sequence, job.flops_per_token) for i in range(job.n))
    tokens = [tokens_to(Curve.of(cell), target) for cell in diloco]
    return {"to_target_s": [None if t is None else t / rate for t in tokens], "total_s": job.method.total_tokens / rate}


def _row(row: Row, tuned: Mapping[str, Value], cells: Sequence[Cell], target: float) -> dict[str, Any]:
    return row_record(row, tuned, cells, lambda cell: _seed(cell, target))


def _seed(cell: Cell, target: float) -> dict[str, Any]:
    s, curve = cell.summary or {}, Curve.of(cell)
    rounds_of_table = rows.ROUNDS
    return {
        "loss": s["final_loss"],
        "to_target_s": time_to(curve, target),
        "tokens_to_target": tokens_to(curve, target),
        "total_s": s["wall_s"],
        "utilisation": s["utilisation"]["mean"],
        "utilisation_workers": s["utilisation"]["workers"],
        "straggler_idle": s["straggler_idle"]["workers"],
        "network_idle": s["network_idle"]["mean"],
        "mb_per_round": statistics.mean(s["bytes_sent"][: s["workers"]]) * s["bytes_charge"] / rounds_of_table / 1e6,
        "exact_zeros": s["exact_zeros"],
        "curve": [curve.tokens, curve.time_s, curve.loss],
    }


def _facts(study: Study, target: float) -> dict[str, Any]:
    job = resolve(study.config(rows.DILOCO, rows.DILOCO.start, 0))
    if target != target:
        raise RunFailed("DiLoCo's loss is not a number, so there is no target: see its cells")
    return {
        "title": f"Losses of a {job.config.model.preset} model (0.14M parameters); clock and bytes charged as {job.charged_as}",
        **study.facts(),
        "target_loss": target,
        "tokens": job.method.total_tokens,
    }
