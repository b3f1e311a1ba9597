"""Loggers show what metrics.jsonl says, under the same names, and never end a run."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator_toys import eventually
from small_runs import command, corpus, flags, settings

from gossamer.app import config as configuration
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.resuming.rollback import ended_until
from gossamer.app.simulate import simulate
from gossamer.app.tracking import loggers as module
from gossamer.app.tracking.loggers import Loggers
from gossamer.app.tracking.series import MOST_WORKERS, Fleet, Row, row_of
from gossamer.app.tracking.sinks import SINKS, Run, check_loggers
from gossamer.app.train import work
from gossamer.core.errors import BadInput

Shown = dict[str, list[tuple[int, float]]]
"""Series: name -> (tokens, value), in the order they came."""


class Kept:
    """A logger that keeps everything."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.closed = False

    def log(self, row: Row) -> None:
        self.rows.append(row)

    def back_to(self, tokens: int) -> None:
        self.rows = [row for row in self.rows if row.tokens <= tokens]

    def close(self) -> None:
        self.closed = True

    def shown(self) -> Shown:
        found: Shown = defaultdict(list)
        for row in self.rows:
            for name, value in row.values.items():
                found[name].append((row.tokens, value))
        return {name: sorted(points) for name, points in found.items()}


class Bad(Kept):
    def log(self, row: Row) -> None:
        raise OSError(28, "No space left on device")


def job_of(folder: Path, *sets: str) -> Any:
    return resolve(configuration.load(sets=[*settings(corpus(folder / "text"), run__rounds=2, fleet__name='"uniform-2"'), *sets]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Kept]:
    """A simulated run of gossip with TensorBoard, and a logger of this test's beside it."""
    folder, kept = tmp_path_factory.mktemp("logged"), Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(folder / "cache"))
        patch.setitem(SINKS, "wandb", lambda run: kept)
        sets = ['log.to=["tensorboard","wandb"]', "method.name=gasloc", "method.topology=ring", "eval.workers=true"]
        job = job_of(folder, *sets)
        done = simulate(job, folder / "run", quiet=True)
    return done, kept


def said(records: list[dict[str, Any]]) -> Shown:
    """By hand what should be shown of some records."""
    found: Shown = defaultdict(list)
    for r in records:
        if r["kind"] == "round":
            at = f"worker/{r['worker']}/"
            found[at + "train/loss"].append((r["tokens_total"], r["loss"]))
            found[at + "bytes/sent"].append((r["tokens_total"], r["bytes_sent"]))
            found[at + "time/utilisation"].append((r["tokens_total"], r["compute_s"] / r["wall_s"]))
        elif r["kind"] == "eval":
            at = "" if r["worker"] == "fleet" else f"worker/{r['worker']}/"
            found[at + "eval/loss"].append((r["tokens"], r["loss"]))
            found[at + "eval/perplexity"].append((r["tokens"], r["perplexity"]))
    for round in {r["round"] for r in records}:
        there = [r for r in records if r["kind"] == "round" and r["round"] == round]
        tokens = sum(r["tokens"] for r in there)
        at = there[0]["tokens_total"]
        found["train/loss"].append((at, sum(r["tokens"] * r["loss"] for r in there) / tokens))
        found["bytes/sent"].append((at, sum(r["bytes_sent"] for r in there)))
    return {name: sorted(points) for name, points in found.items()}


def test_loggers_show_what_metrics_say(run: tuple[RunFolder, Kept]) -> None:
    folder, kept = run
    want, shown = said(folder.read_lines("metrics.jsonl")), kept.shown()
    assert len(want) > 10 and kept.closed
    for name, points in want.items():
        assert np.array(shown[name]) == pytest.approx(np.array(points)), name


def test_tensorboard_reads_back_the_same(run: tuple[RunFolder, Kept]) -> None:
    from tensorboard.backend.event_processing import event_file_loader as events

    folder, kept = run
    (file,) = (folder.path / "tensorboard").iterdir()
    found: Shown = defaultdict(list)
    for event in events.RawEventFileLoader(str(file)).Load():
        parsed = events.event_pb2.Event.FromString(event)
        for value in parsed.summary.value:
            found[value.tag].append((parsed.step, value.simple_value))
    found.pop("progress/round")
    assert {name: sorted(points) for name, points in found.items()} == {
        name: [(tokens, float(np.float32(value))) for tokens, value in points] for name, points in kept.shown().items()
    }


def test_a_real_worker_tells_its_own_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SINKS, "wandb", lambda run: kept)
    job = job_of(tmp_path, 'log.to=["wandb"]', "method.name=diloco", "fleet.workers=1", 'fleet.name="uniform"', "run.rounds=1")
    folder = RunFolder(work(job, tmp_path / "run"))
    shown = kept.shown()
    want = said(folder.read_lines("metrics.jsonl"))
    assert {name: points for name, points in shown.items() if name in want} == want
    assert shown["eval/loss"] == shown["worker/0/eval/loss"] and kept.closed


def test_what_lies_after_the_round_that_a_run_goes_on_from_is_dropped(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import plugin_event_accumulator as accumulator

    sink = SINKS["tensorboard"](Run(tmp_path, "p", "n"))
    for tokens in (10, 20, 30):
        sink.log(Row({"eval/loss": tokens}, tokens, tokens // 10))
    sink.close()
    sink = SINKS["tensorboard"](Run(tmp_path, "p", "n"))
    sink.back_to(20)
    sink.log(Row({"eval/loss": 31}, 30, 3))
    sink.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("eval/loss")
    assert [(e.step, float(e.tensor_proto.float_val[0])) for e in found] == [(10, 10), (20, 20), (30, 31)]


def test_wandb_writes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(key, str(tmp_path / key))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    job = job_of(tmp_path, 'log.to=["wandb"]', "log.offline=true", 'log.project="cloth"')
    failed: list[str] = []
    loggers = Loggers.of(job, tmp_path, say=failed.append)
    loggers.add({"kind": "eval", "round": 1, "worker": "fleet", "tokens": 64, "loss": 2.5, "perplexity": math.exp(2.5)})
    for feed in loggers._opened():
        feed._last_s = 600.0  # of a busy machine
    loggers.close()
    assert not failed
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    eventually(
        lambda: b"eval/perplexity" in file.read_bytes(), "nothing was written", 60.0
    )  # a process of its own writes it, and is not always through
    assert b"cloth" in file.read_bytes() and Run(tmp_path, "", "").known()["wandb"] in file.name


def test_trackio_keeps_a_run_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "shown"))
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "shown")
    sink = SINKS["trackio"](Run(tmp_path, "cloth", "a run"))
    sink.log(Row({"eval/loss": 2.5}, 64, 1))
    sink.close()
    (file,) = (tmp_path / "shown").glob("cloth*.db")
    with sqlite3.connect(file) as base:
        (row,) = base.execute("select run_name, step, metrics from metrics").fetchall()
    assert row[:2] == ("a run", 64) and "eval/loss" in str(row[2])


@pytest.mark.parametrize("fails", ["opening", "logging", "hanging"])
def test_a_logger_that_fails_is_said_once_and_ends_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def opens() -> Kept:
        if fails == "opening":
            raise SystemExit("no network")
        if fails == "hanging":
            stuck.wait()
        return Bad()

    monkeypatch.setattr(module, "_MOST_WAITING", 8)
    pause = threading.Event()
    heard: list[str] = []
    good = Kept()
    loggers = Loggers({"bad": opens, "good": lambda: good}, workers=1, say=heard.append)
    for feed in loggers._opened():
        feed._last_s = 5.0 if feed._name == "good" else 0.2
    for k in range(40):
        loggers.add({"kind": "eval", "round": k, "worker": "fleet", "tokens": k, "loss": 1.0, "perplexity": math.e})
        while loggers._opened()[1]._waiting.qsize() > 4:
            pause.wait(0.001)
    loggers.close()
    stuck.set()
    assert len(heard) == 1 and "logging to bad has failed" in heard[0]
    assert len(good.rows) == 40


def test_a_library_that_is_not_there_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gossamer.app.tracking.sinks.find_spec", lambda name: None)
    sets = flags([*settings(corpus(tmp_path / "text")), 'log.to=["wandb"]'])
    for arguments in (["simulate"], ["train", "--workers", "4"], ["wan", "join", "--site", "a", "--coordinator", "127.0.0.1:1"]):
        code, words = command(*arguments, *sets, "--out", "run")
        assert code == 2 and "pip install 'gossamer[loggers]'" in words
        assert not Path("run").exists()


def test_a_folder_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(BadInput, match="trackio"):
        check_loggers(configuration.load(sets=['log.to=["trackio"]']).log)


def round_of(worker: int, round: int = 1, **more: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(("drift_norm", "time_s", "straggler_idle_s", "network_idle_s", "bytes_sent", "bytes_received"), 0.0)
    return {
        "kind": "round", "round": round, "worker": worker, "tokens": 10 * (worker + 1), "tokens_total": 30 * round, "steps": 1,
        "loss": 1.0 + worker, "compute_s": 1.0, "wall_s": 2.0, "refused": [], **numbers, **more,
    }  # fmt: skip


def test_the_loss_of_the_fleet_is_weighted_by_tokens_and_skips_what_is_not_finite() -> None:
    fleet = Fleet(2)
    assert fleet.add(round_of(0)) is None
    row = fleet.add(round_of(1))
    assert row is not None and row.values["train/loss"] == pytest.approx((10 * 1 + 20 * 2) / 30) and row[1:] == (30, 1)
    fleet.add(round_of(0, loss=math.nan))
    row = fleet.closed(1)
    assert row is not None and "train/loss" not in row.values and row.values["time/utilisation"] == 0.5
    assert fleet.closed(1) is None and list(fleet.left()) == []


def test_at_the_end_the_records_of_the_others_are_told_and_nobodys_twice() -> None:
    kept = Kept()
    records = [round_of(worker, round) for round in (1, 2) for worker in (0, 1)]
    loggers = Loggers({"kept": lambda: kept}, workers=2)
    for record in records:
        if record["worker"] == 0:
            loggers.add(record)
    loggers.rest(records, told=0)
    loggers.close()
    series = kept.shown()
    assert all(len(points) == 2 for points in series.values()) and {"worker/0/train/loss", "worker/1/train/loss", "train/loss"} <= set(
        series
    )


def test_a_run_that_was_taken_back_from_its_end_tells_the_others_rounds_once(tmp_path: Path) -> None:
    asides = [(3, True), (5, False), (2, False), (4, True)]  # taken back to that round; and whether the run had come to its end
    until = []
    for number, (round, ended) in enumerate(asides, 1):
        aside = tmp_path / "aside" / str(number)
        aside.mkdir(parents=True)
        (aside / "from.json").write_text(json.dumps({"round": round}))
        if ended:
            (aside / "summary.json").write_text("{}")
        until.append(ended_until(tmp_path))
    assert until == [3, 3, 2, 4] and ended_until(tmp_path / "another") == 0
    (tmp_path / "aside" / "5").mkdir()
    assert ended_until(tmp_path) == 4, "broken off: nothing was moved"
    kept = Kept()
    loggers = Loggers({"kept": lambda: kept}, workers=2)
    loggers.rest([round_of(worker, round) for round in range(1, 7) for worker in (0, 1)], told=0, after=4)
    loggers.close()
    assert {row.round for row in kept.rows} == {5, 6}
    assert {"worker/1/train/loss", "train/loss"} <= set(kept.shown())


def test_ids_that_two_loggers_keep_at_once_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, both = Run(tmp_path, "p", "n"), threading.Barrier(2)
    known = Run.known

    def slowly(self: Run) -> dict[str, str]:
        found = known(self)
        with suppress(threading.BrokenBarrierError):  # the other comes to it as well, unless it has to wait
            both.wait(0.5)
        return found

    monkeypatch.setattr(Run, "known", slowly)
    threads = [threading.Thread(target=run.keep, args=(name, f"id of {name}")) for name in ("wandb", "trackio")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert known(run) == {"wandb": "id of wandb", "trackio": "id of trackio"}


def test_series_of_workers_end_somewhere_and_equal_workers_speak_for_all() -> None:
    assert row_of(round_of(MOST_WORKERS)) is None
    record = {"kind": "eval", "round": 1, "worker": 0, "tokens": 5, "loss": 1.0, "perplexity": math.e}
    alone, speaks = row_of(record), row_of(record, speaker=0)
    assert alone is not None and set(alone.values) == {"worker/0/eval/loss", "worker/0/eval/perplexity"}
    assert speaks is not None and set(speaks.values) == set(alone.values) | {"eval/loss", "eval/perplexity"}


def test_where_numbers_are_shown_is_no_part_of_what_a_run_is() -> None:
    assert configuration.config_hash(configuration.load()) == configuration.config_hash(configuration.load(sets=['log.to=["wandb"]']))
