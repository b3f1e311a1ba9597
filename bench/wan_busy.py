"""How busy gossip keeps four unlike sites over the emulated lines of azure-4.

    python -m bench.wan_busy --emulator PATH [--scale 400] [--pace-s 0.04]

The fleet, model, pace and lines are those of `bench.wan_time`. Each worker exchanges with two random peers a round (gasloc, two_peer, 8
bits a number) while its inner steps run, and the plan gives each what it can do in the time of a round. Utilisation is inner steps over
wall time, of the sites' own records: from the first inner step to the last, and with the start left out (from the third round on);
`with_the_end` and idle times are those of the summary, where the last exchange, under which nothing runs, counts too. Needs root, Linux
and an emulator of lines (bench/wan_field.py). Writes results/wan_busy.json.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.common import command, machine, write
from bench.wan_field import SITES, Wan, emulator_of, field, sets_of
from bench.wan_time import BASE
from gossamer.app.config import load
from gossamer.app.job import resolve

GOSSIP: dict[str, object] = {
    "method__name": "gasloc", "method__topology": "two_peer", "method__codec": "mod8", "method__overlap": 0.75, "plan__name": "awb",
    "plan__carry": True, "plan__steps": 48, "inner__name": "adamw", "inner__lr": 4e-3, "eval__every": 0,
}  # fmt: skip
AIM = 0.94


def utilisation(rounds: list[dict[str, Any]]) -> float:
    return float(sum(r["compute_s"] for r in rounds) / sum(r["wall_s"] for r in rounds))


def main() -> int:
    args = emulator_of(__doc__, ("--scale", 400.0), ("--pace-s", 0.04), ("--rounds", 20), ("--queue-ms", 300.0))
    if args is None:
        return 0
    before = machine()
    sets = sets_of(**{**BASE, **GOSSIP, "run__rounds": args.rounds, "clock__pace_s": args.pace_s})
    job = resolve(load([], sets))
    with field(args.emulator, Wan.of("azure-4", args.scale, queue_ms=args.queue_ms), sets) as run:
        run.join(*SITES)
        run.end(*SITES)
        rounds = [run.records(site, "round") for site in SITES]
        summary = run.summary(SITES[0])
    steps_s = [sum(r["compute_s"] for r in one) / sum(r["steps"] for r in one) for one in rounds]
    paces_s = [job.pace_s(i) or 0.0 for i in range(job.n)]
    figures = {
        "utilisation": [round(utilisation(one), 4) for one in rounds],
        "from_third_round": [round(utilisation([r for r in one if r["round"] > 2]), 4) for one in rounds],
        "least": round(min(utilisation(one) for one in rounds), 4),
        "step_to_pace": [round(s / p, 3) for s, p in zip(steps_s, paces_s, strict=True)],
        "with_the_end": summary["utilisation"]["workers"],
        "network_idle": summary["network_idle"]["workers"],
        "straggler_idle": summary["straggler_idle"]["workers"],
        "round_s": summary["wall_s"] / args.rounds,
    }
    print(json.dumps(figures))
    shape = {"fleet": "azure-4", "scale": args.scale, "pace_s": args.pace_s, "queue_ms": args.queue_ms, "method": GOSSIP, "aim": AIM}
    write("wan_busy", {"command": command("bench.wan_busy"), "machine": before, **shape, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
