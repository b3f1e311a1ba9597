"""How the simulator grows with the fleet: two-peer gossip among 100 to 10,000 workers, 100 rounds each, beside DiLoCo's ring.

    python -m bench.sim_scale [--workers 100,300,1000,3000,10000] [--rounds 100]

Each size runs in a process of its own, so that its peak memory is its own. A round of DiLoCo with a ring is simulated while it has few
enough messages (it has 2 n (n - 1)), and worked out by `gossamer.core.predict` for all sizes, on the same fleet. Writes
results/sim_scale.json.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import command, machine, write
from bench.sim_events import fleet_of, measure, whole
from gossamer.core.plan import uniform
from gossamer.core.predict import Costs, predict, step_times
from gossamer.core.tree import layout_of
from gossamer.core.wires import Net
from gossamer.recipes import Setting, diloco
from gossamer.sim.driver import Simulation
from gossamer.sim.network import Network
from gossamer.sim.timing import ComputeTime
from gossamer.worker.packet import HEADER_BYTES
from gossamer.worker.peer import start
from gossamer.worker.seat import Seat
from gossamer.worker.server import programs

AIM = {"workers": 10_000, "rounds": 100, "seconds": 60.0, "memory_mib": 2000}
RING_MESSAGES = 250_000
"""Messages of a round up to which DiLoCo's ring is simulated."""
FLOPS_PER_TOKEN = 6e6


def ring(workers: int, rounds: int) -> Simulation:
    """DiLoCo, exchanging by a ring, on the fleet of `whole`."""
    method = diloco(Setting(uniform(workers, 30, 8, 1024), rounds=rounds), exchange="ring")
    layout = layout_of({"w": torch.empty(1000, 1000, device="meta")})
    seats, fleet = [Seat(i, method, layout) for i in range(workers)], fleet_of(workers)
    timing = ComputeTime(fleet, sequence=1024, flops_per_token=FLOPS_PER_TOKEN)
    return Simulation(programs(seats, [start(seat, {}) for seat in seats]), None, Network(fleet), timing, None, sequence=1024)


def worked_out(workers: int) -> float:
    """Virtual seconds of a round of DiLoCo by a ring, by formula."""
    fleet = fleet_of(workers)
    method = diloco(Setting(uniform(workers, 30, 8, 1024), rounds=1), exchange="ring")
    layout = layout_of({"w": torch.empty(1000, 1000, device="meta")})
    costs = Costs(step_times(fleet, method.plan.batch, 1024, FLOPS_PER_TOKEN), 4.0, HEADER_BYTES)
    return predict(method, Net(fleet), layout, costs).round_s


def point(workers: int, rounds: int) -> dict[str, Any]:
    """One size."""
    row: dict[str, Any] = measure("two peers", whole, workers, rounds)
    row["virtual_s_a_round"] = round(row.pop("virtual_s") / rounds, 4)
    row["cpu_us_a_worker_round"] = round(1e6 * row["cpu_s"] / workers / rounds, 2)
    row["ring_virtual_s_a_round"] = round(worked_out(workers), 4)
    if 2 * workers * (workers - 1) <= RING_MESSAGES:
        run, begin_s = ring(workers, 2), time.process_time()
        result = run.run()
        row["ring_cpu_us_a_worker_round"] = round(1e6 * (time.process_time() - begin_s) / workers / 2, 1)
        row["ring_virtual_s_a_round_simulated"] = round(max(account.wall_s for account in result.accounts) / 2, 4)
    return row


def exponent(rows: list[dict[str, Any]]) -> float:
    """p of cpu ~ n^p, by least squares in logarithms; 1 is linear."""
    x = [math.log(row["workers"]) for row in rows]
    y = [math.log(row["cpu_s"]) for row in rows]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the simulator grows with the fleet, two-peer gossip without tensors.")
    parser.add_argument("--workers", default="100,300,1000,3000,10000", help="sizes, smallest first")
    parser.add_argument("--rounds", type=int, default=AIM["rounds"])
    parser.add_argument("--point", action="store_true", help="measure the one size given, and print it")
    args = parser.parse_args()
    sizes = [int(n) for n in args.workers.split(",")]
    if args.point:
        print(json.dumps(point(sizes[0], args.rounds)))
        return
    at, rows = machine(), []
    for n in sizes:
        words = [sys.executable, "-m", "bench.sim_scale", "--point", "--workers", str(n), "--rounds", str(args.rounds)]
        run = subprocess.run(words, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
        said = run.stdout.strip().splitlines()
        print(said[0], flush=True)
        rows.append(json.loads(said[-1]))
    grows = {"exponent": round(exponent(rows), 3)} if len(rows) > 1 else {}
    write("sim_scale", {**at, "command": command("bench.sim_scale"), "aim": AIM, **grows, "curve": rows})


if __name__ == "__main__":
    main()
