"""Writes run folders that look like real ones: a synchronous or a gossip run of a made-up fleet, with consistent times and bytes."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

AZURE = ("H100", "A100", "L40S", "RTX 6000 Ada")
ORDER = ("compute", "encode", "straggler_idle", "network_idle", "decode", "outer")


def make_run(
    folder: Path,
    method: str = "geomesh",
    workers: int = 4,
    rounds: int = 20,
    seed: int = 0,
    gossip: bool = False,
    evals: bool = True,
    floor: float = 3.1,
    network_s: float = 4.0,
    payload: int = 1_600_000,
    charged_as: str | None = None,
    target: float | None = 30.0,
    config: Mapping[str, Any] | None = None,
    change: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the four files. `config` is merged into config.toml and `change` into summary.json."""
    rng = random.Random(f"{method}{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "name": "",
        "seed": seed,
        "method": {"name": method, "momentum": 0.6},
        "inner": {"name": "lion", "lr": 3e-4},
        "plan": {"name": "proportional", "steps": 30, "batch": 8, "sequence": 128},
        "model": {"preset": "tiny", "config": {"model_type": "llama", "hidden_size": 128}, "dtype": "fp32"},
        "data": {"source": "stdlib", "tokenizer": "bpe"},
        "fleet": {"name": "azure-4"} if workers == 4 else {"name": "uniform", "workers": workers},
        "run": {"rounds": rounds, "out": str(folder.name)},
    }
    for key, value in (config or {}).items():
        settings[key] = (
            {**settings.get(key, {}), **value} if isinstance(value, Mapping) and isinstance(settings.get(key), Mapping) else value
        )
    (folder / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    metrics: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    now = [0.0] * workers
    sums = {kind: [0.0] * workers for kind in ORDER}
    own, planned, reached = 65_536, 0, None
    loss = 0.0
    for t in range(rounds):
        begin = list(now)
        cost = {
            "compute": [20.0 + 2.0 * (i % 4) * rng.uniform(0.6, 1.0) + rng.uniform(0, 1.2) for i in range(workers)],
            "encode": [0.35] * workers,
            "decode": [0.5] * workers,
            "outer": [0.25] * workers,
        }
        ready = [begin[i] + cost["compute"][i] + 0.35 for i in range(workers)]
        heard = [[(i - 1) % workers, (i + 1) % workers] if gossip else list(range(workers)) for i in range(workers)]
        planned += own * workers
        loss = floor + (8.3 - floor) * math.exp(-2.6 * math.sqrt(planned / 2.1e6)) + rng.gauss(0, 0.01)
        for i in range(workers):
            latest = max([ready[j] for j in heard[i]] + [ready[i]])
            lag = 0.0 if workers == 1 else network_s * (0.7 + 0.5 * i / workers) * rng.uniform(0.9, 1.1)
            mine = {k: cost[k][i] for k in cost} | {"straggler_idle": latest - ready[i], "network_idle": lag}
            at = begin[i]
            for kind in ORDER:
                spans.append({"worker": i, "kind": kind, "start_s": at, "end_s": at + mine[kind], "round": t})
                at += mine[kind]
                sums[kind][i] += mine[kind]
            if workers > 1:
                spans.append({"worker": i, "kind": "send", "start_s": ready[i], "end_s": ready[i] + lag * 0.8, "round": t})
            now[i] = at
            sent = 0 if workers == 1 else payload * (2 if gossip else workers - 1) // 8 + 64 + rng.randrange(5) * 4096
            metrics.append(
                {
                    "kind": "round",
                    "round": t,
                    "worker": i,
                    "tokens": own,
                    "tokens_total": planned,
                    "time_s": at,
                    "loss": loss + rng.gauss(0, 0.05) + 0.03 * (i % 5),
                }
                | {f"{k}_s": v for k, v in mine.items()}
                | {
                    "send_s": 0.0,
                    "wall_s": at - begin[i],
                    "bytes_sent": sent,
                    "bytes_received": sent,
                    "waited_for": (i + 1) % workers,
                    "participants": heard[i],
                    "refused": [],
                }
                | ({"links": {str(j): [sent // 2, lag + 0.35] for j in heard[i] if j != i}} if workers > 1 and lag else {})
            )
        if evals and (t % 2 == 1 or t == rounds - 1):
            common = {"kind": "eval", "round": t, "tokens": planned, "time_s": max(now)}
            metrics.append(common | {"worker": "fleet", "loss": loss, "perplexity": math.exp(loss)})
            if gossip:
                metrics += [common | {"worker": i, "loss": loss + 0.02 + 0.03 * rng.random()} for i in range(workers)]
            if reached is None and target and loss <= math.log(target):
                reached = max(now)
    wall = max(now)
    sent = [sum(m["bytes_sent"] for m in metrics if m["kind"] == "round" and m["worker"] == i) for i in range(workers)]

    def share(kind: str) -> dict[str, Any]:
        each = [sums[kind][i] / now[i] for i in range(workers)]
        return {"mean": sum(each) / workers, "workers": each}

    summary: dict[str, Any] = {
        "method": method,
        "world": "sim",
        "workers": workers,
        "parameters": 1_310_720,
        "rounds": rounds,
        "tokens": planned,
        "final_loss": loss,
        "final_perplexity": math.exp(loss),
        "wall_s": wall,
        "time_to_target_s": reached,
        "target_perplexity": target,
        "utilisation": share("compute"),
        "straggler_idle": share("straggler_idle"),
        "network_idle": share("network_idle"),
        "bytes_sent": sent,
        "bytes_received": sent,
        "consensus_distance": 0.013 if gossip else 0.0,
        "params_sha256": [hashlib.sha256(f"{method}{i if gossip else 0}".encode()).hexdigest() for i in range(workers)],
        "charged_as": charged_as,
        "seed": seed,
        "worker_names": list(AZURE) if workers == 4 else ["A100"] * workers,
    }
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "trace.jsonl", spans)
    (folder / "summary.json").write_text(json.dumps(summary | dict(change or {})), encoding="utf-8")
    return folder


def make_plan(folder: Path, rounds: int = 20, round_s: float = 30.0) -> Path:
    """Writes `plan.json` beside a run of four workers, whose uplinks take 10 Mbit/s and whose links take no more than 5, or 8."""
    four = [0, 1, 2, 3]
    told = {
        "title": "GeoMesh", "method": "geomesh", "fleet": "azure-4", "workers": 4, "worker_names": list(AZURE),
        "worker_regions": ["a", "a", "b", "c"], "rounds": rounds, "tokens": rounds * 262_144, "sequence": 128, "steps": [30, 28, 26, 24],
        "batch": [8] * 4, "charged_as": None, "bytes_charge": 1.0,
        "round": {
            "clock": "virtual", "round_s": round_s, "compute_s": [20.0] * 4, "straggler_idle_s": [1.0] * 4,
            "network_idle_s": [2.0] * 4, "bytes_sent": [600_000.0] * 4,
        },
        "lines": {
            "sites": list(AZURE), "site": four, "up_mbps": [10.0] * 4, "down_mbps": [None] * 4, "within": [100_000.0, 0.05],
            "between": [[a, b, 5.0 if a == 0 else 8.0, 20.0] for a in four for b in four if a != b],
        },
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(o) + "\n" for o in objects), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
