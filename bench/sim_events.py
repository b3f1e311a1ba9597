"""How fast the simulator's driver is: two-peer gossip without tensors, about ten effects and two sends per worker and round.

    python bench/sim_events.py [--workers 1000] [--rounds 100]     # needs gossamer installed: pip install -e .

Measures the driver alone (toy programs, links of constant rate and latency) and the whole simulator (the real round loop, network and
step-time models). Prints seconds and rates, and writes bench/results/sim_events.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.plan import uniform
from gossamer.core.tree import layout_of
from gossamer.recipes import Setting, gasloc
from gossamer.sim.driver import Simulation
from gossamer.sim.models import Event
from gossamer.sim.network import Network
from gossamer.sim.timing import ComputeTime
from gossamer.worker.effects import Addr, Boundary, Compute, Expect, Gather, Load, Note, Program, Ready, Send, Span, SpanKind, Tag, Work
from gossamer.worker.packet import Header, Packet
from gossamer.worker.peer import start
from gossamer.worker.seat import Seat
from gossamer.worker.server import programs
from gossamer.worker.state import State

_NBYTES = 4_000_000


class PlainLinks:
    """Every message takes latency + bytes / rate, whatever else is on its way."""

    def launch(self, now_s: float, key: int, src: Addr, dst: Addr, nbytes: int) -> list[Event]:
        return [(now_s + 0.05 + nbytes / 1e8, key, 0)]

    def finish(self, when_s: float, key: int, version: int) -> tuple[bool, list[Event]]:
        return True, []


class PlainTimes:
    """Workers of four speeds."""

    def steps_s(self, worker: Addr, round: int, first_step: int, steps: int, batch: int) -> float:
        return steps * (0.1 + 0.01 * (worker % 4))

    def span_s(self, kind: SpanKind, nbytes: int) -> float:
        return nbytes / 1e9


def cycles(n: int) -> Callable[[int], list[tuple[int, int]]]:
    """The two neighbours of every worker on a random cycle of the round."""
    at: dict[int, list[tuple[int, int]]] = {}

    def peers(round: int) -> list[tuple[int, int]]:
        if round not in at:
            at.pop(round - 64, None)
            order = Random(round).sample(range(n), n)
            pairs = [(0, 0)] * n
            for k, worker in enumerate(order):
                pairs[worker] = (order[k - 1], order[(k + 1) % n])
            at[round] = pairs
        return at[round]

    return peers


def program(me: Addr, rounds: int, peers: Callable[[int], list[tuple[int, int]]]) -> Program:
    """Two-peer gossip, as the real round loop asks for it."""
    state = State(x={})
    packet = Packet(Header(0, 0, me, Tag.SAY, 0, 1, 0, 0, 0), _NBYTES, None)
    work = Work(30, 8, 0.0, 0.0)
    for t in range(rounds):
        pair, tag = peers(t)[me], Tag.of(t, Tag.SAY)
        yield Expect(tag, dict.fromkeys(pair, _NBYTES))
        yield Compute(work)
        yield Ready(pair, t)
        yield Span("encode", _NBYTES)
        yield Send(pair, tag, packet)
        yield Gather(tag, pair, t)
        yield Span("decode", 3 * _NBYTES)
        yield Span("outer", 3 * _NBYTES)
        yield Load({})
        state.round = t + 1
        yield Note({"kind": "round", "round": t + 1})
        yield Boundary(t + 1, state)
    return state


def bare(workers: int, rounds: int) -> Simulation:
    """The driver alone: toy programs, constant links."""
    peers = cycles(workers)
    return Simulation([program(i, rounds, peers) for i in range(workers)], None, PlainLinks(), PlainTimes(), None, sequence=1024)


def fleet_of(workers: int) -> Fleet:
    """Equal workers with 1 Gbit/s lines, 20 ms apart."""
    site = Site("site", "region", Gpu("card", 100.0, 16.0), 1000.0, 1000.0, workers=workers)
    return Fleet("bench", (site,), {}, local=Link(1000.0, 20.0))


def whole(workers: int, rounds: int) -> Simulation:
    """The whole simulator: the real round loop of gasloc, queues on every up- and downlink, noise on every step."""
    fleet = fleet_of(workers)
    method = gasloc(Setting(uniform(workers, 30, 8, 1024), rounds=rounds), force=True)
    layout = layout_of({"w": torch.empty(1000, 1000, device="meta")})
    seats = [Seat(i, method, layout) for i in range(workers)]
    timing = ComputeTime(fleet, sequence=1024, flops_per_token=6e6)
    return Simulation(programs(seats, [start(seat, {}) for seat in seats]), None, Network(fleet), timing, None, sequence=1024)


def measure(what: str, make: Callable[[int, int], Simulation], workers: int, rounds: int) -> dict[str, float]:
    """Builds and runs one simulation."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    result = make(workers, rounds).run()
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    row = {
        "workers": workers,
        "rounds": rounds,
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu_s, 3),
        "events": result.events,
        "events_per_s": round(result.events / seconds),
        "worker_rounds_per_s": round(workers * rounds / seconds),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "virtual_s": round(max(account.wall_s for account in result.accounts), 3),
    }
    print(
        f"{what}: {workers} workers x {rounds} rounds in {seconds:.2f} s ({cpu_s:.2f} s of CPU), {row['events_per_s']:,} events/s, "
        f"{row['worker_rounds_per_s']:,} worker-rounds/s, peak memory {row['peak_memory_mib']} MiB"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the simulator is, on two-peer gossip without tensors.")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    rows = {name: measure(name, make, args.workers, args.rounds) for name, make in (("driver", bare), ("simulator", whole))}
    path = Path(__file__).parent / "results" / "sim_events.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
