"""Reproductions: a search that is fair and brackets, curves read right, tables that say what they know, rows that can be run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from bench_cells import pretend
from hypothesis import given
from hypothesis import strategies as st

from gossamer.app.job import resolve
from gossamer.bench import geomesh, geomesh_rows, study, tables
from gossamer.bench.curve import Curve, at, time_to, tokens_to
from gossamer.bench.run import run
from gossamer.bench.search import Found, search
from gossamer.bench.study import Row, Study, settings_of
from gossamer.core.errors import BadInput

GRID = {"a": tuple(range(7)), "b": tuple(range(5)), "c": tuple(range(9))}


def walk(loss, start: dict, trials: int) -> tuple[Found, list[dict]]:
    asked_for: list[dict] = []
    going = search(GRID, start, trials)
    asked = next(going)
    while True:
        asked_for += asked
        try:
            asked = going.send([loss(p) for p in asked])
        except StopIteration as end:
            return end.value, asked_for


@given(st.tuples(*(st.integers(0, len(v) - 1) for v in GRID.values())), st.tuples(*(st.integers(0, len(v) - 1) for v in GRID.values())))
def test_a_search_finds_the_bottom_of_a_bowl_and_brackets_it(bottom: tuple[int, ...], start: tuple[int, ...]) -> None:
    found, asked = walk(lambda p: sum((p[k] - x) ** 2 for k, x in zip(GRID, bottom, strict=True)), dict(zip(GRID, start, strict=True)), 99)
    assert tuple(found.best.values()) == bottom and found.loss == 0 and not found.open
    assert set(found.edges) == {k for k, x in zip(GRID, bottom, strict=True) if x in (0, len(GRID[k]) - 1)}
    assert len({tuple(p.values()) for p in asked}) == len(asked) == found.trials  # nothing is tried twice


@given(st.integers(1, 12), st.randoms())
def test_a_search_keeps_to_its_trials_and_returns_the_best_it_saw(trials: int, random) -> None:
    seen: dict[tuple, float] = {}

    def loss(p: dict) -> float:
        return seen.setdefault(tuple(p.values()), random.choice([math.inf, math.nan, random.random()]))

    found, asked = walk(loss, {"a": 3, "b": 2}, trials)
    assert len(asked) == found.trials <= trials
    known = [v for v in seen.values() if math.isfinite(v)]
    assert found.loss == min(known, default=math.inf)
    if found.trials == trials and trials < 5:
        assert found.open


def test_a_search_begins_on_the_grid() -> None:
    with pytest.raises(BadInput, match="a = 99"):
        next(search(GRID, {"a": 99}, 5))
    with pytest.raises(BadInput, match="0 trials"):
        next(search(GRID, {"a": 1}, 0))


def test_a_curve_is_read_between_its_points() -> None:
    curve = Curve((10.0, 20.0, 30.0), (1.0, 2.0, 4.0), (5.0, 4.0, 3.0))
    assert time_to(curve, 3.5) == 3.0 and tokens_to(curve, 4.5) == 15.0
    assert time_to(curve, 5.0) == 1.0 and time_to(curve, 2.9) is None
    assert at(curve.tokens, curve.loss, 15.0) == 4.5
    bumpy = Curve((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), (5.0, 3.0, 4.0, 2.0))
    assert time_to(bumpy, 3.0) == 2.0  # the first time


def row(title: str, *losses: float | None) -> dict:
    seeds = [{"seed": k, "failed": "it diverged"} if v is None else {"seed": k, "loss": v} for k, v in enumerate(losses)]
    return {"title": title, "seeds": seeds}


def test_a_difference_within_its_spread_is_not_called_one() -> None:
    assert tables.verdict(row("a", 3.0, 3.1, 3.2), row("b", 3.1, 3.0, 3.2)).endswith("not distinguishable")
    assert tables.verdict(row("a", 2.0, 2.1, 2.2), row("b", 3.0, 3.1, 3.2)) == "-1.000 ± 0.000"
    assert tables.verdict(row("a", 2.0), row("b", 3.0)) == tables.DASH
    assert "(failed)" in tables.line(row("a", 2.0, None), None)[0] and tables.line(row("a", 2.0, None), None)[3] == tables.DASH


def test_tables_are_filled_in_between_their_marks() -> None:
    found = {"wire": [{"workers": 4, "route": r, "bytes": b, "exchange_s": 1.0} for r, b in (("ring, fp32", 64e6), ("shard, sign", 2e6))]}
    text = "before\n<!-- table: wire -->\nold\n<!-- end -->\nafter\n"
    filled = tables.fill(text, found)
    assert "old" not in filled and filled.startswith("before\n") and filled.endswith("<!-- end -->\nafter\n")
    assert "| 4, shard, sign | 2.00 | 32.00 | 1.00 |" in filled and tables.fill(filled, found) == filled


def a_study(tmp_path: Path) -> Study:
    r = geomesh_rows
    return Study("geomesh", r.BASE, r.GRID, r.TRIALS, r.TUNE_SEED, r.SEEDS, tmp_path / "cells", tmp_path / "work")


def test_every_row_is_a_run_of_the_same_tokens(tmp_path: Path) -> None:
    rows = {r.key: r for r in (*geomesh_rows.MAIN, *geomesh_rows.VARIANTS, *geomesh_rows.SLOWED)}
    assert len(rows) == len(geomesh_rows.MAIN) + len(geomesh_rows.VARIANTS) + len(geomesh_rows.SLOWED)
    found = {key: Found(dict(r.start), 0.0, 1, (), ()) for key, r in rows.items() if r.start}
    tokens = {}
    for key, r in rows.items():
        job = resolve(a_study(tmp_path).config(r, settings_of(r, rows, found), seed=1))
        tokens[key] = job.method.total_tokens
        assert all(k in geomesh_rows.GRID for k in r.start) and job.fleet.name == "azure-4" and "llama-150m" in (job.charged_as or "")
    assert all(abs(t - tokens["diloco"]) <= 0.03 * tokens["diloco"] for t in tokens.values()), tokens
    assert geomesh_rows.TUNE_SEED not in geomesh_rows.SEEDS and set(geomesh_rows.SECOND) <= set(rows)


def test_a_bench_tunes_reports_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "run_cells", pretend)
    monkeypatch.setattr(geomesh, "wire_table", lambda base, workers: [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "geomesh.md"
    page.write_text(
        "# x\n<!-- table: main -->\n<!-- end -->\n<!-- table: tuning -->\n<!-- end -->\n<!-- table: published -->\n<!-- end -->\n"
    )
    run("geomesh", jobs=1, cells=tmp_path / "cells", results=tmp_path / "results", docs=tmp_path / "docs")
    found = json.loads((tmp_path / "results" / "geomesh.json").read_text())
    best = found["tuning"]["diloco"]["best"]
    assert best["inner.lr"] == 2e-3 and best["method.outer_momentum"] == 0.4 and found["tuning"]["diloco"]["trials"] <= geomesh_rows.TRIALS
    assert {s["seed"] for s in found["rows"]["geomesh"]["seeds"]} == set(geomesh_rows.SEEDS)
    share = geomesh_rows.SHARE * 10
    ends = [3.0 + 0.01 * seed for seed in geomesh_rows.SEEDS]
    assert found["study"]["target_loss"] == pytest.approx(sum(8.0 - (8.0 - end) * share / 10 for end in ends) / len(ends))
    assert "DiLoCo at its own best H" in page.read_text() and "floor" in page.read_text()
    figures = sorted(p.name for p in (tmp_path / "docs" / "figures").iterdir())
    assert len(figures) == 4 and all(name.startswith("geomesh-") for name in figures)
    first = {p.name: p.read_bytes() for p in (tmp_path / "docs" / "figures").iterdir()}
    run("geomesh", jobs=1, cells=tmp_path / "cells", results=tmp_path / "results", docs=tmp_path / "docs")
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "docs" / "figures").iterdir()}


def test_an_unknown_bench_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no bench 'geomash'"):
        run("geomash", jobs=1, cells=tmp_path, results=tmp_path, docs=tmp_path)


def test_untuned_rows_take_the_values_of_the_row_they_are_like() -> None:
    rows = {"a": Row("a", "A", start={"x": 1}), "b": Row("b", "B", like="a"), "c": Row("c", "C")}
    found = {"a": Found({"x": 2}, 0.0, 1, (), ())}
    assert [settings_of(rows[k], rows, found) for k in "abc"] == [{"x": 2}, {"x": 2}, {}]
