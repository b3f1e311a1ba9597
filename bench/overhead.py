"""What an exchange costs in the real world: worker processes over gloo, one thread each, on this machine.

    python -m bench.overhead [--preset small] [--rounds 2] [--short-rounds 12]

For each method, at H = 30 and H = 1 inner steps in a round:

    outside  = 1 - compute / wall of a round: all that is not an inner step, waiting for the other process's inner steps included
    exchange = seconds of a round outside inner steps, outer step and straggler idle: drift, guard, digest, encode, send, wait, decode
    ratio    = exchange / all_reduce

`all_reduce` is torch's own, over gloo, on one flat float32 buffer as large as the model (nothing is copied in or out). It is taken at every
round boundary, after a barrier, in the same processes; time at boundaries is in no worker's account. Figures are medians over the rounds
of the mean over the workers; the first round of each run, which allocates, is left out. Writes results/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common import command, job, machine, median, write
from gossamer.core.tree import master, numel
from gossamer.net import init, launch
from gossamer.real import run
from gossamer.train.model import parameters_of
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Body, Go
from gossamer.worker.peer import peer
from gossamer.worker.state import State

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "diloco (fp32, shard)": ("diloco", {"exchange": "shard", "codec": "fp32"}),
    "geomesh (sign)": ("geomesh", {"exchange": "gather", "codec": "sign"}),
}
KINDS: tuple[TraceKind, ...] = ("encode", "send", "straggler_idle", "network_idle", "decode", "outer")
EXCHANGE: tuple[TraceKind, ...] = ("encode", "send", "network_idle", "decode")
LONG, SHORT = 30, 1
AIM = 0.03
"""Largest share of a run outside inner steps at H = 30."""


@dataclass
class Recorder:
    """Keeps the records of all rounds, and takes an all_reduce after each."""

    buffer: Tensor
    records: list[dict[str, Any]] = field(default_factory=list)

    def boundary(self, worker: int, round: int, time_s: float, state: State, body: Body | None) -> Go:
        """All workers are here together."""
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(self.buffer)
        self.records[-1]["all_reduce_s"] = time.perf_counter() - begin_s
        return Go()

    def note(self, record: dict[str, Any]) -> None:
        """A round's seconds by kind."""
        if record["kind"] == "round":
            self.records.append(record)

    def span(self, worker: int, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        """Not kept."""


def work(args: argparse.Namespace) -> None:
    """One worker process: all runs, one after the other. Worker 0 writes everybody's records."""
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(args.worker)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'all_reduce'}", rank=rank, world_size=args.workers)
    found: list[dict[str, Any]] = []
    for steps, rounds in ((SHORT, args.short_rounds), (LONG, args.rounds)):
        for title, (name, options) in METHODS.items():
            made = job(
                name, workers=args.workers, steps=steps, rounds=rounds + 1, preset=args.preset, batch=args.batch,
                sequence=args.sequence, options=options,
            )  # fmt: skip
            corpus = made.corpus()
            with init() as group:
                body = made.body(group.me, corpus)
                state = made.first_state(group.me, master(parameters_of(body.model)))
                recorder = Recorder(torch.zeros(numel(made.layout)))
                run(peer(made.seat(group.me), state), body, recorder, group)
                everybody = group.gather_bytes(json.dumps(recorder.records[1:]).encode())
            if everybody is not None:
                rounds_of_all = list(zip(*(json.loads(one) for one in everybody), strict=True))
                found.append({"method": title, "steps": steps, "parameters": numel(made.layout), "rounds": rounds_of_all})
    if rank == 0:
        (folder / "records.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def summary(method: str, steps: int, parameters: int, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds. `rounds`: the records of all workers, round by round."""

    def over_rounds(value: Callable[[dict[str, Any]], float]) -> float:
        return median(statistics.fmean(value(record) for record in records) for records in rounds)

    def seconds(*kinds: TraceKind) -> Callable[[dict[str, Any]], float]:
        return lambda r: sum(float(r[f"{kind}_s"]) for kind in kinds)

    def share(*kinds: TraceKind) -> Callable[[dict[str, Any]], float]:
        return lambda r: seconds(*kinds)(r) / float(r["wall_s"])

    def all_reduce_s(r: dict[str, Any]) -> float:
        return float(r["all_reduce_s"])

    return {
        "method": method,
        "steps": steps,
        "aim": AIM if steps == LONG else None,
        "parameters": parameters,
        "rounds_measured": len(rounds),
        "outside": over_rounds(lambda r: 1.0 - share("compute")(r)),
        "outside_without_straggler_idle": over_rounds(lambda r: 1.0 - share("compute", "straggler_idle")(r)),
        "share": {kind: over_rounds(share(kind)) for kind in KINDS},
        "seconds": {kind: over_rounds(seconds(kind)) for kind in KINDS},
        "exchange_s": over_rounds(seconds(*EXCHANGE)),
        "all_reduce_s": over_rounds(all_reduce_s),
        "exchange_of_all_reduce": over_rounds(lambda r: seconds(*EXCHANGE)(r) / all_reduce_s(r)),
        "bytes_sent": rounds[-1][0]["bytes_sent"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=("tiny", "small"), default="small", help="model (default small, 5.3 million parameters)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2); more than the machine has cores measure nothing")
    parser.add_argument("--rounds", type=int, default=2, help=f"measured rounds at H = {LONG} (default 2)")
    parser.add_argument("--short-rounds", type=int, default=12, help=f"measured rounds at H = {SHORT} (default 12)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (default 8)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # folder of the results: this process is one of the workers
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if min(args.workers, args.rounds, args.short_rounds, args.batch) < 1 or args.sequence < 2:
        parser.error("every number must be at least 1, and --sequence at least 2")
    about, root = machine(), Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder:
        argv = [sys.executable, "-m", "bench.overhead", *sys.argv[1:], "--worker", folder]
        code = launch(args.workers, argv, Path(folder), env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
        if code:
            raise SystemExit(code)
        results = [summary(**row) for row in json.loads((Path(folder) / "records.json").read_text())]
    for row in results:
        shares = ", ".join(f"{kind} {share:.2%}" for kind, share in row["share"].items())
        print(
            f"{row['method']}, H = {row['steps']}: {row['outside']:.2%} outside inner steps ({shares}); "
            f"exchange {row['exchange_of_all_reduce']:.2f} x all_reduce"
        )
    setting = {key: value for key, value in vars(args).items() if key != "worker"} | {"threads_per_worker": 1, "backend": "gloo"}
    write("overhead", {**about, "command": command("bench.overhead"), "setting": setting, "results": results})


if __name__ == "__main__":
    main()
