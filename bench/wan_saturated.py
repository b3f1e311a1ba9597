"""Membership while payload fills a slow line.

    python -m bench.wan_saturated --emulator PATH [--seconds 60]

Four sites with 10 Mbit/s and 40 ms round trip each, and again with one of them at home (20 Mbit/s down, 2 Mbit/s up, and 0.1 % of all
packets lost on all lines), train a model whose exchange takes many times as long as its inner steps, synchronously
(diloco) and by gossip (gasloc, two_peer), with short leases: wan.deadline_s = 12 makes them 4 s. The coordinator is asked twice a second.
Nothing may happen to the membership: one session, one epoch, no lease that expires. Needs root, Linux and an emulator of lines
(bench/wan_field.py). Writes results/wan_saturated.json.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bench.common import command, machine, write
from bench.wan_field import SITES, Wan, emulator_of, field, sets_of

MBPS, ONE_WAY_MS, DEADLINE_S = 10.0, 20.0, 12.0
BASE: dict[str, object] = {
    "fleet__name": "uniform-4", "plan__name": "uniform", "plan__steps": 1, "plan__batch": 1, "plan__sequence": 64, "model__preset": "tiny",
    "data__limit_mb": 8.0, "eval__every": 0, "run__rounds": 10_000, "run__device": "cpu", "wan__deadline_s": DEADLINE_S,
}  # fmt: skip
METHODS: dict[str, dict[str, object]] = {
    "diloco": {"method__name": "diloco"},
    "gossip": {"method__name": "gasloc", "method__topology": "two_peer"},
}


LINES = {
    "equal": Wan.equal(4, MBPS, ONE_WAY_MS),
    "home": Wan.home(4, MBPS, ONE_WAY_MS, 20.0, 2.0, loss_pct=0.1),
}


def measure(emulator: str, wan: Wan, sets: list[str], seconds: float) -> dict[str, Any]:
    with field(emulator, wan, sets) as run:
        run.watch()
        run.join(*SITES)
        for site in SITES:
            run.says(site, "session 1")
        run.reaches(SITES[0], 1)
        before = {site: run.log(site).count("does not answer") for site in SITES}
        begin_s = time.monotonic()
        time.sleep(seconds)
        asked = [w for w in run.watched if w["at_s"] > begin_s]
        rounds = {site: run.records(site, "round") for site in SITES}
        away = sum(run.log(site).count("does not answer") - before[site] for site in SITES)
        run.leave(*SITES)
    used = []
    for (site, one), mbps in zip(rounds.items(), wan.send_mbps, strict=True):
        later = [r for r in one if r["round"] > 1]
        if not later:
            sys.exit(f"{site} has completed {len(one)} rounds in {seconds:g} s, too few to say what its line carried: give more --seconds")
        used.append(8e-6 * sum(r["bytes_sent"] for r in later) / sum(r["wall_s"] for r in later) / mbps)
    counts = asked[-1]["counts"]
    return {
        "line_filled": [round(u, 3) for u in used],
        "rounds": {site: len(one) for site, one in rounds.items()},
        "asked": len(asked),
        "epochs": sorted({w["epoch"] for w in asked}),
        "sessions": counts.get("sessions", 0),
        "expiries": counts.get("expiries", 0),
        "late": counts.get("late", 0),
        "counts_changed": asked[0]["counts"] != counts,
        "all_in": all(set(w["standing"].values()) == {"in"} for w in asked),
        "least_lease_s": min(lease for w in asked for lease in w["leases"].values() if lease is not None),
        "coordinator_away": away,
    }


def main() -> int:
    args = emulator_of(__doc__, ("--seconds", 60.0))
    if args is None:
        return 0
    before, found = machine(), {}
    for line, wan in LINES.items():
        for method, options in METHODS.items():
            name = f"{method}_{line}"
            found[name] = measure(args.emulator, wan, sets_of(**BASE, **options), args.seconds)
            print(name, json.dumps(found[name]), flush=True)
    flaps = sum(f["counts_changed"] or len(f["epochs"]) != 1 or not f["all_in"] for f in found.values())
    shape = {"mbps": MBPS, "rtt_ms": 2 * ONE_WAY_MS, "lease_s": DEADLINE_S / 3}
    write("wan_saturated", {"command": command("bench.wan_saturated"), "machine": before, "line": shape, "flaps": flaps, "runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
