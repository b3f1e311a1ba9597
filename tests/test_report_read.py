"""Run folders: what is read, and what is said when something is missing or damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report_folders import make_run, read_lines, write_lines

from gossamer.core.errors import BadInput
from gossamer.report.figures import of_run
from gossamer.report.page import render
from gossamer.report.read import Run
from gossamer.report.records import KINDS
from gossamer.report.spent import bytes_by_run, seconds
from gossamer.report.table import comparison
from gossamer.report.words import caution, charged, comparison_sentence, labels, sentence, worker_names


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", gossip=True, rounds=5)
    run = Run.load(folder)
    lines = read_lines(folder / "metrics.jsonl")
    assert len(run.rounds) + len(run.evaluations) == len(lines)
    assert len(run.spans) == len(read_lines(folder / "trace.jsonl"))
    assert sum(r.wall_s for r in run.rounds) == pytest.approx(sum(e["wall_s"] for e in lines if e["kind"] == "round"))
    assert {e.worker for e in run.evaluations} == {None, 0, 1, 2, 3}
    assert all(math.isclose(sum(r.seconds[k] for k in KINDS), r.wall_s) for r in run.rounds)
    assert run.torn == ()


def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=3)
    whole = Run.load(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "rou')
    torn = Run.load(str(folder))
    assert torn.rounds == whole.rounds
    assert torn.torn == ("metrics.jsonl",)


def test_damage_elsewhere_is_an_error_with_its_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=3)
    lines = (folder / "trace.jsonl").read_text().splitlines()
    lines[4] = lines[4][:9]
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(BadInput, match=r"trace\.jsonl' line 5 of "):
        Run.load(folder)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "trace.jsonl", "summary.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "a", rounds=1)
    (folder / name).unlink()
    with pytest.raises(BadInput, match=f"lacks {name}"):
        Run.load(folder)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        Run.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="is not a run folder"):
        Run.load(tmp_path)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("config.toml", "a = ", "not valid TOML"),
        ("summary.json", "{", "not valid JSON"),
        ("summary.json", "[1]", "holds a list"),
        ("summary.json", '{"method": "ddp"}', "lacks world, workers"),
        ("plan.json", '{"round": {}}', r"plan\.json' is damaged \(it has no 'workers'\): remove it"),
        ("metrics.jsonl", '{"kind": "eval", "round": 1, "worker": 0, "tokens": 5, "time_s": 1}\n', "line 1 lacks 'loss'"),
        ("metrics.jsonl", '{"kind": "eval", "round": "x", "worker": 0, "tokens": 5, "time_s": 1, "loss": 2}\n', "expected a number"),
    ],
)
def test_damaged_files_are_explained(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = make_run(tmp_path / "a", rounds=1)
    (folder / name).write_text(text)
    with pytest.raises(BadInput, match=said):
        Run.load(folder)


def test_a_summary_of_other_workers_than_it_has_numbers_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="workers is 3, and bytes_sent has 4 numbers"):
        Run.load(make_run(tmp_path / "a", rounds=1, change={"workers": 3}))


def test_a_loss_that_is_not_finite_is_no_number(tmp_path: Path) -> None:
    run = Run.load(make_run(tmp_path / "a", rounds=1, change={"final_loss": math.nan, "final_perplexity": None}))
    assert run.number("final_loss") is None
    assert run.number("final_perplexity") is None
    assert sentence(run).startswith("GeoMesh on azure-4: 1 round")


def test_the_sentence_says_the_summary(tmp_path: Path) -> None:
    shares = {
        "utilisation": {"mean": 0.881, "workers": [0.9, 0.87, 0.87, 0.884]},
        "straggler_idle": {"mean": 0.01, "workers": [0.021, 0.0, 0.01, 0.0]},
    }
    run = Run.load(make_run(tmp_path / "a", change={**shares, "final_perplexity": 23.4, "time_to_target_s": None}))
    text = sentence(run)
    assert text.startswith("GeoMesh on azure-4: perplexity 23.4 after 20 rounds")
    assert "workers computed 88 % of the time" in text
    assert "the H100 waited most for slower workers, 2.1 %" in text
    assert "the target of 30 was not reached" in text


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    runs = [Run.load(make_run(tmp_path / f"s{seed}", seed=seed, rounds=1)) for seed in range(2)]
    assert labels(runs) == ["GeoMesh, seed 0", "GeoMesh, seed 1"]
    other = Run.load(make_run(tmp_path / "wide", rounds=1, config={"plan": {"steps": 60}}))
    assert labels([runs[0], other]) == ["GeoMesh (s0)", "GeoMesh (wide)"]
    named = Run.load(make_run(tmp_path / "n", rounds=1, config={"name": "H = 60"}))
    assert labels([runs[0], named]) == ["GeoMesh", "H = 60"]
    assert len(set(labels([runs[0], runs[0]]))) == 2


def test_a_run_with_a_name_of_its_own_names_its_method_too(tmp_path: Path) -> None:
    run = Run.load(make_run(tmp_path / "n", "diloco", rounds=1, config={"name": "H = 60"}))
    assert sentence(run).startswith("H = 60 (DiLoCo) on azure-4: ")
    assert comparison([run])[0].method == "H = 60 (DiLoCo)" and "<h1>H = 60 (DiLoCo) on azure-4</h1>" in render([run])
    said = Run.load(make_run(tmp_path / "s", "local_sgd", rounds=1, config={"name": "local-sgd slow"}))
    assert comparison([said])[0].method == "local-sgd slow", "it does already"


def test_a_site_is_called_a_worker_in_prose(tmp_path: Path) -> None:
    idle = {"straggler_idle": {"mean": 0.01, "workers": [0.0, 0.5]}}
    run = Run.load(make_run(tmp_path / "a", workers=2, rounds=1, change={"worker_names": ["slow", "fast-6"], **idle}))
    assert "worker fast-6 waited most for slower workers, 50.0 %" in sentence(run)


def test_bars_of_bytes_are_labelled_in_the_unit_of_their_axis(tmp_path: Path) -> None:
    sent = {"geomesh": 20_000_000, "ddp": 3_000_000_000}
    runs = [Run.load(make_run(tmp_path / name, name, rounds=1, change={"bytes_sent": [n] * 4})) for name, n in sent.items()]
    chart = bytes_by_run(runs)
    assert chart and chart.alt == "Sent per worker: GeoMesh 0.020 GB; DDP 3.00 GB."
    assert "3.00 GB" in chart.svg and "0.020 GB" in chart.svg and " MB" not in chart.svg


def test_of_a_grid_the_page_that_is_there_is_named(tmp_path: Path) -> None:
    for name in ("grid.json", "index.html"):
        (tmp_path / name).touch()
    with pytest.raises(BadInput, match=r"the folder of a grid, not of a run: its table is a page that is there already, .*/index\.html"):
        Run.load(tmp_path)


def test_workers_are_named_or_numbered(tmp_path: Path) -> None:
    run = Run.load(make_run(tmp_path / "a", rounds=1, workers=3))
    assert worker_names(run) == ("A100 #0", "A100 #1", "A100 #2")
    bare = Run.load(make_run(tmp_path / "b", rounds=1, change={"worker_names": None}))
    assert worker_names(bare) == ("worker 0", "worker 1", "worker 2", "worker 3")


def test_the_honest_note_depends_on_rounds_and_seeds(tmp_path: Path) -> None:
    long = [Run.load(make_run(tmp_path / f"{seed}", seed=seed, rounds=40, workers=1, evals=False)) for seed in range(2)]
    short = Run.load(make_run(tmp_path / "short", rounds=39, workers=1, evals=False))
    assert caution(long) == ""
    assert "single seed" in caution(long[:1])
    assert "short" not in caution(long[:1])
    assert "short (39 rounds)" in caution([short])
    assert "unlike numbers of tokens" in caution([*long, short])


def test_a_borrowed_clock_is_told(tmp_path: Path) -> None:
    plain = Run.load(make_run(tmp_path / "a", rounds=1))
    big = Run.load(make_run(tmp_path / "b", "diloco", rounds=1, charged_as="llama-1b"))
    assert charged([plain]) == ""
    assert charged([big]) == "clock and bytes charged as llama-1b, loss from the small model that was trained"
    assert charged([plain, big]).endswith("(not for GeoMesh)")


def test_the_comparison_names_winner_and_losers(tmp_path: Path) -> None:
    runs = []
    for method, perplexity, reached_s in (("geomesh", 20.0, 100.0), ("diloco", 25.0, 250.0)):
        change = {"final_perplexity": perplexity, "time_to_target_s": reached_s}
        runs.append(Run.load(make_run(tmp_path / method, method, rounds=2, change=change)))
    text = comparison_sentence(runs)
    assert "lowest final perplexity is 20.0 (GeoMesh), the highest 25.0 (DiLoCo)" in text
    assert "GeoMesh came first to perplexity 30, after 1 min 40 s (DiLoCo: 2.5 times that)" in text


def test_a_line_of_another_kind_is_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=2)
    before = Run.load(folder)
    write_lines(folder / "metrics.jsonl", [*read_lines(folder / "metrics.jsonl"), {"kind": "inner", "worker": 0, "step": 3}])
    assert Run.load(folder).rounds == before.rounds


def test_closing_counts_as_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=2)
    before = seconds(Run.load(folder))
    write_lines(folder / "metrics.jsonl", [*read_lines(folder / "metrics.jsonl"), {"kind": "close", "worker": 1, "network_idle_s": 2.5}])
    after = seconds(Run.load(folder))
    assert after[1]["network_idle"] == pytest.approx(before[1]["network_idle"] + 2.5)
    assert after[0] == before[0]


def test_a_run_of_the_clock_alone_has_no_loss(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=2, evals=False, change={"final_loss": None, "final_perplexity": None})
    events = [{**e, "loss": None, "tokens": None} for e in read_lines(folder / "metrics.jsonl")]
    write_lines(folder / "metrics.jsonl", events)
    names = {chart.name for chart in of_run(Run.load(folder))}
    assert "time-spent" in names
    assert not names & {"loss-tokens", "loss-time", "training-loss"}
