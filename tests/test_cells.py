"""Cells and grids: what a hash depends on, that a cell is run once, and what the table says."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import corpus, settings

from gossamer.app import simulate as world
from gossamer.app.config import Config, _leaves, dump, load, override
from gossamer.app.grids import grid, pool
from gossamer.app.grids.cell import Cell, _content, cell_hash, non_default, read_cell
from gossamer.app.grids.cells import run_cells
from gossamer.app.grids.grid import Axis, Row, as_json, as_lines, axis, notes, rows_of, shard_of
from gossamer.app.job import resolve
from gossamer.cli import main
from gossamer.core.errors import BadInput, RunFailed, Stopped

pytestmark = pytest.mark.usefixtures("cache")


def small(text: Path, **more: object) -> list[str]:
    base: dict[str, object] = {"method__name": '"diloco"', "fleet__name": '"uniform-2"', "run__rounds": 2, "plan__steps": 1}
    return settings(text, **(base | more))


def hash_of(sets: Sequence[str]) -> str:
    return cell_hash(resolve(load([], sets)))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations that have been simulated, begun anew or resumed."""
    began: list[Config] = []
    original = pool.simulate

    def counted(job: Any, *args: Any, **more: Any) -> Any:
        began.append(job.config)
        return original(job, *args, **more)

    monkeypatch.setattr(pool, "simulate", counted)
    return began


def test_defaults_are_no_part_of_a_hash(text: Path, tmp_path: Path) -> None:
    """So that a new setting with a default leaves all cells as they are."""
    assert non_default(load()) == {}
    sets = small(text)
    (tmp_path / "all.toml").write_text(dump(load([], sets)))
    assert cell_hash(resolve(load([tmp_path / "all.toml"]))) == hash_of(sets)
    local = ["name=other", "run.out=elsewhere", "run.threads_per_worker=2", "run.device=auto"]
    assert hash_of([*sets, *local]) == hash_of(sets)
    import inspect

    from gossamer.app.options import find_recipe, known_options

    recipe = find_recipe("gasloc")
    defaults = {k: inspect.signature(recipe).parameters[k].default for k in known_options(recipe, reserved=("setting",))}
    written = {f"method.{k}": list(v) if isinstance(v, tuple) else v for k, v in defaults.items() if v is not None}
    assert len(written) > 3
    assert non_default(override(load([], ["method.name=gasloc"]), written)) == {"method": {"name": "gasloc"}}


def changed(leaf: str) -> Config:
    """The default configuration with another value of one setting, whether or not it goes with the rest."""
    *tables, key = leaf.split(".")
    within: list[Any] = [load()]
    for table in tables:
        within.append(getattr(within[-1], table))
    now = getattr(within[-1], key)
    value = not now if isinstance(now, bool) else 7 if now is None else now + 1 if isinstance(now, int | float) else "diloco"
    part = within.pop().model_copy(update={key: value})
    while within:
        part = within.pop().model_copy(update={tables.pop(): part})
    return part


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_other_value_changes_it() -> None:
    free = {"name", "run.out", "run.threads_per_worker", "run.device", "run.offload"}
    for leaf in _leaves():
        assert bool(non_default(changed(leaf))) == (leaf not in free and not leaf.startswith("log.")), leaf
    assert non_default(load([], ["method.magnitude=row"])) != {}


def test_a_fleet_counts_by_what_it_is(text: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "pair.toml"
    site = '[[sites]]\nname = "{}"\nregion = "here"\ngpu = "A100 80GB"\nup_mbps = 100\ndown_mbps = 100\n'
    link = '[[links]]\nbetween = ["here", "here"]\nrate_mbps = {}\nrtt_ms = 10\n'
    fleet.write_text(site.format("a") + site.format("b") + link.format(100))
    sets = small(text, fleet__name=f'"{fleet}"')
    before = hash_of(sets)
    fleet.write_text("# a note\n" + site.format("a") + site.format("b") + "speed = 1.0\n" + link.format(100))
    assert hash_of(sets) == before
    fleet.write_text(site.format("a") + site.format("b") + link.format(200))
    assert hash_of(sets) != before

    @dataclass(frozen=True)
    class Old:
        name: str
        rate: float = 1.0

    @dataclass(frozen=True)
    class New(Old):
        added: tuple[int, ...] = ()

    New.__name__ = "Old"  # the next release's
    assert _content((Old("a", 2.0), Old("b"))) == _content((New("a", 2.0), New("b"))) != _content((New("a", 2.0), New("b", added=(1,))))


def test_a_grid_keeps_its_cells_beside_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not among those of the published tables, where these are."""
    (tmp_path / "bench" / "results" / "cells").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    asked = []

    def none(configs: Sequence[Config], *, cells: Path, **_: Any) -> list[Cell]:
        asked.append(cells)
        return [Cell(config, "0" * 16) for config in configs]

    monkeypatch.setattr(grid, "run_cells", none)
    rows, console = [Row("a", (), (load(),))], Console(file=io.StringIO())
    for cells in (None, Path("elsewhere")):
        grid.run_grid(rows, [], Path("out"), cells=cells, shard=(0, 1), jobs=1, keep=False, console=console)
    assert asked == [Path("out/cells"), Path("elsewhere")]
    assert json.loads(Path("out/grid.json").read_text())["cells"] == "elsewhere"


def test_another_default_of_a_recipe_is_another_run(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.recipes import sync

    sets = small(text, method__name="geomesh")
    assert sync.geomesh.__kwdefaults__ is not None
    before, explicit = hash_of(sets), hash_of([*sets, f"method.outer_momentum={sync.geomesh.__kwdefaults__['outer_momentum']}"])
    assert before == explicit
    monkeypatch.setitem(sync.geomesh.__kwdefaults__, "outer_momentum", 0.123)
    assert hash_of(sets) != before


def test_a_text_counts_by_its_content(tmp_path: Path) -> None:
    words = corpus(tmp_path / "text")
    before = hash_of(small(words))
    (words / "part-1.txt").write_text("another text, and a longer one than it was before " * 40)
    assert hash_of(small(words)) != before


def test_a_cell_is_run_once(text: Path, tmp_path: Path, runs: list[Config]) -> None:
    a, again, b = (load([], small(text, name=f'"{name}"', seed=seed)) for name, seed in (("a", 0), ("again", 0), ("b", 1)))
    found = run_cells([b, a, again, b], cells=tmp_path / "cells", work=tmp_path / "work")
    assert [c.seed for c in runs] == [1, 0]
    assert [cell.config for cell in found] == [b, a, again, b]
    assert found[1].hash == found[2].hash != found[0].hash
    assert [cell.summary and cell.summary["name"] for cell in found] == ["b", "a", "again", "b"]
    assert list((tmp_path / "work").iterdir()) == [], "run folders are gone once their cell is stored"
    assert {p.stem for p in (tmp_path / "cells").iterdir()} == {cell.hash for cell in found}
    assert found[0].curve is not None and [tokens for tokens, _, _ in found[0].curve] == [64, 128]
    assert found[0].curve[-1][2] == found[0].number("final_loss")
    want = world.simulate(resolve(b), tmp_path / "run", quiet=True)
    assert found[0].summary == json.loads((want.path / "summary.json").read_text())
    assert run_cells([a, b], cells=tmp_path / "cells", work=tmp_path / "work") == [found[1], found[0]]
    assert len(runs) == 2
    file = tmp_path / "cells" / f"{found[0].hash}.json"
    whole = json.loads(file.read_text())
    lost: list[dict[str, Any]] = [{"versions": {}}, {"summary": {}}, {"seconds": "soon"}, {"curve": [[1]]}]
    for text_of_it in ('{"hash": ', "[]", *(json.dumps(whole | part) for part in lost)):
        file.write_text(text_of_it)
        with pytest.raises(BadInput, match="damaged"):
            run_cells([b], cells=tmp_path / "cells", work=tmp_path / "work")


def test_an_interrupted_grid_goes_on_where_it_was(text: Path, tmp_path: Path, runs: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [load([], small(text, seed=seed, run__rounds=4)) for seed in (0, 1)]
    want = run_cells(configs, cells=tmp_path / "whole", work=tmp_path / "work")
    runs.clear()
    original = world.SimHooks.boundary

    def interrupt(self: Any, worker: int, round: int, *rest: Any) -> Any:
        self.stop_asked = self.stop_asked or (self.job.config.seed == 1 and round == 2)
        return original(self, worker, round, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(world.SimHooks, "boundary", interrupt)
        with pytest.raises(Stopped, match="1 of the 2 cells"):
            run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work")
    (left,) = (tmp_path / "work").iterdir()
    assert left.name == want[1].hash and (left / "checkpoints").is_dir() and not (left / "trace.jsonl").exists()
    rounds: list[int] = []

    def watch(self: Any, worker: int, round: int, *rest: Any) -> Any:
        rounds.append(round)
        return original(self, worker, round, *rest)

    monkeypatch.setattr(world.SimHooks, "boundary", watch)
    found = run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work")
    assert [c.seed for c in runs] == [0, 1, 1]
    assert min(rounds) > 2, "from the checkpoint"
    assert [cell.summary and cell.summary["params_sha256"] for cell in found] == [c.summary and c.summary["params_sha256"] for c in want]


def test_shards_share_the_work(text: Path, tmp_path: Path, runs: list[Config]) -> None:
    configs = [load([], small(text, seed=seed, run__rounds=1)) for seed in range(5)]
    parts = [run_cells(configs, cells=tmp_path / f"cells-{k}", work=tmp_path / "work", shard=(k, 2)) for k in range(2)]
    assert sorted(c.seed for c in runs) == list(range(5))
    for one, two in zip(*parts, strict=True):
        assert one.hash == two.hash
        assert (one.summary is None) != (two.summary is None)
        assert one.failed is None and two.failed is None
    assert [shard_of("1/3"), shard_of("3/3")] == [(0, 3), (2, 3)]
    for bad in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(BadInput, match="--shard"):
            shard_of(bad)


def failing(kind: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch, runs: list[Config]) -> None:
    """Seed 1 fails."""
    original = pool.simulate

    def fail(job: Any, *args: Any, **more: Any) -> Any:
        if job.config.seed == 1:
            runs.append(job.config)
            raise kind()
        return original(job, *args, **more)

    monkeypatch.setattr(pool, "simulate", fail)


def test_a_failed_run_is_a_failed_cell(text: Path, tmp_path: Path, runs: list[Config], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    failing(lambda: RunFailed("replicas drifted apart"), monkeypatch, runs)
    (tmp_path / "a.toml").write_text(dump(load([], small(text))))
    monkeypatch.chdir(tmp_path)  # away from the cells of the repository
    arguments = ["compare", str(tmp_path / "a.toml"), "--seeds", "3", "--out", str(tmp_path / "out"), "--set", "run.rounds=1"]
    for time in range(2):
        assert main(arguments) == 1
        said = capsys.readouterr()
        assert "1 of 3 cells have failed" in said.err and "seed 1: replicas drifted apart" in said.err
        assert "2 of 3" in said.out and ("3 runs" in said.out) == (time == 0)
    assert [c.seed for c in runs] == [0, 1, 2]


def test_a_bug_or_a_full_disk_is_not_kept(text: Path, tmp_path: Path, runs: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> RunFailed:
        error = RunFailed("cannot be written")
        error.__cause__ = OSError("no space")
        return error

    configs = [load([], small(text, seed=seed, run__rounds=1)) for seed in (1, 0)]
    for kind in (full, lambda: KeyError("a bug")):
        with monkeypatch.context() as patch:
            failing(kind, patch, runs)
            found = run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work")
        assert found[0].failed and found[0].summary is None and found[1].summary
        assert read_cell(tmp_path / "cells", found[0].hash, configs[0]) is None
    assert run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work")[0].summary


def test_a_run_whose_folder_was_only_begun_is_begun_again(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    configs = [load([], small(text, run__rounds=1, data__tokenizer="bpe", data__vocab_size=300))]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        (found,) = run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work")
        assert "No space left" in (found.failed or "")
    assert run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work")[0].summary


@pytest.mark.skipif(not hasattr(pool.os, "setsid"), reason="locks of files")
def test_a_cell_that_another_process_runs_is_left_to_it(text: Path, tmp_path: Path, runs: list[Config]) -> None:
    config = load([], small(text))
    attempt = pool.Attempt("0" * 16, config, tmp_path, tmp_path / "work", False)
    with pool.claimed(tmp_path / f".{attempt.mark}.lock") as free:
        assert free
        assert pool.run(attempt).kind == "busy"
    assert not runs
    assert pool.run(attempt).kind == "stored"
    assert pool.run(attempt).kind == "stored"
    assert len(runs) == 1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_grid_in_several_processes(text: Path, tmp_path: Path, capsys) -> None:
    for name in ("diloco", "geomesh"):
        (tmp_path / f"{name}.toml").write_text(dump(load([], small(text, method__name=name))))
    files = [str(tmp_path / f"{name}.toml") for name in ("diloco", "geomesh")]
    out = tmp_path / "out"
    arguments = ["compare", *files, "--grid", "inner.lr=0.001,0.003", "--seeds", "2", "--out", str(out), "--cells", str(tmp_path / "cells")]
    assert main([*arguments, "--set", "run.rounds=1", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "8 cells (0 cached): 8 runs x 64 tokens" in said and "8 of 8" in said
    assert "\n* lowest mean loss of each configuration\n" in said and "One seed" not in said
    assert "an edge of the grid" in said and ("geomesh minus diloco" in said or "diloco minus geomesh" in said)
    found = json.loads((out / "grid.json").read_text())
    assert [row["values"]["inner.lr"] for row in found["rows"]] == ["0.001", "0.003"] * 2
    assert len({mark for row in found["rows"] for mark in row["cells"].values()}) == 8 == len(list((tmp_path / "cells").glob("*.json")))
    assert not (out / "runs").exists()
    assert main([*arguments, "--set", "run.rounds=1", "--keep"]) == 0
    assert "8 cells (8 cached): nothing to run" in capsys.readouterr().out
    assert json.loads((out / "grid.json").read_text()) == found


@pytest.mark.parametrize(
    "given, said",
    [
        (["--grid", "plan.stepz=1,2"], "unknown key plan.stepz; did you mean plan.steps?"),
        (["--grid", "method.overlapp=0.1"], "unknown key method.overlapp"),
        (["--grid", "plan.steps=1,two"], 'plan.steps = "two"'),
        (["--grid", "plan.steps"], "--grid plan.steps: expected key=value"),
        (["--grid", "plan.steps=1,,2"], "expected key=value"),
        (["--grid", "plan.steps=1,1"], "1 is there twice"),
        (["--grid", "plan.steps=1", "--grid", "plan.steps=2"], "given twice"),
        (["--grid", "seed=1,2"], "--seeds"),
        (["--grid", "plan.steps=1", "--shard", "3/2"], "--shard 3/2"),
        (["--shard", "1/2"], "--shard is for grids"),
        (["--keep"], "--keep is for grids"),
        (["--seeds", "100000"], "100,000 runs"),
    ],
)
def test_what_cannot_work_is_refused(given: list[str], said: str, text: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.toml").write_text(dump(load([], small(text, method__name="geomesh"))))
    assert main(["compare", str(tmp_path / "a.toml"), *given, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_values_are_those_of_set(text: Path) -> None:
    assert axis('a.b=1, "x,y" ,[1, 2],{c = 1, d = [2, 3]}, plain').values == ("1", '"x,y"', "[1, 2]", "{c = 1, d = [2, 3]}", "plain")
    assert [axis("a=1,2e-3").numbers, axis("a=1,b").numbers] == [(1.0, 0.002), None]


def row(source: str, value: str, losses: Sequence[float | None], **more: object) -> Row:
    config = load([], ["run.rounds=1"])
    configs = tuple(override(config, {"seed": seed}) for seed in range(len(losses)))
    base: dict[str, Any] = {"method": source, "target_perplexity": 20.0, "charged_as": None, "wall_s": 3600.0, "time_to_target_s": None}
    summaries = [base | {"final_loss": loss, "utilisation": {"mean": 0.5}} | more for loss in losses]
    return Row(
        source, (value,), configs, tuple(Cell(c, f"{i}", summary=s) for i, (c, s) in enumerate(zip(configs, summaries, strict=True)))
    )


def test_the_table_says_what_the_spread_allows() -> None:
    rows = [
        row("a", "1", [3.0, 3.2, 3.1]),
        row("a", "2", [2.0, 2.2, 2.1], time_to_target_s=1800.0),
        row("a", "4", [1.9, None, 2.0]),
        row("b", "1", [2.5, 2.6, 2.7]),
        row("b", "2", [2.7, 2.6, 2.6]),
        row("b", "4", [2.0, 2.25, 2.1]),
    ]
    axes = [Axis("plan.steps", ("1", "2", "4"))]
    lines = as_lines(rows, axes)
    marked = [i for i, line in enumerate(lines[3:]) if "*" in line]
    assert marked == [1, 5], "the best of each configuration; a row with a seed that did not end is not ranked"
    assert "best" in lines[4] and "0:30:00" in lines[4] and "50.0" in lines[4]
    assert "+1.0000 ± 0.0000" in lines[3] and "2 of 3" in lines[5] and "not distinguishable" in lines[8]
    said = notes(rows, axes, Path("cells"))
    assert [line for line in said if "edge" in line] == [
        "b: its best plan.steps, 4, is the largest value tried, an edge of the grid: the best may lie beyond"
    ]
    assert any(line.startswith("b minus a, each at its best: +0.0167 ± ") and line.endswith("not distinguishable.") for line in said)
    found = as_json(rows, axes, Path("cells"), said)
    assert [r["best"] for r in found["rows"]] == [False, True, False, False, False, True]
    assert found["rows"][5]["against_best"]["verdict"] == "not distinguishable"
    words = [Axis("method.form", ("1", "2", "x"))]
    assert not any("edge" in line for line in notes(rows, words, Path("cells")))


def test_rows_are_every_configuration_with_every_combination(text: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text('method.name = "diloco"\n')
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    rows = rows_of(files, small(text), [axis("plan.steps=1,2"), axis("inner.lr=0.1,0.2,0.3")], seeds=2)
    assert [(r.source, *r.values) for r in rows[:4]] == [
        ("one", "1", "0.1"),
        ("one", "1", "0.2"),
        ("one", "1", "0.3"),
        ("one", "2", "0.1"),
    ]
    assert len(rows) == 12 and all([c.seed for c in r.configs] == [0, 1] for r in rows)
    assert rows[4].configs[0].plan.steps == 2 and rows[4].configs[0].inner.lr == 0.2 and rows[4].configs[1].name == "one steps=2 lr=0.2"
