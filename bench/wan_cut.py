"""What the others notice when a site dies, or its cable is cut.

    python -m bench.wan_cut --emulator PATH [--away-s 20]

Four paced sites on lines of 100 Mbit/s and 40 ms round trip. One is killed (SIGKILL), or all that goes to and from it is lost for some
seconds, about which nobody is told, and then arrives again. Under gossip and under DiLoCo:

    gap_s      = the longest time between two rounds' ends of one of the others, from the fault on, less their usual one
    rise       = how far the validation loss of a surviving site rises above the last before the fault, at most, in nats
    solo       = rounds that the cut site completed while it was away, beyond the one that it was in
    back_s     = from the end of the cut to its next round

wan.deadline_s = 12 gives a lease of 4 s; a black hole is seen after half of that. Needs root, Linux and an emulator of lines
(bench/wan_field.py). Writes results/wan_cut.json.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from statistics import median
from typing import Any

from bench.common import command, machine, write
from bench.wan_field import SITES, Field, Wan, emulator_of, field, sets_of

DEADLINE_S = 12.0
BASE: dict[str, object] = {
    "fleet__name": "uniform-4", "plan__name": "uniform", "plan__steps": 8, "plan__batch": 4, "plan__sequence": 64, "model__preset": "micro",
    "data__vocab_size": 512, "data__limit_mb": 8.0, "eval__every": 1, "eval__sequences": 32, "eval__batch": 32, "run__rounds": 10_000,
    "schedule__name": "constant", "run__device": "cpu", "clock__pace_s": 0.15, "inner__name": "adamw", "inner__lr": 2e-3,
    "wan__deadline_s": DEADLINE_S,
}  # fmt: skip
METHODS: dict[str, dict[str, object]] = {
    "gossip": {"method__name": "gasloc", "method__topology": "two_peer"},
    "diloco": {"method__name": "diloco"},
}
VICTIM = 3
OTHERS = [site for i, site in enumerate(SITES) if i != VICTIM]


def gaps(run: Field, before: dict[str, int]) -> dict[str, Any]:
    """Of the others, since a fault that came after the rounds `before`."""
    worst, usual = 0.0, []
    for site in OTHERS:
        ends = {r["round"]: r["time_s"] for r in run.records(site, "round")}
        spans = {t: ends[t] - ends[t - 1] for t in ends if t - 1 in ends}
        own = median(s for t, s in spans.items() if 2 < t <= before[site])
        usual.append(own)
        worst = max(worst, max(s for t, s in spans.items() if t > before[site]) - own)
    return {"gap_s": worst, "round_s": max(usual)}


def rise(run: Field, before: dict[str, int]) -> float:
    """Of the validation loss."""
    out = []
    for site in OTHERS:
        losses = {e["round"]: e["loss"] for e in run.records(site, "eval")}
        at = max(t for t in losses if t <= before[site])
        out.append(max([losses[t] for t in losses if t > at][:12]) - losses[at])
    return float(max(out))


def measure(emulator: str, sets: list[str], fault: str, away_s: float, rounds: int) -> dict[str, Any]:
    with field(emulator, Wan.equal(4, 100.0, 20.0), sets) as run:
        run.watch()
        run.join(*SITES)
        run.reaches(SITES[0], rounds)
        before = {site: run.last_round(site) for site in SITES}
        if fault == "kill":
            run.processes[SITES[VICTIM]].send_signal(signal.SIGKILL)
            run.reaches(SITES[0], before[SITES[0]] + rounds)
            out = gaps(run, before)
        else:
            run.cut(VICTIM, whole=False)
            begin_s = time.monotonic()
            run.reaches(SITES[0], before[SITES[0]] + 1)
            time.sleep(max(0.0, begin_s + away_s - time.monotonic()))
            had = run.last_round(SITES[VICTIM])
            out = {"solo": max(0, had - before[SITES[VICTIM]] - 1), **gaps(run, before)}
            rounds_away = run.last_round(SITES[0]) - before[SITES[0]]
            run.cut(VICTIM, whole=True)
            mended_s = time.monotonic()
            run.reaches(SITES[VICTIM], max(had, before[SITES[0]] + rounds_away) + 1)
            out |= {"rounds_of_the_others": rounds_away, "back_s": time.monotonic() - mended_s}
            run.reaches(SITES[0], run.last_round(SITES[0]) + rounds)
            out |= {"gap_at_return_s": gaps(run, {s: before[s] + rounds_away for s in OTHERS})["gap_s"]}
        out["rise"] = rise(run, before)
        out["counts"] = run.watched[-1]["counts"]
        run.leave(*(SITES if fault == "cut" else OTHERS))
    return out


def main() -> int:
    args = emulator_of(__doc__, ("--away-s", 20.0), ("--rounds", 10), ("--only", ""))
    if args is None:
        return 0
    before, found = machine(), {}
    for name, options in METHODS.items():
        for fault in ("kill", "cut"):
            if args.only and args.only != f"{name}_{fault}":
                continue
            found[f"{name}_{fault}"] = one = measure(args.emulator, sets_of(**BASE, **options), fault, args.away_s, args.rounds)
            print(f"{name}_{fault}", json.dumps(one), flush=True)
    if not args.only:
        shape = {"away_s": args.away_s, "lease_s": DEADLINE_S / 3}
        write("wan_cut", {"command": command("bench.wan_cut"), "machine": before, **shape, "runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
