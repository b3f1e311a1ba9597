"""Whole runs: simulated and real end with the same bits; killed and resumed ones too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coordinator_toys import eventually
from small_runs import command, corpus, flags, forked, mixture, settings

from gossamer.app import train
from gossamer.app.config import dump, load, override
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.simulate import SimHooks, simulate
from gossamer.app.train import WORKER_MODULES
from gossamer.cli import main
from gossamer.core.errors import Stopped
from gossamer.net.fork import Forked
from gossamer.net.launch import launch
from gossamer.report import page, read, table
from gossamer.report.stopped import Stop, stop_of
from gossamer.train import checkpoint

pytestmark = pytest.mark.usefixtures("cache")

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
METHODS: dict[str, dict[str, object]] = {
    "diloco": {"method__name": "diloco"},
    "geomesh": {"method__name": "geomesh", "plan__name": '"proportional"', "plan__steps": 4},
    "awb": {"method__name": "geomesh", "plan__name": '"awb"', "plan__steps": 4, "plan__batch_max": 6},
    "shard_overlap": {
        "method__name": "geomesh", "plan__name": '"awb"', "plan__steps": 4, "plan__batch_max": 6, "plan__carry": "true",
        "method__exchange": '"shard"', "method__overlap": 0.5, "method__error_feedback": '"both"',
    },
    "gasloc": {"method__name": "gasloc", "plan__name": '"proportional"', "plan__steps": 4},
    "gasloc_late": {"method__name": "gasloc", "method__overlap": 1.0, "method__outer": '"adamw"', "method__outer_lr": 0.01},
    "dadam": {"method__name": "dadam", "run__rounds": 2, "method__topology": "two_peer"},
    "ddp": {"method__name": "ddp", "run__rounds": 2},
    "sparse_loco": {"method__name": "sparse_loco"},
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "frozen": {"method__name": "diloco", "model__freeze": '["model.embed_tokens", "*norm*"]'},
    "adapter": {"method__name": "gasloc", "model__adapter": "{rank = 2, dropout = 0.1}", "model__activation_checkpointing": "true"},
}
"""Models of which a part is trained."""
METHODS |= MODELS | {"packed": {"method__name": "diloco", "data__source": "stdlib", "data__valid_documents": 9}}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def quiet_run(sets: list[str], out: Path) -> dict:
    return summary(simulate(resolve(load([], sets)), out, quiet=True).path)


@pytest.mark.parametrize(
    ("n", "names"),
    [
        (4, [m for m in METHODS if m not in (*MODELS, "packed")]),
        (2, ["diloco", "geomesh", "shard_overlap", "gasloc", "dadam", *MODELS, "packed"]),
    ],
)
def test_real_processes_end_with_the_bits_of_the_simulation(n: int, names: list[str], text: Path, tmp_path: Path) -> None:
    configs = []
    for name in names:
        more = METHODS[name] | ({"data__mix": mixture(tmp_path / "data")} if name == "packed" else {})
        sets = settings(text, **more, fleet__name='"azure-4"' if n == 4 else f'"uniform-{n}"', clock__charge_as='"llama-150m"')
        configs.append(tmp_path / f"{name}.toml")
        configs[-1].write_text(dump(load([], sets)))
    argv = [sys.executable, "-m", "real_worker", str(tmp_path), *map(str, configs)]
    said: list[str] = []
    assert launch(n, argv, tmp_path / "logs", say=said.append, env=PATHS, modules=WORKER_MODULES) == 0, said
    real = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(n)]
    for config in configs:
        want = summary(simulate(resolve(load([config])), tmp_path / "sim" / config.stem, quiet=True).path)
        got = [r[config.stem] for r in real]
        assert [g["sha256"] for g in got] == want["params_sha256"], config.stem
        assert [g["sent"] for g in got] == want["bytes_sent"], config.stem
        assert [g["received"] for g in got] == want["bytes_received"], config.stem


@pytest.mark.parametrize(("method", "stop"), [("geomesh", 1), ("geomesh", 3), ("gasloc", 1), ("gasloc", 3), ("gasloc_late", 2)])
def test_a_simulation_stopped_and_resumed_is_the_uninterrupted_one(method: str, stop: int, text: Path, tmp_path: Path, monkeypatch) -> None:
    name = METHODS[method] if method == "gasloc_late" else {"method__name": method}
    sets = settings(text, **name, fleet__name='"straggler-8"', run__rounds=5, checkpoint__every=1, clock__charge_as='"tiny"')
    want = quiet_run(sets, tmp_path / "whole")
    original = SimHooks.boundary

    def interrupt(self, worker, round, time_s, state, body):
        self.stop_asked = self.stop_asked or round == stop
        return original(self, worker, round, time_s, state, body)

    with monkeypatch.context() as patch:
        patch.setattr(SimHooks, "boundary", interrupt)
        with pytest.raises(Stopped, match="--resume"):
            quiet_run(sets, tmp_path / "cut")
    assert not (tmp_path / "cut" / "summary.json").exists()
    folder = RunFolder.existing(tmp_path / "cut")
    assert stop_of(folder.path) == Stop(checkpoint.newest(folder.checkpoints), "gossamer simulate --resume")
    simulate(resolve(load([tmp_path / "cut" / "config.toml"])), resume=folder, quiet=True)
    assert stop_of(folder.path) is None
    got = summary(tmp_path / "cut")
    assert got["params_sha256"] == want["params_sha256"]
    if method != "gasloc_late":  # what was in flight is sent again
        assert got["bytes_sent"] == want["bytes_sent"]
        assert got["wall_s"] == pytest.approx(want["wall_s"], rel=1e-9)
    assert [r["round"] for r in folder.read_lines("metrics.jsonl") if r["kind"] == "eval"] == [1, 2, 3, 4, 5]


def test_a_simulation_that_is_asked_to_stop_says_so_at_once(text: Path, tmp_path: Path, monkeypatch) -> None:
    """Before the round is over, which may take minutes, and how to go on."""
    original, out = SimHooks.boundary, tmp_path / "cut"
    before: list[str] = []

    def interrupt(self, worker, round, time_s, state, body):
        if round == 1 and not before:
            signal.raise_signal(signal.SIGINT)
            eventually(lambda: sys.stderr.getvalue().endswith(f"{out}\n"), "it answers before the round is over")
            before.append(sys.stderr.getvalue())
        return original(self, worker, round, time_s, state, body)

    monkeypatch.setattr(SimHooks, "boundary", interrupt)
    told: list[str] = []

    @contextmanager
    def heard(text: str, **_: object) -> Iterator[Callable[[str], None]]:
        told.append(text)
        yield told.append

    monkeypatch.setattr("gossamer.app.simulate.still", heard)
    sets = settings(text, method__name="diloco", fleet__name='"uniform-2"', plan__steps=1)
    code, said = command("simulate", *flags(sets), "--out", str(out))
    assert code == 130 and "stopped after round 2 of 4" in said
    answer = before[0].splitlines()[-1]
    assert answer.startswith("stopping after this round or the next, with a checkpoint; once more ends it at once")
    assert answer.endswith(f"To go on: gossamer simulate --resume {out}")
    assert said.count("stopping after this") == 1
    where = "diloco on uniform-2: round"
    assert told == [f"{where} 1/4", *(f"{where} {r}/4, worker {i} of 2 has computed" for r in (1, 2) for i in (0, 1))]


def test_a_simulation_that_dies_at_any_moment_resumes(text: Path, tmp_path: Path, monkeypatch) -> None:
    """No clean stop: an exception in the middle of a round, some workers past the boundary and some not."""
    sets = settings(text, method__name="gasloc", fleet__name='"straggler-8"', run__rounds=4, checkpoint__every=1)
    want = quiet_run(sets, tmp_path / "whole")
    original = SimHooks.boundary
    crossings = 0

    def die(self, worker, round, time_s, state, body):
        nonlocal crossings
        crossings += 1
        if crossings == 21:
            raise MemoryError
        return original(self, worker, round, time_s, state, body)

    with monkeypatch.context() as patch:
        patch.setattr(SimHooks, "boundary", die)
        with pytest.raises(MemoryError):
            quiet_run(sets, tmp_path / "dead")
    simulate(resolve(load([tmp_path / "dead" / "config.toml"])), resume=RunFolder.existing(tmp_path / "dead"), quiet=True)
    assert summary(tmp_path / "dead")["params_sha256"] == want["params_sha256"]


def test_a_run_is_resumed_only_under_the_circumstances_that_it_began_with(text: Path, tmp_path: Path, capsys) -> None:
    words, fleet = corpus(tmp_path / "text"), tmp_path / "pair.toml"
    site = '[[sites]]\nname = "{}"\nregion = "here"\ngpu = "A100 80GB"\nup_mbps = 100\ndown_mbps = 100\nspeed = {}\n'
    link = '[[links]]\nbetween = ["here", "here"]\nrate_mbps = 100\nrtt_ms = 10\n'
    fleet.write_text(site.format("a", 1.0) + site.format("b", 1.0) + link)
    sets = settings(words, fleet__name=f'"{fleet}"', checkpoint__every=1)
    out = tmp_path / "run"
    quiet_run(sets, out)
    before = summary(out)
    assert main(["simulate", "--resume", str(out)]) == 0
    assert summary(out) == before, "a finished run stays as it was"
    lines = capsys.readouterr().out.splitlines()
    ended = f"the run in {out} has come to its end after round 4: nothing was trained."
    assert sum(line.startswith(ended) and "gossamer export" in line and "model.checkpoint=" in line for line in lines) == 1
    fleet.write_text(site.format("a", 1.0) + site.format("b", 0.2) + link)
    assert main(["simulate", "--resume", str(out)]) == 2
    assert "fleet" in capsys.readouterr().err
    fleet.write_text(site.format("a", 1.0) + site.format("b", 1.0) + link)
    (words / "part-1.txt").write_text("another text, and a longer one than it was before " * 40)
    assert main(["simulate", "--resume", str(out)]) == 2
    assert "text" in capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--workers", "2"]) == 2
    assert "gossamer simulate" in capsys.readouterr().err
    assert summary(out) == before


def test_a_finished_run_with_overlap_resumes_to_itself(text: Path, tmp_path: Path) -> None:
    sets = settings(text, method__name="geomesh", method__overlap=0.5, fleet__name='"uniform-3"')
    want = quiet_run(sets, tmp_path / "run")
    folder = RunFolder.existing(tmp_path / "run")
    simulate(resolve(load([tmp_path / "run" / "config.toml"])), resume=folder, quiet=True)
    assert summary(tmp_path / "run") == want
    (tmp_path / "run" / "summary.json").unlink()  # as if it had died after its last checkpoint
    simulate(resolve(load([tmp_path / "run" / "config.toml"])), resume=folder, quiet=True)
    assert summary(tmp_path / "run")["params_sha256"] == want["params_sha256"]
    assert len([r for r in folder.read_lines("metrics.jsonl") if r["kind"] == "close"]) == 3


def test_the_model_of_a_synchronous_run_is_what_its_workers_hold(text: Path, tmp_path: Path) -> None:
    """Three float32 thirds do not add up to one."""
    run = quiet_run(settings(text, method__name="diloco", fleet__name='"uniform-3"'), tmp_path / "run")
    assert run["consensus_distance"] == 0.0 and len(set(run["params_sha256"])) == 1


def test_refusals_are_said(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = quiet_run(settings(text, method__name="diloco", fleet__name='"uniform-2"', inner__lr=1e30), out)
    assert run["refused"] > 0
    assert "contributions were refused" in table.as_text([read.Run.load(out)])
    assert "contributions were refused" in page.render([read.Run.load(out)])


def wait_for(path: Path, process: Forked, log: Path) -> None:
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def workers_of(launcher: int) -> list[int]:
    """Processes below it that say so."""
    below = [int(c) for t in Path(f"/proc/{launcher}/task").iterdir() for c in (t / "children").read_text().split()]
    found = [pid for child in below for pid in [child, *workers_of(child)]]
    return sorted(pid for pid in found if Path(f"/proc/{pid}/comm").read_text().startswith("gossamer "))


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers through /proc")
def test_a_killed_worker_is_named_and_the_run_resumes(text: Path, tmp_path: Path) -> None:
    sets = settings(text, method__name="geomesh", fleet__name='"uniform-2"', run__rounds=40, checkpoint__every=1, clock__pace_s=0.05)
    out = tmp_path / "run"
    log = tmp_path / "log"
    process = forked(log, ["train", "--workers", "2", "--out", str(out), *flags(sets)], tmp_path)
    wait_for(out / "checkpoints" / "round-000002" / "manifest.json", process, log)
    os.kill(workers_of(process.pid)[1], signal.SIGKILL)
    code, said = process.wait(60), log.read_text()
    assert code == 1, said
    assert "worker 1 was killed" in said and "Last whole checkpoint: round" in said and "--resume" in said
    assert not (out / "summary.json").exists()
    code, said = command("train", "--workers", "2", "--resume", str(out))
    assert code == 0, said
    want = quiet_run([*sets, "clock.pace_s=0.0"], tmp_path / "sim")
    got = summary(out)
    assert got["params_sha256"] == want["params_sha256"]
    assert got["bytes_sent"] == want["bytes_sent"], "resumed records and records before the kill make one whole"
    assert [r["round"] for r in RunFolder(out).read_lines("metrics.jsonl") if r["kind"] == "round" and r["worker"] == 1] == list(
        range(1, 41)
    )
    assert "GeoMesh" in page.render([read.Run.load(out)]) or "geomesh" in page.render([read.Run.load(out)])


def test_a_real_run_that_is_stopped_leaves_word_of_it_until_it_goes_on(text: Path, tmp_path: Path, monkeypatch) -> None:
    job, out = resolve(load([], settings(text, method__name="diloco", fleet__name='"uniform-2"'))), tmp_path / "run"
    codes, seen = [130, 143, 0], []

    def launched(*_: object, **__: object) -> int:
        seen.append(stop_of(out))
        return codes.pop(0)

    for name in ("latest", "newest"):
        monkeypatch.setattr(checkpoint, name, lambda folder: 3)
    monkeypatch.setattr(train, "launch", launched)
    for name in ("check_model", "load_early"):
        monkeypatch.setattr(train, name, lambda *_: None)
    for resume in (False, True):
        with pytest.raises(Stopped, match=f"round 3; go on with: gossamer train --workers 2 --resume {out}"):
            train.launch_local(job, out, resume=resume)
        assert stop_of(out) == Stop(3, "gossamer train --workers 2 --resume")
    train.launch_local(job, out, resume=True)
    assert seen == [None] * 3 and stop_of(out) is None, "while its workers train it is not stopped"


def test_torchrun_starts_workers_as_well(text: Path, tmp_path: Path) -> None:
    sets = settings(text, method__name="diloco", fleet__name='"uniform-2"', run__rounds=2)
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gossamer", "train"]
    done = subprocess.run([*torchrun, "--out", str(out), *flags(sets)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(out)["params_sha256"] == quiet_run(sets, tmp_path / "sim")["params_sha256"]


def test_overlap_hides_the_exchange_and_its_last_landing_is_counted(text: Path, tmp_path: Path) -> None:
    sets = settings(text, method__name="geomesh", fleet__name='"azure-4"', clock__charge_as='"llama-150m"', clock__charge_tokens=65536)
    plain = quiet_run([*sets, "clock.noise=0.0", "clock.drift=0.0"], tmp_path / "plain")
    hidden = quiet_run([*sets, "clock.noise=0.0", "clock.drift=0.0", "method.overlap=0.5"], tmp_path / "hidden")
    assert hidden["network_idle"]["mean"] < plain["network_idle"]["mean"]
    for run in (plain, hidden):
        for i in range(4):
            assert sum(run[k]["workers"][i] for k in ("utilisation", "straggler_idle", "network_idle")) <= 1 + 1e-9


def test_a_comparison_makes_one_table_and_goes_on_where_it_was(text: Path, tmp_path: Path, capsys) -> None:
    files = []
    for name in ("diloco", "gasloc"):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(dump(load([], settings(text, method__name=name, run__rounds=2))))
    out = tmp_path / "both"
    assert main(["compare", *map(str, files), "--out", str(out)]) == 0
    first = (out / "diloco" / "summary.json").stat().st_mtime_ns
    said = capsys.readouterr().out
    assert "diloco" in said.lower() and "gasloc" in said.lower() and (out / "report.html").is_file()
    assert "One seed: differences may be chance. The same with --seeds 3" in said
    assert main(["compare", *map(str, files), "--out", str(out)]) == 0
    assert (out / "diloco" / "summary.json").stat().st_mtime_ns == first
    want = summary(out / "gasloc")
    for left in ("metrics.jsonl", "checkpoints"):  # interrupted after its last checkpoint; interrupted before its first
        (out / "gasloc" / "summary.json").unlink()
        if left == "checkpoints":
            shutil.rmtree(out / "gasloc" / left)
        assert main(["compare", *map(str, files), "--out", str(out), "--jobs", "2"]) == 0
        assert summary(out / "gasloc")["params_sha256"] == want["params_sha256"]
        assert summary(out / "gasloc")["wall_s"] == want["wall_s"]
    assert main(["compare", *map(str, files), "--out", str(out), "--set", "run.rounds=3"]) == 2
    assert "another configuration" in capsys.readouterr().err
    assert len(table.comparison([read.Run.load(out / n) for n in ("diloco", "gasloc")])) == 2


def test_the_demonstration_is_the_configuration_file_of_that_name() -> None:
    from gossamer.app.demo import jobs

    assert load([HERE.parent / "configs" / "demo.toml"]) == override(jobs()["GeoMesh"].config, {"name": "", "plan.name": "proportional"})
