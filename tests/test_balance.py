"""Balanced work on real processes of unlike speed: nobody waits for a straggler any more."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from small_runs import corpus, settings

from gossamer.app.config import dump, load
from gossamer.app.job import resolve
from gossamer.app.train import WORKER_MODULES
from gossamer.net.launch import launch

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
SPEEDS = (1.0, 0.5, 0.4, 0.3)


def fleet(path: Path) -> Path:
    """Four sites whose steps take 0.1 s over their speed, near each other."""
    site = '[[sites]]\nname = "s{}"\nregion = "here"\ngpu = "A100 80GB"\nup_mbps = 10000\ndown_mbps = 10000\noverhead_s = 0.1\nspeed = {}\n'
    link = '[[links]]\nbetween = ["here", "here"]\nrate_mbps = 10000\nrtt_ms = 0.1\n'
    path.write_text('name = "unlike"\n' + "".join(site.format(i, v) for i, v in enumerate(SPEEDS)) + link)
    return path


def test_balanced_work_ends_the_waiting_for_stragglers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    text, sites = corpus(tmp_path / "text"), fleet(tmp_path / "fleet.toml")
    configs = []
    for name in ("uniform", "awb"):
        sets = settings(
            text,
            method__name="geomesh",
            plan__name=f'"{name}"',
            plan__steps=20,
            run__rounds=3,
            fleet__name=f'"{sites}"',
            clock__pace_s=0.03,
        )
        configs.append(tmp_path / f"{name}.toml")
        configs[-1].write_text(dump(load([], sets)))
    uniform, balanced = (resolve(load([c])).method.plan for c in configs)
    assert uniform.tokens_per_round == balanced.tokens_per_round and balanced.steps[0] > 3 * balanced.steps[3]
    said: list[str] = []
    command = [sys.executable, "-m", "real_worker", str(tmp_path), *map(str, configs)]
    assert launch(4, command, tmp_path / "logs", say=said.append, env=PATHS, modules=WORKER_MODULES) == 0, said
    real = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(4)]
    waits = {c.stem: [waited(rounds) for rounds in zip(*(r[c.stem]["rounds"] for r in real), strict=True)] for c in configs}
    assert min(waits["awb"]) * 3 <= min(waits["uniform"]), waits  # of its best round each: other work on the machine delays any of them


def waited(rounds: tuple[dict[str, float], ...]) -> float:
    """The share of one round's time in which workers wait for slower ones."""
    spent = ("compute_s", "encode_s", "decode_s", "outer_s", "straggler_idle_s", "network_idle_s")
    return sum(r["straggler_idle_s"] for r in rounds) / sum(r[kind] for r in rounds for kind in spent)
