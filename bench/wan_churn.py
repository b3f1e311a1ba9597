"""An hour of churn, compressed: a site leaves, dies or joins, sixty times, each time two rounds after the coordinator has seen the last.

    python -m bench.wan_churn --emulator PATH [--events 60] [--every 2] [--rounds 360] [--method diloco]

Four sites on lines of 100 Mbit/s and 40 ms round trip. The first stays; the others, drawn with a fixed seed, leave (SIGTERM), are killed
(SIGKILL) or join again with their own folder, so that two to four are there. Beside it the same configuration runs undisturbed in the
simulator, whose bits are those of sites, with several seeds: their spread is the noise.

    excess   = final loss with churn less the undisturbed one of the same seed, nats; with as many sites as took part in the mean: less
               that of undisturbed runs of 2, 3 and 4 sites, a straight line between them (fewer sites see fewer tokens)
    noise    = largest less smallest final loss of the undisturbed seeds
    memory   = resident MB of the site that stays, and of the coordinator: a line through all samples after the first quarter, its rise
               over the rest of the run, and the medians of the second and the last quarter; open files the same

Needs root, Linux and an emulator of lines (bench/wan_field.py). Writes results/wan_churn.json.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.common import command, machine, write
from bench.wan_field import SITES, Field, Wan, emulator_of, field, sets_of
from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate

STEPS = 8
BASE: dict[str, object] = {
    "fleet__name": "uniform-4", "plan__name": "uniform", "plan__steps": STEPS, "plan__batch": 4, "plan__sequence": 64,
    "model__preset": "micro", "data__vocab_size": 512, "data__limit_mb": 8.0, "eval__every": 0,
    "eval__sequences": 256, "eval__batch": 64, "run__device": "cpu",
    "inner__name": "adamw", "inner__lr": 4e-3, "checkpoint__every": 4, "wan__deadline_s": 12.0,
}  # fmt: skip
METHODS: dict[str, dict[str, object]] = {
    "diloco": {"method__name": "diloco"},
    "geomesh": {"method__name": "geomesh", "plan__name": "uniform"},
    "gossip": {"method__name": "gasloc", "method__topology": "two_peer"},
}
STAYS = SITES[0]
ROOM = 12
"""Rounds at the end in which nothing happens."""


class Memory:
    """Samples of processes, twice a second."""

    def __init__(self, run: Field, names: list[str]) -> None:
        self.samples: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
        self._run, self._over = run, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        begin_s = time.monotonic()
        while not self._over.wait(0.5):
            for name, found in self.samples.items():
                if self._run.processes[name].poll() is None:
                    found.append((time.monotonic() - begin_s, *self._run.memory(name)))

    def end(self) -> dict[str, dict[str, float]]:
        self._over.set()
        self._thread.join()
        return {name: flatness(found) for name, found in self.samples.items()}


def flatness(samples: list[tuple[float, float, int]]) -> dict[str, float]:
    """Of memory and open files."""
    k = len(samples) // 4
    at_s, mb, files = (np.array(x) for x in zip(*samples, strict=True))
    rise = float(np.polyfit(at_s[k:], mb[k:], 1)[0] * (at_s[-1] - at_s[k]))
    return {
        "mb_second_quarter": round(float(median(mb[k : 2 * k])), 1),
        "mb_last_quarter": round(float(median(mb[-k:])), 1),
        "mb_rise": round(rise, 2),
        "files_second_quarter": float(median(files[k : 2 * k])),
        "files_last_quarter": float(median(files[-k:])),
        "files_rise": round(float(np.polyfit(at_s[k:], files[k:], 1)[0] * (at_s[-1] - at_s[k])), 2),
    }


def churn(run: Field, events: int, every: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """What happened."""
    rng, there, told = random.Random(seed), set(SITES), []
    begin_s = time.monotonic()
    for _ in range(events):
        run.reaches(STAYS, run.last_round(STAYS) + every)
        if run.last_round(STAYS) > rounds - ROOM:
            break
        away = sorted(set(SITES) - there)
        may_go = len(there) > 2
        joins = bool(away) and (not may_go or rng.random() < 0.5)
        site = rng.choice(away if joins else sorted(there - {STAYS}))
        kind = "join" if joins else rng.choice(["leave", "kill"])
        if joins:
            run.processes[site].wait(60)
            run.join(site)
            there.add(site)
        else:
            run.processes[site].send_signal(signal.SIGTERM if kind == "leave" else signal.SIGKILL)
            there.discard(site)
            run.spare(SITES.index(site))
        at_s = time.monotonic()
        told.append({"at_s": round(at_s - begin_s, 2), "round": run.last_round(STAYS), "what": kind, "site": site})
        until_s = at_s + 60
        while (run.standing(site) == "in") != joins and time.monotonic() < until_s:
            time.sleep(0.1)
        told[-1]["seen_s"] = round(time.monotonic() - at_s, 2)
    return told


def mean_sites(log: str, rounds: int) -> float:
    """How many took part, over the rounds."""
    found = [(int(at), len(who.split(", "))) for at, who in re.findall(r"^session \d+, from round (\d+): (.*)$", log, re.M)]
    ends = [at for at, _ in found[1:]] + [rounds]
    return sum((end - at) * k for (at, k), end in zip(found, ends, strict=True)) / rounds


def undisturbed(sets: list[str], seeds: int) -> list[float]:
    """Final losses of the simulator."""
    out = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            done = simulate(resolve(load([], [*sets, f"seed={seed}"])), Path(folder) / "run", quiet=True)
            out.append(float(json.loads((done.path / "summary.json").read_text())["final_loss"]))
    return out


def main() -> int:
    options = (
        ("--events", 60),
        ("--every", 2),
        ("--rounds", 360),
        ("--method", "diloco"),
        ("--seeds", 4),
        ("--pace-s", 0.1),
        ("--seed", 0),
    )
    args = emulator_of(__doc__, *options)
    if args is None:
        return 0
    before = machine()
    sets = sets_of(**{**BASE, **METHODS[args.method], "run__rounds": args.rounds, "clock__pace_s": args.pace_s})
    with field(args.emulator, Wan.equal(4, 100.0, 20.0), sets) as run:
        run.watch()
        run.join(*SITES)
        run.reaches(STAYS, 1)
        memory = Memory(run, [STAYS, "coordinator"])
        happened = churn(run, args.events, args.every, args.rounds, args.seed)
        flat = memory.end()  # before the report is drawn
        run.end(STAYS)
        final, counts = run.summary(STAYS)["final_loss"], run.watched[-1]["counts"]
        sites = mean_sites(run.log(STAYS), args.rounds)
    print(json.dumps({"final_loss": final, "memory": flat, "counts": counts}), flush=True)
    losses = undisturbed(sets, args.seeds)
    fewer = [undisturbed([*sets, f'fleet.name="uniform-{k}"'], 1)[0] for k in (2, 3)]
    figures = {
        "final_loss": final,
        "undisturbed": losses,
        "excess": final - losses[0],
        "noise": max(losses) - min(losses),
        "sites": sites,
        "undisturbed_fewer": fewer,
        "excess_as_many": final - float(np.interp(sites, [2, 3, 4], [*fewer, losses[0]])),
        "memory": flat,
        "counts": counts,
    }
    print(json.dumps(figures))
    shape = {"method": args.method, "events": len(happened), "every_rounds": args.every, "rounds": args.rounds}
    write(
        "wan_churn", {"command": command("bench.wan_churn"), "machine": before, **shape, **figures, "happened": happened},
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
