"""The bench of gossip: rows that can be run on equal terms, results, tables and figures from runs that were not made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cells import pretend

from gossamer.app.config import override
from gossamer.app.job import resolve
from gossamer.bench import gasloc, study
from gossamer.bench import gasloc_rows as rows
from gossamer.bench.gasloc_tables import TABLES
from gossamer.bench.run import BENCHES, run
from gossamer.bench.search import Found
from gossamer.bench.study import Study, settings_of


def a_study(tmp_path: Path) -> Study:
    return Study("gasloc", rows.BASE, rows.GRID, rows.TRIALS, rows.TUNE_SEED, rows.SEEDS, tmp_path / "cells", tmp_path / "work")


def start() -> dict[str, Found]:
    return {key: Found(dict(r.start), 0.0, 1, (), ()) for key, r in gasloc.ROWS.items() if r.start}


def test_every_row_has_a_name_and_a_start_on_the_grid() -> None:
    tables = (*rows.T1A, *rows.T1B, *rows.FORMS, *rows.F7, *rows.F3, *rows.OURS)
    assert len(gasloc.ROWS) == len(tables)
    for row in tables:
        assert bool(row.start) != bool(row.like)
        for key, value in row.start.items():
            assert value in rows.GRID[key][1:-1]
    assert rows.TUNE_SEED not in rows.SEEDS
    named = {*(key for keys in rows.WIDE.values() for key in keys), *rows.F4, *rows.F8, *(r.like for r in tables if r.like)}
    assert named <= {r.key for r in (*rows.T1B, *rows.F7)}


@pytest.mark.parametrize("n", [8, 16, 32])
def test_rows_of_a_table_are_runs_of_the_same_tokens_and_one_global_batch(tmp_path: Path, n: int) -> None:
    keys = [r.key for r in rows.T1B] if n == 8 else rows.WIDE[n]
    shape = rows.shape(n, rows.STEPS, rows.ROUNDS)
    configs = [override(a_study(tmp_path).config(gasloc.ROWS[key], gasloc.ROWS[key].start, 1), shape) for key in keys]
    methods = [resolve(config).method for config in configs]
    assert {m.total_tokens for m in methods} == {rows.ROUNDS * rows.STEPS * rows.SEQUENCES * 32}
    assert {(m.n, sum(m.plan.batch)) for m in methods} == {(n, rows.SEQUENCES)}


def test_rows_with_one_step_a_round_are_runs_of_the_same_tokens(tmp_path: Path) -> None:
    methods = [resolve(a_study(tmp_path).config(r, r.start, 1)).method for r in rows.T1A]
    assert {(m.rounds, m.plan.steps) for m in methods} == {(rows.ONCE_ROUNDS, (1,) * rows.WORKERS)}


@pytest.mark.parametrize("share", list(rows.FLEETS))
def test_rows_under_a_slow_line_are_charged_alike_and_compensate(tmp_path: Path, share: str) -> None:
    for row in (*rows.F3, *rows.OURS):
        config = override(a_study(tmp_path).config(row, settings_of(row, gasloc.ROWS, start()), 1), rows.wide_area(rows.FLEETS[share]))
        job = resolve(config)
        whole = rows.ROUNDS * rows.STEPS * rows.SEQUENCES * 32
        assert abs(job.method.total_tokens - whole) < 0.01 * whole and "llama-134m" in (job.charged_as or "")
        steps = job.method.plan.steps
        slow = next(i for i in range(job.n) if job.fleet.site(i).up_mbps < 1000)
        assert (steps[slow] <= min(steps)) if config.plan.name == "awb" else len(set(steps)) == 1


def test_the_bench_tunes_reports_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "run_cells", pretend)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "gasloc.md"
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES))
    run("gasloc", jobs=1, cells=tmp_path / "cells", results=tmp_path / "results", docs=tmp_path / "docs")
    found = json.loads((tmp_path / "results" / "gasloc.json").read_text())
    for key, f in found["tuning"].items():
        assert f["best"]["inner.lr"] == 2e-3 and f["trials"] <= rows.TRIALS, key
    assert {s["seed"] for s in found["tables"]["many"]["diloco"]["seeds"]} == set(rows.SEEDS)
    assert set(found["wide"]) == {"16", "32"} and {p["steps"] for p in found["steps"]["diloco"]} == set(rows.F4_STEPS)
    assert all(page.read_text().count(f"table: {name} -->\n| ") == 1 for name in TABLES)
    drawn = {p.name for p in (tmp_path / "docs" / "figures").iterdir()}
    assert drawn == {f"gasloc-{name}.svg" for name in BENCHES["gasloc"].figures}
