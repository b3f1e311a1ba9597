"""Real runs with sites of 1, 2 and 3 ranks on the CPU: FSDP2 over gloo within, flat ranges between."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import command, flags, settings

from gossamer.app.config import dump, load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.app.train import WORKER_MODULES, launch_local
from gossamer.core.errors import BadInput
from gossamer.net.launch import launch
from gossamer.net.site import TorchSite
from gossamer.real.board import Board, PeerLost
from gossamer.real.seats import Seats
from gossamer.train import checkpoint
from gossamer.train.recut import Place
from gossamer.train.shard import share

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("cache")]
ROOT = Path(__file__).resolve().parent.parent
METHODS: dict[str, dict[str, object]] = {
    "ddp": {},
    "diloco": {},
    "geomesh": {"inner__lr": 1e-3},
    "gasloc": {"method__topology": '"two_peer"'},
    "adapter": {
        "method__name": '"diloco"', "model__adapter": "{rank = 2, targets = ['q_proj', 'v_proj'], whole = ['norm']}",
        "model__activation_checkpointing": "true",
    },
}  # fmt: skip


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
        sets = sets_of(text, fleet(folder / "fleet.toml", (1, 2, 3)), **{"method__name": f'"{name}"', **more})
        configs.append(folder / f"{name}.toml")
        configs[-1].write_text(dump(load(sets=sets)))
    resolve(load([configs[0]])).corpus()
    return train("gloo", folder, configs)


def train(wire: str, folder: Path, configs: Sequence[Path]) -> Path:
    """Runs site_worker.py in all seats."""
    said: list[str] = []
    command = [sys.executable, "-m", "site_worker", wire, str(folder), *map(str, configs)]
    code = launch(6, command, folder / "logs", env=environment(), say=said.append, seats=Seats((0, 1, 1, 2, 2, 2)), modules=WORKER_MODULES)
    assert code == 0, said
    return folder


def test_over_grpc_sites_of_several_ranks_have_the_bits_of_gloo(trained, tmp_path):
    names = ("geomesh", "gasloc")
    far = train("grpc", tmp_path, [trained / f"{name}.toml" for name in names])
    for name in names:
        (here, seats), (there, others) = results(trained, name), results(far, name)
        assert there == here
        assert [one["rounds"] for one in others] == [one["rounds"] for one in seats]


@pytest.fixture(scope="module")
def simulated(trained: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    found = {}
    for name in METHODS:
        folder = simulate(resolve(load([trained / f"{name}.toml"])), trained / f"sim-{name}")
        found[name] = json.loads((folder.path / "summary.json").read_text()), folder.read_lines("metrics.jsonl")
    return found


def results(trained: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return json.loads((trained / f"{name}.json").read_text()), [json.loads((trained / f"{name}-{s}.json").read_text()) for s in range(6)]


@pytest.mark.parametrize("name", ["ddp", "diloco", "geomesh", "adapter"])
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


def test_death_of_a_rank_ends_a_synchronous_run(text: Path, tmp_path: Path):
    sets = sets_of(text, fleet(tmp_path / "fleet.toml", (2, 1)), method__name='"diloco"', clock__kill="[[0, 2]]")
    code, said = command("train", *flags(sets), "--workers", "2", "--out", str(tmp_path / "run"))
    assert code == 1, said
    assert "worker 0 (rank 1) was killed (SIGKILL), so the run was ended" in said


def rewound(run: Path, to: Path, round: int) -> Path:
    """A copy of a finished run as it was after `round`."""
    shutil.copytree(run, to)
    (to / "summary.json").unlink()
    for later in (to / "checkpoints").iterdir():
        if int(later.name.removeprefix("round-")) > round:
            shutil.rmtree(later)
    return to


def test_resume_with_the_same_ranks_and_with_others(text: Path, tmp_path: Path):
    file = fleet(tmp_path / "fleet.toml", (2, 1))
    sets = sets_of(text, file, method__name='"diloco"', checkpoint__every=1, checkpoint__keep=9)
    whole = tmp_path / "run"
    code, said = command("train", *flags(sets), "--workers", "2", "--out", str(whole))
    assert code == 0, said

    folder = whole / "checkpoints"
    shards = [checkpoint.read_part(folder, 2, 0, place=Place(r, 2)) for r in range(2)]
    joined, single = checkpoint.read_part(folder, 2, 0), checkpoint.read_part(folder, 2, 1)
    thirds = [checkpoint.read_part(folder, 2, 0, place=Place(r, 3)) for r in range(3)]
    for name, x in joined.state.x.items():
        for cut in (shards, thirds):
            assert torch.equal(x, torch.cat([part.state.x[name] for part in cut]))
            assert torch.equal(joined.body[f"exp_avg/{name}"], torch.cat([part.body[f"exp_avg/{name}"] for part in cut]))
        assert torch.equal(x, single.state.x[name])
    assert "rng" in thirds[1].body and "rng" not in thirds[2].body

    summaries = [json.loads((whole / "summary.json").read_text())]
    for name, ranks in (("same", (2, 1)), ("others", (1, 3))):
        fleet(file, ranks)
        code, said = command("train", "--workers", "2", "--resume", str(rewound(whole, tmp_path / name, 2)))
        assert code == 0, said
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
    whole_run, same, others = summaries
    assert len(set(whole_run["params_sha256"])) == 1 and same["params_sha256"] == whole_run["params_sha256"]
    assert len(set(others["params_sha256"])) == 1
    assert others["final_loss"] == pytest.approx(whole_run["final_loss"], abs=2e-3)
    rounds = [r for r in RunFolder(whole).read_lines("metrics.jsonl") if r["kind"] == "round"]
    assert sorted((r["worker"], r["round"]) for r in rounds) == [(w, t) for w in range(2) for t in range(1, 4)]
    assert whole_run["bytes_sent"] == [sum(r["bytes_sent"] for r in rounds if r["worker"] == w) for w in range(2)]
    assert whole_run["bytes_sent"] == whole_run["bytes_received"]


def test_the_others_go_on_when_a_rank_has_died_and_its_site_is_gone_at_once(text: Path, tmp_path: Path):
    file = fleet(tmp_path / "fleet.toml", (2, 1, 2))
    sets = sets_of(
        text, file, method__name='"gasloc"', method__topology='"two_peer"', run__rounds=6, clock__kill="[[0, 2]]", clock__pace_s=0.2
    )
    run = tmp_path / "run"
    code, said = command("train", *flags(sets), "--workers", "3", "--out", str(run))
    assert code == 0, said
    assert said.count("the others go on without it") == 1 and "worker 0 (rank 1) was killed" in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dead"] == [0] and summary["rounds"] == 6
    members = [r for r in RunFolder(run).read_lines("metrics.jsonl") if r["kind"] == "members"]
    assert len(members) == 1 and members[0]["absent"] == [0]


def test_muon_and_pair_codecs_are_refused(text: Path, tmp_path: Path):

    file = fleet(tmp_path / "fleet.toml", (2, 1))
    for more, word in (
        ({"inner__name": '"muon"', "inner__lr": 1e-3}, "muon"),
        ({"method__name": '"gasloc"', "method__codec": '"mod8"', "method__topology": '"one_peer"'}, "pair codec"),
    ):
        with pytest.raises(BadInput, match=word):
            launch_local(resolve(load(sets=sets_of(text, file, **more))), tmp_path / "run")


def test_two_ranks_of_a_worker_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match="2 ranks on this machine, which has 1 CUDA devices"):
        TorchSite(torch.distributed.HashStore(), 0, 2, device="cuda")


@pytest.mark.parametrize("count, ranks, size", [(5, 3, 8), (5, 3, 1), (2, 3, 4), (8, 2, 3), (7, 1, 2)])
def test_ranks_share_a_batch_in_order_and_in_as_many_pieces(count, ranks, size):
    batch = torch.arange(count)[:, None]
    shares = [share(batch, size, SimpleNamespace(rank=r, size=ranks)) for r in range(ranks)]
    assert len({len(pieces) for pieces in shares}) == 1 and all(1 <= len(piece) <= size for pieces in shares for piece, _ in pieces)
    taken = torch.cat([piece for pieces in shares for piece, part in pieces if part])
    assert torch.equal(taken, batch)
    assert sum(part for pieces in shares for _, part in pieces) == pytest.approx(1.0)


def test_the_death_of_a_rank_is_that_of_its_worker():
    told: list[frozenset[int]] = []
    board = Board(survives=True, seats=Seats([0, 0, 1, 2]), me=2)
    board.on_death = told.append
    board.gone(1, "closed")
    board.gone(0, "closed")
    assert told == [frozenset({0, 1})] and set(board.dead) == {0, 1}
    own = Board(survives=True, seats=Seats([0, 0, 1]), me=0)
    own.gone(1, "closed")
    with pytest.raises(PeerLost, match=r"worker 0 \(rank 1\) is gone"):
        own.check()
