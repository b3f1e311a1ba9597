"""What the simulator costs: eight logical workers that really train, against a bare torch loop that takes the very same inner steps.

    python -m bench.logical [--preset tiny] [--repeats 3]

Each stretch of inner steps that the simulator asks of a worker is taken twice, one after the other: by the worker, and by a plain torch
loop with its own copy of the model that starts from the same parameters and optimizer state and sees the same batches. The simulator's
clock stands still while the bare loop runs. So both are measured within a second of each other, and both must end with the same loss.

    ratio = tokens/s under the simulator / tokens/s of the bare loop = seconds of the bare loop / seconds of the simulation without it

Everything that the simulator does beside the inner steps is in its seconds: drift, guard, digest, encode, decode, outer step, event queue.
Evaluation and metrics files are not. Writes results/logical.json.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from bench.common import command, job, machine, median, spread, write
from gossamer.app.job import Job
from gossamer.core.inner import AdamW, Lion, LionOptimizer
from gossamer.core.tree import Tree, master
from gossamer.sim.driver import Simulation
from gossamer.sim.memo import MemoCombine
from gossamer.sim.network import Network
from gossamer.sim.timing import ComputeTime
from gossamer.train.compute import TrainBody
from gossamer.train.data import Corpus, Sampler
from gossamer.train.model import parameters_of
from gossamer.worker.effects import Body, Done, Work
from gossamer.worker.peer import peer

METHODS: dict[str, dict[str, Any]] = {"diloco": {}, "geomesh": {}}
"""Methods and their options: float32 in shards with AdamW inside; signs to everybody with Lion inside."""
AIM = 0.9


class BareLoop:
    """The training loop that one would write without Gossamer: model, optimizer, schedule, clipping, batches."""

    def __init__(self, job: Job, corpus: Corpus, worker: int) -> None:
        self.model = job.model()
        inner = job.method.inner
        assert isinstance(inner, AdamW | Lion)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        free = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": inner.weight_decay}, {"params": free, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer
        if isinstance(inner, AdamW):
            self.optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps, fused=True)
        else:  # torch has no Lion of its own
            self.optimizer = LionOptimizer(groups, inner.lr, inner.betas, inner.weight_decay)
        self.clip, self.peak = inner.clip, inner.lr
        self.schedule, self.total_tokens = job.method.schedule, job.method.total_tokens
        self.batches = Sampler(corpus.train, job.config.plan.sequence, job.config.seed, worker)
        self.cursor = 0

    def train(self, steps: int, batch: int, tokens: float, tokens_per_step: float) -> float:
        """Takes `steps` steps. Returns the mean loss in nats."""
        self.model.train()
        total = torch.zeros(())
        for h in range(steps):
            rows = self.batches.batch(self.cursor, batch)
            self.cursor += batch
            for group in self.optimizer.param_groups:
                group["lr"] = self.peak * self.schedule.factor(tokens + h * tokens_per_step, self.total_tokens)
            logits = self.model(input_ids=rows[:, :-1].contiguous(), use_cache=False).logits
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            total += loss.detach()
        return float(total) / steps


@dataclass
class Ledger:
    """Seconds of one simulation, on the wall clock and of this process's CPU time."""

    bare: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """In the bare loops."""
    inner: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """In the workers' own inner steps."""
    aside: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """In what the simulator would not do: the bare loops, and copying parameters to them."""
    tokens: int = 0
    turn: int = 0


class PairedBody:
    """A worker's body that takes each stretch of steps twice, and keeps the books."""

    def __init__(self, body: TrainBody, bare: BareLoop, ledger: Ledger) -> None:
        self.body, self.bare, self.ledger = body, bare, ledger

    def compute(self, work: Work) -> Done:
        """See the module. Worker and bare loop take turns in going first."""
        assert work.kind == "steps"
        begin = _now()
        with torch.no_grad():
            for mine, its in zip(parameters_of(self.bare.model).values(), parameters_of(self.body.model).values(), strict=True):
                mine.copy_(its)
        _add(self.ledger.aside, begin)
        self.ledger.turn += 1
        loss = self._plainly(work) if self.ledger.turn % 2 else 0.0
        begin = _now()
        done = self.body.compute(work)
        _add(self.ledger.inner, begin)
        if not self.ledger.turn % 2:
            loss = self._plainly(work)
        self.ledger.tokens += done.tokens
        mean = done.loss_sum / done.tokens
        if abs(mean - loss) > 1e-3 * mean:  # clipping sums in another order, no more
            raise SystemExit(f"the bare loop did not take the same steps: its mean loss is {loss}, the worker's {mean}")
        return done

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        """As the worker's."""
        self.body.load(tree, reset_inner)

    def state(self) -> dict[str, Any]:
        """As the worker's."""
        return self.body.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As the worker's."""
        self.body.load_state(state)

    def _plainly(self, work: Work) -> float:
        begin = _now()
        loss = self.bare.train(work.steps, work.batch, work.tokens0, work.tokens_per_step)
        _add(self.ledger.bare, begin)
        _add(self.ledger.aside, begin)
        return loss


def simulate(job: Job, corpus: Corpus) -> dict[str, float]:
    """One simulation with bare loops beside it."""
    ledger = Ledger()
    bodies: list[Body] = [PairedBody(job.body(i, corpus), BareLoop(job, corpus, i), ledger) for i in range(job.n)]
    combine = MemoCombine()
    states = [job.first_state(i, master(parameters_of(job.model()))) for i in range(job.n)]
    timing = ComputeTime(job.fleet, job.config.plan.sequence, job.flops_per_token)
    programs = [peer(job.seat(i, combine), states[i]) for i in range(job.n)]
    world = Simulation(programs, bodies, Network(job.fleet), timing, None, charge=job.bytes_charge)
    gc.collect()
    begin = _now()
    world.run()
    wall_s, cpu_s = (now - then - aside for now, then, aside in zip(_now(), begin, ledger.aside, strict=True))
    return {
        "ratio": ledger.bare[0] / wall_s,
        "ratio_cpu_time": ledger.bare[1] / cpu_s,
        "ratio_inner_steps": ledger.bare[0] / ledger.inner[0],
        "outside_inner_steps": 1.0 - ledger.inner[0] / wall_s,
        "tokens_per_s": ledger.tokens / wall_s,
        "tokens_per_s_bare": ledger.tokens / ledger.bare[0],
    }


def measure(method: str, preset: str, workers: int, steps: int, rounds: int, batch: int, sequence: int, repeats: int) -> dict[str, Any]:
    """Medians over the repeats, and the ratio of each."""
    make = partial(job, method, workers=workers, preset=preset, batch=batch, sequence=sequence, options=METHODS[method])
    made = make(steps=steps, rounds=rounds)
    corpus = made.corpus()
    simulate(make(steps=2, rounds=1), corpus)  # warms up
    runs = [simulate(made, corpus) for _ in range(repeats)]
    return {key: median(run[key] for run in runs) for key in runs[0]} | {"ratios": spread(run["ratio"] for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=("tiny", "small"), default="tiny", help="model (default tiny)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="inner steps in a round, H (default 30)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a repeat (default 1)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default 4)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--repeats", type=int, default=3, help="simulations, after one that warms up (default 3)")
    args = parser.parse_args()
    if min(args.workers, args.steps, args.rounds, args.batch, args.repeats) < 1 or args.sequence < 2:
        parser.error("every number must be at least 1, and --sequence at least 2")
    torch.set_num_threads(1)
    about, setting = machine(), vars(args)
    results = {name: measure(name, **setting) for name in METHODS}
    for name, row in results.items():
        print(
            f"{name:8} {row['ratio']:.3f} of the bare loop's tokens/s (by CPU time {row['ratio_cpu_time']:.3f}; "
            f"inner steps alone {row['ratio_inner_steps']:.3f}; {row['outside_inner_steps']:.1%} outside them), repeats {row['ratios']}"
        )
    write("logical", {**about, "command": command("bench.logical"), "setting": setting, "aim": {"ratio": AIM}, "results": results})


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _add(to: list[float], begin: tuple[float, float]) -> None:
    for k, (now, then) in enumerate(zip(_now(), begin, strict=True)):
        to[k] += now - then


if __name__ == "__main__":
    main()
