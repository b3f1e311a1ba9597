"""A real run that is killed again and again while it writes checkpoints resumes every time, and ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from small_runs import settings

from gossamer.app.config import load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.metrics import facts_of
from gossamer.app.simulate import simulate
from gossamer.app.train import WORKER_MODULES
from gossamer.net.launch import Child, start
from gossamer.train import checkpoint

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.skipif(sys.platform != "linux", reason="processor time of a process, forks")]

KILLS, ROUNDS = 20, 130


class Generations:
    """The workers of a run, started anew after each death."""

    def __init__(self, out: Path) -> None:
        self.out, self._number = out, count()

    def start(self, seconds: tuple[float, float] = (0.0, 0.0)) -> list[Child]:
        """`seconds` of its processor time after which each is killed; 0: not."""
        store = self.out.parent / f"store-{next(self._number)}"
        there = checkpoint.latest(self.out / "checkpoints") is not None
        way = ["--resume", str(self.out)] if there else ["--out", str(self.out), str(self.out / "config.toml")]
        return [
            start(
                i,
                2,
                [sys.executable, "-m", "killed", f"{seconds[i]:.6f}", "train", *way],
                self.out.parent / f"{i}.log",
                store,
                {},
                WORKER_MODULES,
            )
            for i in (0, 1)
        ]

    def kill(self, workers: list[Child]) -> None:
        for child in workers:
            if child.process.poll() is None:
                os.killpg(child.process.pid, signal.SIGKILL)
        for child in workers:
            child.process.wait(60)

    def until(self, workers: list[Child], round: int) -> None:
        while (checkpoint.newest(self.out / "checkpoints") or 0) < round:
            assert all(child.process.poll() is None for child in workers), self.said()
            time.sleep(0.005)

    def said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.out.parent.glob("*.log"))


def spent_s(child: Child) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.timeout(900)
def test_killed_at_any_instant_it_resumes_and_ends_with_the_same_bits(text: Path, tmp_path: Path) -> None:
    sets = settings(
        text, method__name="gasloc", method__overlap=1.0, method__outer='"adamw"', method__outer_lr=0.01, fleet__name='"uniform-2"',
        run__rounds=ROUNDS, run__on_death='"stop"', checkpoint__every=1, eval__every=0, plan__steps=1, plan__batch=1,
    )  # fmt: skip
    job = resolve(load([], sets))
    out = tmp_path / "run"
    corpus = job.corpus()
    RunFolder.create(out, job.config, facts_of(job, corpus, "net"), corpus.tokenizer)
    run = Generations(out)

    workers = run.start()
    run.until(workers, 1)
    begun_s = spent_s(workers[0])
    run.until(workers, 6)
    round_s = max(0.001, (spent_s(workers[0]) - begun_s) / 5)
    run.kill(workers)  # the first time

    draw = random.Random(6)
    for kill in range(1, KILLS):
        first_s = draw.uniform(0.0, begun_s) if kill % 5 == 0 else begun_s + draw.uniform(0.0, 5 * round_s)
        victim = draw.randrange(2)
        workers = run.start((first_s, 0.0) if victim == 0 else (0.0, first_s))
        assert workers[victim].process.wait(300) == -signal.SIGPROF, run.said()
        run.kill(workers)
        assert checkpoint.latest(out / "checkpoints") is not None, "what was whole stays whole"
        assert not (out / "summary.json").exists()
    workers = run.start()
    assert [child.process.wait(600) for child in workers] == [0, 0], run.said()

    want = json.loads((simulate(job, tmp_path / "sim", quiet=True).path / "summary.json").read_text())
    got = RunFolder(out).summary()
    assert got["params_sha256"] == want["params_sha256"]
    records = RunFolder(out).read_lines("metrics.jsonl")
    for w in (0, 1):
        assert [r["round"] for r in records if r["kind"] == "round" and r["worker"] == w] == list(range(1, ROUNDS + 1))
    shutil.rmtree(out)
