"""Time to a target loss of real, paced sites over the emulated lines of azure-4.

    python -m bench.wan_time --emulator PATH [--scale 450] [--pace-s 0.04]

Four processes of `gossamer wan join`, one in each network namespace, paced like an H100, an A100, an L40S and an RTX 6000 Ada
(`clock.pace_s`), and a coordinator. Round-trip times are those of the fleet; its rates are divided by `--scale`, so that our DiLoCo spends
about two thirds of its time on the network. The model, data and tuned values are those of `gossamer bench geomesh`, the target is the loss
named below; sites leave when they have it. Where torchft can be imported, its DiLoCo runs too: the same model, batches, pace, inner and
outer optimizer, over gloo in one bucket, on the same lines; each of its sites evaluates as ours do.

Time counts from the first inner step of the first site to the evaluation that shows the target, on the clock of that site. Needs root,
Linux and an emulator of lines (bench/wan_field.py). Writes results/wan_time.json.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.common import command, machine, write
from bench.wan_field import SITES, Field, Wan, emulator_of, field, lines, sets_of

TARGET = 4.0243
"""Nats: DiLoCo's loss after 31 % of its tokens in `gossamer bench geomesh`."""
SEED = 2
ROUNDS = 45
STEPS = 16
BASE: dict[str, object] = {
    "plan__name": "uniform", "plan__steps": STEPS, "plan__batch": 8, "plan__sequence": 64, "model__preset": "micro",
    "data__vocab_size": 512, "data__limit_mb": 8.0, "eval__every": 1, "eval__sequences": 128, "eval__batch": 64, "fleet__name": "azure-4",
    "clock__charge_as": "llama-150m", "clock__charge_tokens": 51_200, "clock__codec_gbytes_per_s": 170.0, "run__rounds": ROUNDS,
    "run__device": "cpu", "wan__deadline_s": 60.0, "seed": SEED,
}  # fmt: skip
_AWB: dict[str, object] = {"method__name": "geomesh", "plan__name": "awb"}
_OVERLAP: dict[str, object] = {"method__overlap": 0.75, "plan__carry": True}
_ADAMW: dict[str, object] = {"inner__name": "adamw", "inner__lr": 4e-3}
METHODS: dict[str, dict[str, object]] = {
    "diloco": {"method__name": "diloco", **_ADAMW, "method__outer_lr": 0.7, "method__outer_momentum": 0.6},
    "geomesh_adamw": {**_AWB, **_ADAMW, "method__outer_lr": 1.1, "method__outer_momentum": 0.6},
    "geomesh_adamw_overlap": {**_AWB, **_OVERLAP, **_ADAMW, "method__outer_lr": 1.1, "method__outer_momentum": 0.6},
    "geomesh_lion": {**_AWB, "inner__name": "lion", "inner__lr": 4e-3, "method__outer_lr": 0.5, "method__outer_momentum": 0.4},
    "geomesh_lion_overlap": {
        **_AWB, **_OVERLAP, "inner__name": "lion", "inner__lr": 2e-3, "method__outer_lr": 0.5, "method__outer_momentum": 0.6,
    },
}  # fmt: skip


def begin_s(rounds: list[dict[str, Any]]) -> float:
    """When the first round began, on the clock of the site."""
    return min(float(r["time_s"] - r["wall_s"]) for r in rounds if r["round"] == 1)


def shares(records: dict[str, list[dict[str, Any]]], kind: str) -> list[float]:
    """Of each site's time in its rounds."""
    return [sum(r[f"{kind}_s"] for r in one) / sum(r["wall_s"] for r in one) for one in records.values()]


def over_gossamer(emulator: str, wan: Wan, sets: list[str], target: float, limit_s: float) -> dict[str, Any]:
    """One method, until the first site has the target."""
    with field(emulator, wan, sets) as run:
        run.join(*SITES)
        run.says(SITES[0], "session 1")
        until_s = time.monotonic() + limit_s
        while not any(e["loss"] <= target for e in run.records(SITES[0], "eval")):
            ended = run.processes[SITES[0]].poll()
            if ended is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the target was not reached: {run.records(SITES[0], 'eval')[-1:]}\n{run.log(SITES[0])[-3000:]}")
            time.sleep(0.2)
        run.leave(*SITES)
        return found_in(run, target)


def found_in(run: Field, target: float) -> dict[str, Any]:
    rounds = {site: run.records(site, "round") for site in SITES}
    evals = run.records(SITES[0], "eval")
    start_s = begin_s(rounds[SITES[0]])
    hit = next(e for e in evals if e["loss"] <= target)
    counted = {site: [r for r in one if r["round"] <= hit["round"]] for site, one in rounds.items()}
    return {
        "to_target_s": hit["time_s"] - start_s,
        "rounds": hit["round"],
        "round_s": (hit["time_s"] - start_s) / hit["round"],
        "utilisation": shares(counted, "compute"),
        "network_idle": shares(counted, "network_idle"),
        "straggler_idle": shares(counted, "straggler_idle"),
        "mb_sent_per_round": sum(r["bytes_sent"] for r in counted[SITES[0]]) / 1e6 / hit["round"],
        "curve": [[e["time_s"] - start_s, e["loss"]] for e in evals],
    }


def over_torchft(emulator: str, wan: Wan, sets: list[str], target: float, limit_s: float) -> dict[str, Any]:
    """torchft's DiLoCo, until the first site has the target."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, lines(emulator, wan), Field(emulator, Path(folder), sets, wan.n) as run:
        where = {"target": target, "steps": STEPS, "sets": sets, "n": wan.n}
        run.start(wan.n, "lighthouse", torchft={"lighthouse": wan.n})
        run.says("lighthouse", "lighthouse: there")
        processes = [run.start(i, SITES[i], torchft={"replica": i, **where}) for i in range(wan.n)]
        for site in SITES:
            run.says(site, "ready")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        run.end(*SITES, timeout_s=limit_s)
        told = [json.loads(next(x for x in reversed(run.log(s).splitlines()) if x.startswith("{"))) for s in SITES]
    first = told[0]
    return {
        "to_target_s": first["curve"][-1][0],
        "rounds": len(first["curve"]),
        "round_s": first["curve"][-1][0] / len(first["curve"]),
        "utilisation": [t["utilisation"] for t in told],
        "curve": first["curve"],
    }


def main() -> int:
    options = (("--scale", 450.0), ("--pace-s", 0.04), ("--target", TARGET), ("--only", ""), ("--limit-s", 400.0), ("--queue-ms", 300.0))
    args = emulator_of(__doc__, *options)
    if args is None:
        return 0
    before, found = machine(), {}
    wan = Wan.of("azure-4", args.scale, queue_ms=args.queue_ms)
    names = [name for name in [*METHODS, "torchft"] if not args.only or name in args.only.split(",")]
    why_not = None if importlib.util.find_spec("torchft") else "torchft is not installed"
    for name in names:
        if name == "torchft" and why_not:
            print(f"torchft left out: {why_not}")
            continue
        sets = sets_of(**{**BASE, **METHODS.get(name, METHODS["diloco"]), "clock__pace_s": args.pace_s})
        go = over_torchft if name == "torchft" else over_gossamer
        found[name] = go(args.emulator, wan, sets, args.target, args.limit_s)
        print(name, json.dumps({k: v for k, v in found[name].items() if k != "curve"}), flush=True)
    if args.only:
        return 0
    against = {
        base: {name: 1.0 - found[name]["to_target_s"] / found[base]["to_target_s"] for name in METHODS if name != "diloco"}
        for base in ("diloco", "torchft")
        if base in found
    }
    figures = {"saved_against": against, "diloco_network_idle": sum(found["diloco"]["network_idle"]) / wan.n}
    print(json.dumps(figures))
    shape = {"fleet": "azure-4", "scale": args.scale, "pace_s": args.pace_s, "queue_ms": args.queue_ms, "target": args.target, "seed": SEED}
    write(
        "wan_time",
        {"command": command("bench.wan_time"), "machine": before, **shape, **figures, "torchft": why_not or "ran", "runs": found},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
