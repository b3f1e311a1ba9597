"""A run that goes back to an earlier round, or on with other workers: nothing of it is lost, and its mean, tokens and schedule go on."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from small_runs import settings

from gossamer.app import train
from gossamer.app.config import load
from gossamer.app.early import says_nothing_new
from gossamer.app.folder import RunFolder
from gossamer.app.job import Job, resolve
from gossamer.app.metrics import check_unchanged, facts_of
from gossamer.app.resuming import resize as resizing
from gossamer.app.resuming import resized, rollback
from gossamer.app.resuming.resize import resize, settle, settled
from gossamer.app.resuming.resized import part_of
from gossamer.app.resuming.rollback import roll_back
from gossamer.app.simulate import simulate
from gossamer.cli import main
from gossamer.core.combine import mean
from gossamer.core.errors import BadInput
from gossamer.core.outer import STEP
from gossamer.core.tree import Tree, sha256
from gossamer.report.planned import planned_of
from gossamer.train import checkpoint
from gossamer.train.recut import ALONE

pytestmark = pytest.mark.usefixtures("cache")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["diloco", "gasloc"])
def whole(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four workers that has come to its end, with the checkpoints of all its rounds."""
    more = {"method__name": request.param, "fleet__name": '"uniform-4"', "checkpoint__every": 1, "checkpoint__keep": 9}
    out = tmp_path_factory.mktemp(request.param) / "run"
    return simulate(resolve(load([], settings(text, **more))), out, quiet=True).path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_back_to_an_earlier_round_and_on_to_the_same_end(run: Path) -> None:
    before = files_of(run)
    assert main(["simulate", "--resume", str(run), "--round", "2"]) == 0
    after = files_of(run)
    want, got = json.loads(before["summary.json"]), json.loads(after["summary.json"])
    assert got["params_sha256"] == want["params_sha256"] and got["tokens"] == want["tokens"]
    aside = files_of(run / "aside" / "1")
    kept = {name: data for name, data in before.items() if after.get(name) != data}
    assert kept and all(aside.get(name) == data for name, data in kept.items()), "what is gone or changed is there as it was"
    assert {n.split("/")[1] for n in aside if n.startswith("checkpoints/")} == {"round-000003", "round-000004"}
    assert json.loads(aside["from.json"]) == {"round": 2}


def test_a_round_that_is_not_kept_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(run)
    assert main(["simulate", "--resume", str(run), "--round", "7"]) == 2
    assert "no whole checkpoint of round 7 to go back to: the rounds that are kept are 1, 2, 3, 4" in capsys.readouterr().err
    assert main(["simulate", "--round", "2"]) == 2
    assert "give it with --resume" in capsys.readouterr().err
    assert files_of(run) == before


def test_what_is_put_aside_says_from_the_first_why(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: object) -> None:
        raise Killed

    before = files_of(run)
    monkeypatch.setattr(rollback.os, "replace", dies)
    monkeypatch.setattr(rollback, "write_atomically", lambda path, text: path.write_text(text))
    with pytest.raises(Killed):
        roll_back(RunFolder(run), 2)
    after = files_of(run)
    assert json.loads(after.pop("aside/1/from.json")) == {"round": 2} and after == before


@pytest.mark.parametrize("name", ["manifest.json", "worker-3/rank-0.safetensors"])
def test_a_damaged_round_is_not_gone_back_to_and_nothing_moves(run: Path, name: str) -> None:
    file = checkpoint.round_folder(run / "checkpoints", 2) / name
    file.write_bytes(file.read_bytes()[:-9])
    before = files_of(run)
    with pytest.raises(BadInput, match=rf"round 2 .*{name} is damaged.* Nothing has been moved; .* sound: 1, 3, 4"):
        roll_back(RunFolder(run), 2)
    with pytest.raises(BadInput, match=r"sound: 3, 4$"):
        roll_back(RunFolder(run), 2, since=2)
    assert files_of(run) == before


def as_real(run: Path, round: int) -> Job:
    """As if it were a real run that was stopped after `round`."""
    for r in checkpoint.rounds(run / "checkpoints"):
        if r > round:
            shutil.rmtree(checkpoint.round_folder(run / "checkpoints", r))
    (run / "summary.json").unlink()
    facts = json.loads((run / "facts.json").read_text())
    (run / "facts.json").write_text(json.dumps(facts | {"world": "net"}))
    return resolve(load([run / "config.toml"]))


@pytest.mark.parametrize("workers", [2, 6])
def test_with_other_workers_mean_tokens_and_schedule_go_on(run: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old = as_real(run, 2)
    before = [checkpoint.read_part(run / "checkpoints", 2, w) for w in range(4)]
    with pytest.raises(BadInput, match=r"--workers 4; or, to go on with \d from the mean .* --set checkpoint.resize=mean"):
        resize(RunFolder(run), old, workers, [])
    config = (run / "config.toml").read_bytes()
    job = resize(RunFolder(run), old, workers, ["checkpoint.resize=mean"])
    assert resolve(load([run / "config.toml"])).run_id == job.run_id == int(RunFolder(run).facts()["run_id"], 16)
    assert (run / "aside" / "1" / "config.toml").read_bytes() == config
    with monkeypatch.context() as patch:
        for name in ("launch", "load_early"):
            patch.setattr(train, name, lambda *_, **__: 0)
        train.launch_local(job, run, resume=True)
    plan = planned_of(run)
    assert plan is not None and (plan.workers, plan.rounds) == (workers, job.method.rounds), "what is planned now, for who watches"

    tokens = before[0].state.tokens
    assert job.n == workers and job.method.since == (2, tokens)
    rest = job.method.total_tokens - old.method.total_tokens
    assert 0 <= rest < job.method.plan.tokens_per_round, "the planned tokens are the same, up to a whole round"
    assert job.method.rounds == 2 + -(-2 * 4 // workers)

    parts = [part_of(job, run / "checkpoints", 2, w, CPU, ALONE, job.seat(w)) for w in range(workers)]
    assert {(p.state.round, p.state.tokens) for p in parts} == {(2, tokens)}
    for new, was in zip(parts, before, strict=False):  # who stays keeps its inner optimizer and its place in the data
        assert new.body.keys() == was.body.keys() and new.body["cursor"] == was.body["cursor"]
    for new in parts[4:]:
        assert new.body == {"cursor": before[0].body["cursor"], "steps": 0}
    x, anchors = mean([p.state.x for p in before]), [p.state.x for p in parts]
    if old.method.synchronous:
        assert {sha256(tree) for tree in anchors} == {sha256(before[0].state.x)}
        assert all(sha256(p.state.outer["momentum"]) == sha256(before[0].state.outer["momentum"]) for p in parts)
        return
    assert len({sha256(tree) for tree in anchors[:4]}) > 1, "who stays is not made equal"
    assert all(close(tree, x, 0.0) for tree in anchors[4:])
    assert close(mean(anchors), x, 1e-6), "the mean of the fleet is what it was"
    if workers == 2:
        assert not close(mean([p.state.x for p in before[:2]]), x, 1e-6), "without those who left it would not be"


def test_moving_those_who_stay_is_no_momentum(text: Path, tmp_path: Path) -> None:
    more = {"method__name": "gasloc", "method__momentum": "mixed", "fleet__name": '"uniform-3"', "checkpoint__every": 1, "run__rounds": 3}
    run = simulate(resolve(load([], settings(text, **more))), tmp_path / "run", quiet=True).path
    old = as_real(run, 2)
    job = resize(RunFolder(run), old, 2, ["checkpoint.resize=mean"])
    for worker in range(2):
        was = checkpoint.read_part(run / "checkpoints", 2, worker).state
        now = part_of(job, run / "checkpoints", 2, worker, CPU, ALONE, job.seat(worker)).state
        steps = [{k: v - s.outer["previous"][k] for k, v in s.x.items()} for s in (was, now)]
        assert not close(was.x, now.x, 1e-5), "it was moved"
        assert close(*steps, 1e-6)


class Killed(BaseException):
    """In place of a signal."""


def resize_killed(run: Path, job: Job, at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a change to three workers came as far as its write number `at`, where it was killed."""
    left = [at]

    def dies(real):
        def call(*args):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return real(*args)

        return call

    with monkeypatch.context() as patch:
        for name in ("write_atomically", "copy_records"):
            patch.setattr(resizing, name, dies(getattr(resizing, name)))
        patch.setattr(resizing.shutil, "copyfile", dies(shutil.copyfile))
        try:
            resize(RunFolder(run), job, 3, ["checkpoint.resize=mean"])
        except Killed:
            return True
    return False


@pytest.mark.parametrize("whole", ["gasloc"], indirect=True)
def test_killed_at_any_write_the_same_command_and_others_go_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, sets = as_real(run, 2), ["checkpoint.resize=mean"]
    for at in range(20):
        broken = tmp_path / f"broken-{at}"
        shutil.copytree(run, broken)
        killed = resize_killed(broken, old, at, monkeypatch)
        for workers in (3, 2, 4):
            copy = RunFolder(tmp_path / f"{at}-{workers}")
            shutil.copytree(broken, copy.path)
            job = resolve(load([copy.path / "config.toml"]))
            if job.n == workers == 3:  # it is written down: what is given again says nothing new
                assert says_nothing_new(copy.path, job.config, sets) and not says_nothing_new(
                    copy.path, job.config, ["checkpoint.resize=refuse"]
                )
                assert not says_nothing_new(copy.path, job.config, ["seed=9"]) and not says_nothing_new(
                    copy.path, job.config, ["plan.steps=2"]
                )
            elif job.n != workers:
                job = resize(copy, job, workers, sets)
            assert settled(copy, job)["run_id"] == f"{job.run_id:016x}"
            facts = settle(copy, job)
            check_unchanged(job, job.corpus(), facts)
            assert copy.facts() == facts == facts_of(job, job.corpus(), "net") and job.n == workers == len(facts["steps"])
            again = resolve(load([copy.path / "config.toml"]))
            assert again.run_id == job.run_id
            if again.config.checkpoint.resized:
                assert [one[:2] for one in again.config.checkpoint.resized] == [[2, 4]], "the checkpoint is of four"
        if not killed:
            break
    assert at > 6, "a kill before each write"


def close(a: Tree, b: Tree, atol: float) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0.0, atol=atol) for k in a)


def test_what_cannot_go_on_with_others_is_said(run: Path) -> None:
    job = resolve(load([run / "config.toml"]))
    asked = ["checkpoint.resize=mean"]
    with pytest.raises(BadInput, match="has come to its end"):
        resize(RunFolder(run), job, 2, asked)
    job = as_real(run, 2)
    with pytest.raises(BadInput, match=r"of --set, only fleet.name, fleet.workers, checkpoint.resize may be given"):
        resize(RunFolder(run), job, 2, [*asked, "plan.steps=1"])
    with pytest.raises(BadInput, match="does not fit fleet azure-4"):
        resize(RunFolder(run), job, 2, [*asked, "fleet.name=azure-4"])
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(BadInput, match="no whole checkpoint"):
        resize(RunFolder(run), job, 2, asked)


def test_parts_are_read_one_at_a_time(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large models a machine cannot hold those of all workers."""
    read = checkpoint.read_part
    there: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(*given: object) -> checkpoint.Part:
        nonlocal most
        gc.collect()
        part = read(*given)  # type: ignore[arg-type]
        there.append(weakref.ref(next(iter(part.state.x.values()))))
        most = max(most, sum(ref() is not None for ref in there))
        return part

    monkeypatch.setattr(checkpoint, "read_part", counted)
    found = resized._means(whole / "checkpoints", 2, range(4), CPU, ALONE)
    assert most <= 2
    states = [read(whole / "checkpoints", 2, i).state for i in range(4)]
    assert sha256(found[0]) == sha256(mean([s.x for s in states]))
    assert found[1].keys() == states[0].outer.keys()
    for key, tree in found[1].items():
        assert sha256(tree) == sha256(states[0].outer[key] if key == STEP else mean([s.outer[key] for s in states])), key
