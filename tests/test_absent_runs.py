"""Whole runs with a death in the middle: simulated and real ones tell one story, checkpoints close over the living, and both resume."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import command, flags, settings

from gossamer.app.config import load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.simulate import SimHooks, simulate
from gossamer.app.train import launch_local
from gossamer.core.errors import BadInput, RunFailed, Stopped
from gossamer.report.read import Run
from gossamer.report.words import alarms
from gossamer.train import checkpoint

pytestmark = pytest.mark.usefixtures("cache")

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 12


def sets_of(text: Path, **more: object) -> list[str]:
    base: dict[str, object] = {
        "method__name": "gasloc", "fleet__name": '"uniform-4"', "run__rounds": ROUNDS, "checkpoint__every": 3, "checkpoint__keep": 9,
        "clock__kill": "[[2, 5]]",
    }  # fmt: skip
    return settings(text, **(base | more))


def told(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return json.loads((folder / "summary.json").read_text()), RunFolder(folder).read_lines("metrics.jsonl")


def check_story(folder: Path, n: int = 4, gone: int = 2) -> int:
    """What both worlds must say of a death after round 5. Returns the first round without that worker."""
    summary, records = told(folder)
    assert summary["dead"] == [gone] and summary["rounds"] == ROUNDS
    assert [sha is None for sha in summary["params_sha256"]] == [i == gone for i in range(n)]
    rounds = [r for r in records if r["kind"] == "round"]
    assert max(r["round"] for r in rounds if r["worker"] == gone) == 5
    (members,) = [r for r in records if r["kind"] == "members"]
    assert members["absent"] == [gone] and members["worker"] == 0 and 5 <= members["round"] <= 10
    for r in rounds:
        assert set(r.get("absent", [])) <= ({gone} if 4 <= r["round"] - 1 < members["round"] else set())
        assert str(gone) not in r["weights"] or r["worker"] == gone or r["round"] <= 5
    assert summary["absent"] == sum(len(r.get("absent", [])) for r in rounds)
    everybody, living = list(range(n)), [i for i in range(n) if i != gone]
    parts = [sorted(checkpoint.read_manifest(folder / "checkpoints", t).parts) for t in (3, 6, 9, 12)]
    assert parts == [everybody, living, living, living]
    for i in living:
        mine = [r["loss"] for r in rounds if r["worker"] == i]
        assert len(mine) == ROUNDS
        assert all(after < before + 0.3 for before, after in itertools.pairwise(mine)), "the loss jumps"
    assert any(f"worker {gone} died after round 5, and the others went on" in sentence for sentence in alarms([Run.load(folder)]))
    return int(members["round"])


def test_a_simulated_death_is_in_the_metrics_and_the_loss_does_not_jump(text: Path, tmp_path: Path) -> None:
    whole, _ = told(simulate(resolve(load([], sets_of(text, clock__kill="[]"))), tmp_path / "whole", quiet=True).path)
    dead = simulate(resolve(load([], sets_of(text))), tmp_path / "dead", quiet=True).path
    check_story(dead)
    summary, records = told(dead)
    assert abs(summary["final_loss"] - whole["final_loss"]) < 0.1
    evals = [r for r in records if r["kind"] == "eval"]
    assert [r["round"] for r in evals] == list(range(1, ROUNDS + 1))
    assert whole["dead"] == [] and whole["absent"] == 0


def gossamer(*arguments: str) -> str:
    """What a command that succeeds says on stderr."""
    code, said = command(*arguments)
    assert code == 0, said
    return said


@pytest.mark.timeout(600)
def test_one_of_eight_real_workers_is_killed_and_survived_by_the_others(text: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle. What the whole fleet would have come to is simulated: without a death, both worlds have the same bits."""
    out, fleet = tmp_path / "real", '"uniform-8"'
    said = gossamer("train", "--workers", "8", "--out", str(out), *flags(sets_of(text, fleet__name=fleet, clock__kill="[[5, 5]]")))
    assert "worker 5 was killed (SIGKILL), the others go on without it." in said
    check_story(out, 8, 5)
    assert "worker 5 died after round 5" in (out / "report.html").read_text()
    whole, _ = told(simulate(resolve(load([], sets_of(text, fleet__name=fleet, clock__kill="[]"))), tmp_path / "whole", quiet=True).path)
    assert abs(told(out)[0]["final_loss"] - whole["final_loss"]) < 0.1


@pytest.fixture(scope="module")
def without_first(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished real run, compressed and over pairs, whose worker 0 died after round 4."""
    folder = tmp_path_factory.mktemp("first")
    more = {"fleet__name": '"uniform-3"', "clock__kill": "[[0, 4]]", "method__topology": '"one_peer"', "method__codec": '"mod4"'}
    gossamer("train", "--workers", "3", "--out", str(folder / "real"), *flags(sets_of(text, eval__every=0, **more)))
    return folder / "real"


@pytest.mark.timeout(600)
def test_worker_0_may_die_too(without_first: Path) -> None:
    summary, records = told(without_first)
    assert summary["dead"] == [0] and summary["rounds"] == ROUNDS
    assert sorted(checkpoint.read_manifest(without_first / "checkpoints", 12).parts) == [1, 2]
    assert {r["worker"] for r in records if r["kind"] == "round"} == {0, 1, 2}
    assert (without_first / "report.html").is_file()


@pytest.mark.timeout(600)
def test_all_go_on_from_a_checkpoint_that_one_has_no_part_in(without_first: Path, tmp_path: Path) -> None:
    """Worker 0 takes the state of worker 1."""
    out = Path(shutil.copytree(without_first, tmp_path / "again"))
    (out / "summary.json").unlink()
    (out / "checkpoints" / "round-000012" / "manifest.json").unlink()
    gossamer("train", "--workers", "3", "--resume", str(out))
    summary, records = told(out)
    assert summary["dead"] == [] and all(summary["params_sha256"])
    mine = {i: sorted(r["round"] for r in records if r["kind"] == "round" and r["worker"] == i) for i in (0, 1)}
    assert mine == {0: [*range(1, 5), *range(10, 13)], 1: [*range(1, 13)]}


def stopped_and_resumed(stop: int, sets: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The summary of a simulation that was asked to stop when its first worker came to a boundary, and went on."""
    original = SimHooks.boundary

    def interrupt(self, worker, round, time_s, state, body):
        self.stop_asked = self.stop_asked or round == stop
        return original(self, worker, round, time_s, state, body)

    with monkeypatch.context() as patch:
        patch.setattr(SimHooks, "boundary", interrupt)
        with pytest.raises(Stopped):
            simulate(resolve(load([], sets)), out, quiet=True)
    simulate(resolve(load([out / "config.toml"])), resume=RunFolder.existing(out), quiet=True)
    return told(out)[0]


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_simulation_with_a_death_resumes_to_the_same_bits(stop: int, text: Path, tmp_path: Path, monkeypatch) -> None:
    """Before and after it. (A stop at the very boundary of the death is another story: the others are not where they would have been.)"""
    sets = sets_of(text, checkpoint__every=1, checkpoint__keep=20)
    want, _ = told(simulate(resolve(load([], sets)), tmp_path / "whole", quiet=True).path)
    got = stopped_and_resumed(stop, sets, tmp_path / "cut", monkeypatch)
    assert got["params_sha256"] == want["params_sha256"]
    assert got["bytes_sent"] == want["bytes_sent"]
    check_story(tmp_path / "cut")


@pytest.mark.parametrize(("stop", "same"), [(2, True), (7, False), (8, False), (9, False), (10, True)])
def test_a_simulation_with_a_return_goes_on(stop: int, same: bool, text: Path, tmp_path: Path, monkeypatch) -> None:
    """Who has come back is there again, and the rest have nobody to wait for in vain. Between a death and its return the bits are others:
    what the dead worker had of the data is in no checkpoint."""
    sets = sets_of(text, clock__back="[[2, 7]]", checkpoint__every=1, checkpoint__keep=20)
    want, _ = told(simulate(resolve(load([], sets)), tmp_path / "whole", quiet=True).path)
    got = stopped_and_resumed(stop, sets, tmp_path / "cut", monkeypatch)
    assert got["dead"] == [] and got["rounds"] == ROUNDS
    assert (got["params_sha256"] == want["params_sha256"]) or not same


def test_a_simulated_worker_comes_back(text: Path, tmp_path: Path) -> None:
    folder = simulate(resolve(load([], sets_of(text, clock__back="[[2, 8]]"))), tmp_path / "back", quiet=True).path
    summary, records = told(folder)
    gone, came = [r for r in records if r["kind"] == "members"]
    assert (gone["absent"], came["absent"]) == ([2], []) and came["round"] > 8
    assert summary["dead"] == [] and all(summary["params_sha256"])
    mine = [r["round"] for r in records if r["kind"] == "round" and r["worker"] == 2]
    assert mine == [1, 2, 3, 4, 5, *range(came["round"] + 1, ROUNDS + 1)]
    assert any(f"worker 2 died after round 5 and was back in round {came['round'] + 1}" in said for said in alarms([Run.load(folder)]))
    assert sorted(checkpoint.read_manifest(folder / "checkpoints", 12).parts) == [0, 1, 2, 3]


def test_nobody_comes_back_by_itself_in_a_real_run(text: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only a simulated worker comes back by itself"):
        launch_local(resolve(load([], sets_of(text, clock__back="[[2, 8]]"))), tmp_path / "real")
    assert not (tmp_path / "real").exists()


def test_who_would_come_back_after_the_last_round_stays_dead(text: Path, tmp_path: Path) -> None:
    """Its sponsor's model, handed over at the last boundary, would count twice in the mean."""
    folder = simulate(resolve(load([], sets_of(text, clock__back="[[2, 11]]"))), tmp_path / "late", quiet=True).path
    summary, _ = told(folder)
    assert summary["dead"] == [2] and summary["params_sha256"][2] is None and summary["rounds"] == ROUNDS


def test_a_synchronous_run_ends_with_the_death_of_a_worker(text: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="worker 2 died after round 5"):
        simulate(resolve(load([], sets_of(text, method__name="diloco"))), tmp_path / "run", quiet=True)
    with pytest.raises(RunFailed, match="worker 2 died after round 5"):
        simulate(resolve(load([], sets_of(text, run__on_death="stop"))), tmp_path / "gossip", quiet=True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"method__name": "diloco", "run__on_death": "continue"}, "cannot go on without a worker"),
        ({"clock__kill": [[i, 2] for i in range(4)], "clock__back": [[0, 4]]}, "no worker alive at round 2"),
        ({"clock__kill": [[0, 2], [1, 3], [2, 4], [3, 4]], "clock__back": [[0, 5]]}, "no worker alive at round 4"),
        ({"method__topology": '"one_peer_exp"', "run__on_death": "continue"}, "cannot go on without a worker"),
        ({"clock__kill": "[[4, 5]]"}, "worker from 0 to 3"),
        ({"clock__kill": "[[2, 12]]"}, "a round from 1 to 11"),
        ({"clock__kill": "[[2, 5], [2, 6]]"}, "names a worker twice"),
        ({"clock__back": "[[2, 5]]"}, "later than it died"),
        ({"clock__kill": "[[0, 1], [1, 1], [2, 1], [3, 1]]"}, "leave at least one"),
        (
            {"method__name": "halos", "checkpoint__every": 0, "clock__kill": "[[2, 1]]", "clock__back": "[[2, 2]]"},
            "without it \\(gossip\\)",
        ),
        ({"method__name": "diloco", "clock__kill": "[]", "run__deadline_s": 1.0}, "a gossip method"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, object], words: str, text: Path) -> None:
    with pytest.raises(BadInput, match=words):
        resolve(load([], sets_of(text, **more)))
