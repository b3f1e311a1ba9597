"""The zero-shot bench: it trains, keeps and asks its models once, and its table calls a difference one only where it is."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zeroshot_toys import chains, write_items

from gossamer.app.zeroshot import harness
from gossamer.bench import geomesh_rows, zeroshot, zeroshot_rows, zeroshot_tables
from gossamer.bench.run import BENCHES, run
from gossamer.bench.study import Study
from gossamer.core.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent


def test_rows_have_the_values_that_the_geomesh_bench_tuned() -> None:
    tuned = json.loads((ROOT / "bench" / "results" / "geomesh.json").read_text())["rows"]
    assert {key: tuned[key]["tuned"] for key in zeroshot_rows.TUNED} == zeroshot_rows.TUNED
    assert [row.key for row in zeroshot_rows.ROWS] == ["diloco", "halos", "geomesh", "adamw"]
    assert zeroshot_rows.BASE == geomesh_rows.BASE


def test_a_tiny_bench_from_training_to_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base = {
        **zeroshot_rows.BASE,
        "plan": {"name": "uniform", "steps": 2, "batch": 2, "sequence": 48},
        "model": {
            "config": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        },
        "data": {"source": str(chains(tmp_path / "text")), "tokenizer": "bytes"},
        "eval": {"every": 0, "sequences": 2},
        "fleet": {"name": "uniform", "workers": 2},
        "run": {"rounds": 1, "device": "cpu"},
    }
    small = dataclasses.replace(BENCHES["zeroshot"], study=partial(Study, "zeroshot", base, {}, 0, 0, (1,)))
    monkeypatch.setitem(BENCHES, "zeroshot", small)
    monkeypatch.setattr(zeroshot_rows, "ROWS", zeroshot_rows.ROWS[:2])
    monkeypatch.setattr(zeroshot_rows, "ITEMS", 24)
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "evaluation.md").write_text("<!-- table: zeroshot -->\n<!-- end -->\n")
    data = write_items(tmp_path / "data", ["arc_easy"])

    def bench() -> dict[str, Any]:
        run("zeroshot", jobs=1, cells=None, results=tmp_path / "results", docs=docs, data=data)
        return json.loads((tmp_path / "results" / "zeroshot.json").read_text())

    found = bench()
    assert list(found["rows"]) == ["diloco", "halos"] and list(found["tasks"]) == ["word_order", "cloze", "arc_easy"]
    assert {t["items"] for t in found["tasks"].values()} == {24, 4}
    assert len(found["rows"]["halos"]["seeds"][0]["tasks"]["cloze"]["correct"]) == 24
    page = (docs / "evaluation.md").read_text()
    assert "| DiLoCo |" in page and "37.39" in page and "not distinguishable" in page  # so little training is at chance
    capsys.readouterr()
    monkeypatch.setattr(harness, "score", lambda *_, **__: pytest.fail("asked again"))
    assert bench() == found and "2 cached" in capsys.readouterr().out


def test_a_bench_takes_what_it_has_a_use_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--cells: zeroshot keeps its runs with their parameters, .* in runs/bench/zeroshot"):
        run("zeroshot", jobs=1, cells=tmp_path, results=tmp_path, docs=tmp_path)
    with pytest.raises(BadInput, match="--data is for a bench that evaluates models"):
        run("geomesh", jobs=1, cells=tmp_path, results=tmp_path, docs=tmp_path, data=tmp_path)


def row(title: str, *seeds: str) -> dict[str, Any]:
    return {"title": title, "seeds": [{"seed": k, "loss": 3.0, "tasks": {"cloze": {"correct": said}}} for k, said in enumerate(seeds)]}


TASKS = {"cloze": {"title": "cloze", "chance": 0.25}}


def test_a_difference_is_judged_item_by_item() -> None:
    """The same accuracies, 60 against 50 %: it is a difference where the better row has the answers of the other and more, and is not where
    the two have nothing to do with each other."""
    low = "1" * 50 + "0" * 50
    more, other = "1" * 60 + "0" * 40, "0" * 40 + "1" * 60
    assert zeroshot_tables.verdict(row("a", more, more), row("b", low, low), TASKS) == "+10.0 ± 3.0"
    assert zeroshot_tables.verdict(row("a", other, other), row("b", low, low), TASKS).endswith(", not distinguishable")


def test_where_both_guess_no_difference_is_called_one() -> None:
    guess, less = "1000" * 25, "1000" * 21 + "0" * 16
    assert "both at chance: not distinguishable" in zeroshot_tables.verdict(row("a", guess, guess), row("b", less, less), TASKS)


def test_the_spread_over_seeds_counts() -> None:
    apart = [np.array([[1.0] * 60 + [0.0] * 40, [1.0] * 40 + [0.0] * 60])]
    alike = [np.array([[1.0] * 50 + [0.0] * 50] * 2)]
    assert zeroshot.spread(apart)[0] == zeroshot.spread(alike)[0] == 0.5
    assert zeroshot.spread(apart)[1] > 0.1 > zeroshot.spread(alike)[1]


def test_a_row_that_failed_is_a_row() -> None:
    gone = {"title": "HALoS", "seeds": [{"seed": 1, "failed": "it diverged"}]}
    text = zeroshot_tables.accuracy_table({"tasks": TASKS, "rows": {"diloco": row("DiLoCo", "1100", "1000"), "halos": gone}})
    assert "| HALoS (failed) |" in text and "| a guess | 25.0 |" in text
