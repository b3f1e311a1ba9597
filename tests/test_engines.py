"""Grids on Ray and on Slurm: the same cells under the same names, each run once, whoever runs it."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from small_runs import command, corpus, flags, settings

from gossamer.app.config import Config, load
from gossamer.app.grids import engines
from gossamer.app.grids.cell import Cell
from gossamer.app.grids.cells import run_cells
from gossamer.app.grids.engines import Engine, Task, engine_named, outcomes_on
from gossamer.app.grids.pool import Attempt, Outcome
from gossamer.core.errors import BadInput


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    text = corpus(tmp_path_factory.mktemp("engines") / "text")
    return [load([], settings(text, fleet__name="uniform-2", method__name="diloco", run__rounds=2, seed=seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def wanted(configs: list[Config], tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    folder = tmp_path_factory.mktemp("here")
    return run_cells(configs, cells=folder / "cells", work=folder / "work")


def same(a: Sequence[Cell], b: Sequence[Cell]) -> bool:
    return [(c.hash, c.summary, c.curve) for c in a] == [(c.hash, c.summary, c.curve) for c in b]


@pytest.mark.timeout(600)
def test_a_local_ray_runs_the_same_cells(
    configs: list[Config], wanted: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # one process is enough,
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "600")  # and a busy machine takes its time to start it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of the Python that it runs on and of processes that it leaves to end by themselves
        on = engine_named("ray", ["num_cpus=1"], 1, tmp_path)
        got = run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work", engine=on)
        del on
        gc.collect()
    assert same(got, wanted) and all(c.seconds and not c.failed for c in got)
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the logs of submitit's debug executor
def test_submitit_runs_what_is_missing_and_no_more(configs: list[Config], wanted: list[Cell], tmp_path: Path) -> None:
    first = run_cells(configs[:1], cells=tmp_path / "cells", work=tmp_path / "work")
    on = engine_named("slurm", ["cluster=debug", "partition=gpu", "timeout_min=5"], 2, tmp_path / "jobs")
    got = run_cells(configs, cells=tmp_path / "cells", work=tmp_path / "work", engine=on)
    assert same(got, wanted) and got[0].seconds == first[0].seconds, "the first one was not run again"


def test_a_task_travels_as_bytes(configs: list[Config], tmp_path: Path) -> None:
    task = Task(Attempt("0" * 16, configs[0], tmp_path / "cells", tmp_path / "work", False))
    back = pickle.loads(pickle.dumps(task))
    assert (back.attempt, back.folder) == (task.attempt, task.folder)


class Fickle:
    """An engine that says of each attempt what a script has it say, in turn."""

    name: ClassVar[str] = "fickle"
    at_once: int | None = 1

    def __init__(self, **script: Sequence[str]) -> None:
        self.script = {mark: list(kinds) for mark, kinds in script.items()}
        self.most, self.closed, self.stopped = 0, False, list[str]()

    def submit(self, attempts: Sequence[Attempt]) -> list[Any]:
        self.most = max(self.most, len(attempts))
        return [a.mark for a in attempts]

    def ended(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)[:1]

    def outcome(self, handle: Any) -> Outcome:
        kind = self.script[handle].pop(0)
        if kind == "interrupt":
            raise KeyboardInterrupt
        return Outcome(kind)  # type: ignore[arg-type]

    def stop(self, handles: Sequence[Any]) -> None:
        self.stopped += handles

    def close(self) -> None:
        self.closed = True


def told(engine: Engine, marks: str, configs: list[Config]) -> list[tuple[str, str, str]]:
    attempts = [Attempt(mark, configs[0], Path("cells"), Path("work"), False) for mark in marks]
    found = list(outcomes_on(engine, attempts))
    assert all(a in attempts for a, _ in found)
    return [(a.mark, o.kind, o.message) for a, o in found]


def test_what_an_engine_sends_away_is_handed_in_again(configs: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_BUSY_S", 0.0)
    engine = Fickle(a=["stopped", "stopped", "stored"], b=["busy"] * 9 + ["stored"], c=["error"], d=["stopped"] * 9)
    assert told(engine, "abcd", configs) == [
        ("c", "error", ""), ("a", "stored", ""), ("d", "error", "fickle stopped it 5 times before its end"), ("b", "stored", ""),
    ]  # fmt: skip
    assert engine.most == 1 and engine.closed and not engine.stopped


def test_ctrl_c_stops_what_runs_there(configs: list[Config]) -> None:
    engine = Fickle(a=["stored"], b=["stored"], c=["interrupt"])
    engine.at_once = None
    with pytest.raises(KeyboardInterrupt):
        told(engine, "cab", configs)
    assert engine.stopped == ["a", "b"] and engine.closed


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("dask", [], "expected ray or slurm"),
        ("ray", ["num_cpu=2"], "ray knows address, num_cpus"),
        ("ray", ["num_cpus=lots"], "expected a number"),
        ("ray", ["num_cpus"], "expected key=value"),
        ("slurm", ["cluster=big"], "expected slurm, or local or debug"),
        ("slurm", ["cluster=debug", "partitions=gpu"], "Unknown argument 'partitions'"),
        ("slurm", ["cluster=debug", "timeout_min=long"], "timeout_min"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        engine_named(name, options, None, tmp_path)


def test_without_slurm_it_is_said_before_anything_is_made(configs: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "one.toml", tmp_path / "out"
    file.write_text('method.name = "diloco"\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    given = ["compare", str(file), "--out", str(out), *flags(settings(tmp_path))]
    for more, words in (
        (["--seeds", "2", "--engine", "slurm"], "there is no sbatch here"),
        (["--engine", "ray"], "--engine is for grids"),
        (["--seeds", "2", "--engine-option", "partition=gpu"], "give --engine too"),
    ):
        code, said = command(*given, *more)
        assert code == 2 and words in said
    assert not out.exists()
