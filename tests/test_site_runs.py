"""Real runs with sites of 1, 2 and 3 ranks on the CPU: FSDP2 over gloo within, flat ranges between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import corpus, flags, settings

from gossamer.app.config import dump, load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.core.errors import BadInput
from gossamer.net.launch import launch
from gossamer.net.seats import Seats
from gossamer.train import checkpoint
from gossamer.train.recut import Place

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parent.parent
METHODS: dict[str, dict[str, object]] = {
    "ddp": {},
    "diloco": {},
    "geomesh": {"inner__lr": 1e-3},
    "gasloc": {"method__topology": '"two_peer"'},
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


def fleet(path: Path, ranks: Sequence[int]) -> Path:
    """A fleet file of one site a worker."""
    lines = ['[gpus."card"]', "tflops = 1.0", "memory_gb = 24"]
    for i, count in enumerate(ranks):
        lines += ["[[sites]]", f'name = "site-{i}"', f'region = "region-{i}"', 'gpu = "card"', "up_mbps = 100", "down_mbps = 100"]
        lines.append(f"ranks = {count}")
    for i in range(len(ranks)):
        for j in range(i):
            lines += ["[[links]]", f'between = ["region-{i}", "region-{j}"]', "rate_mbps = 100", "rtt_ms = 1"]
    path.write_text("\n".join(lines) + "\n")
    return path


def sets_of(text: Path, fleet_file: Path, **more: object) -> list[str]:
    base: dict[str, object] = {"fleet__name": f'"{fleet_file}"', "plan__name": '"uniform"', "plan__batch": 5, "run__rounds": 3}
    return settings(text, **(base | more))


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1, 2 and 3 ranks in one run, for each of the methods."""
    folder = tmp_path_factory.mktemp("sites")
    configs = []
    for name, more in METHODS.items():
        sets = sets_of(text, fleet(folder / "fleet.toml", (1, 2, 3)), method__name=f'"{name}"', **more)
        configs.append(folder / f"{name}.toml")
        configs[-1].write_text(dump(load(sets=sets)))
    resolve(load([configs[0]])).corpus()
    said: list[str] = []
    command = [sys.executable, str(ROOT / "tests" / "site_worker.py"), str(folder), *map(str, configs)]
    code = launch(6, command, folder / "logs", env=environment(), say=said.append, seats=Seats((0, 1, 1, 2, 2, 2)))
    assert code == 0, said
    return folder


@pytest.fixture(scope="module")
def simulated(trained: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    found = {}
    for name in METHODS:
        folder = simulate(resolve(load([trained / f"{name}.toml"])), trained / f"sim-{name}")
        found[name] = json.loads((folder.path / "summary.json").read_text()), folder.read_lines("metrics.jsonl")
    return found


def results(trained: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return json.loads((trained / f"{name}.json").read_text()), [json.loads((trained / f"{name}-{s}.json").read_text()) for s in range(6)]


@pytest.mark.parametrize("name", ["ddp", "diloco", "geomesh"])
def test_sites_of_unlike_rank_counts_hold_the_same_parameters_bit_for_bit(trained, name):
    assert len(set(results(trained, name)[0]["sha256"])) == 1


@pytest.mark.parametrize("name", METHODS)
def test_training_is_that_of_one_rank_to_rounding(trained, simulated, name):
    summary, records = simulated[name]
    whole, seats = results(trained, name)
    final = summary["final_loss_workers"]["workers"][0] if name == "gasloc" else summary["final_loss"]
    assert whole["losses"][0] == pytest.approx(final, abs=2e-3)
    losses = {(r["worker"], r["round"]): r["loss"] for r in records if r["kind"] == "round"}
    for worker, seat in ((0, 0), (1, 1), (2, 3)):
        for t in range(3):
            # the first round's losses are of the same weights and the same data, whatever the method
            assert seats[seat]["rounds"][t]["loss"] == pytest.approx(losses[worker, t + 1], abs=2e-5 if t == 0 else 2e-3)


@pytest.mark.parametrize("name", METHODS)
def test_the_ranks_of_a_worker_say_the_same(trained, name):
    _, seats = results(trained, name)
    for ranks in ((1, 2), (3, 4, 5)):
        for t in range(3):
            told = [{k: v for k, v in seats[s]["rounds"][t].items() if k != "bytes_sent"} for s in ranks]
            assert all(one == told[0] for one in told)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_a_sharded_model_is_that_of_the_whole_one(trained, name):
    whole, seats = results(trained, name)
    for worker, ranks in enumerate(((0,), (1, 2), (3, 4, 5))):
        for s in ranks:
            first, last, again = seats[s]["losses"]
            assert last == again == whole["losses"][worker] < first


def command(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment()}
    words = [sys.executable, "-m", "gossamer", *args]
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=600, check=False)


def test_death_of_a_rank_resume_and_another_rank_count(text: Path, tmp_path: Path):
    """One story, since each of its starts costs seconds."""
    file = fleet(tmp_path / "fleet.toml", (2, 1))
    sets = sets_of(text, file, method__name='"diloco"', checkpoint__every=1, checkpoint__keep=9, clock__kill="[[0, 2]]")
    run = tmp_path / "run"
    ended = command("train", *flags(sets), "--workers", "2", "--out", str(run))
    assert ended.returncode == 1, ended.stderr
    assert "worker 0 (rank 1) was killed (SIGKILL), so the run was ended" in ended.stderr
    assert checkpoint.latest(run / "checkpoints") in (1, 2)
    kept = checkpoint.latest(run / "checkpoints")
    shards = [checkpoint.read_part(run / "checkpoints", kept, 0, place=Place(r, 2)) for r in range(2)]
    whole = checkpoint.read_part(run / "checkpoints", kept, 0)
    thirds = [checkpoint.read_part(run / "checkpoints", kept, 0, place=Place(r, 3)) for r in range(3)]
    single = checkpoint.read_part(run / "checkpoints", kept, 1)
    for name, x in whole.state.x.items():
        assert torch.equal(x, torch.cat([part.state.x[name] for part in shards]))
        assert torch.equal(x, torch.cat([part.state.x[name] for part in thirds]))
        assert torch.equal(x, single.state.x[name])
        moment = f"exp_avg/{name}"
        assert torch.equal(whole.body[moment], torch.cat([part.body[moment] for part in thirds]))
    assert "rng" in thirds[1].body and "rng" not in thirds[2].body

    fleet(file, (1, 3))  # as many workers, other ranks
    again = command("train", "--workers", "2", "--resume", str(run))
    assert again.returncode == 0, again.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 3 and len(set(summary["params_sha256"])) == 1 and summary["worker_names"] == ["site-0", "site-1"]
    rounds = [r for r in RunFolder(run).read_lines("metrics.jsonl") if r["kind"] == "round"]
    assert sorted((r["worker"], r["round"]) for r in rounds) == [(w, t) for w in range(2) for t in range(1, 4)]
    assert summary["bytes_sent"][0] == sum(r["bytes_sent"] for r in rounds if r["worker"] == 0)


def test_the_others_go_on_when_a_rank_has_died_and_its_site_is_gone_at_once(text: Path, tmp_path: Path):
    file = fleet(tmp_path / "fleet.toml", (2, 1, 2))
    sets = sets_of(
        text, file, method__name='"gasloc"', method__topology='"two_peer"', run__rounds=6, clock__kill="[[0, 2]]", clock__pace_s=0.2
    )
    run = tmp_path / "run"
    ended = command("train", *flags(sets), "--workers", "3", "--out", str(run))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("the others go on without it") == 1 and "worker 0 (rank 1) was killed" in ended.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dead"] == [0] and summary["rounds"] == 6
    members = [r for r in RunFolder(run).read_lines("metrics.jsonl") if r["kind"] == "members"]
    assert len(members) == 1 and members[0]["absent"] == [0]


def test_muon_and_pair_codecs_are_refused(text: Path, tmp_path: Path):
    from gossamer.app.train import launch_local

    file = fleet(tmp_path / "fleet.toml", (2, 1))
    for more, word in (
        ({"inner__name": '"muon"', "inner__lr": 1e-3}, "muon"),
        ({"method__name": '"gasloc"', "method__codec": '"mod8"', "method__topology": '"one_peer"'}, "pair codec"),
    ):
        with pytest.raises(BadInput, match=word):
            launch_local(resolve(load(sets=sets_of(text, file, **more))), tmp_path / "run")
