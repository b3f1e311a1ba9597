"""Clock and bytes of a run without training it: no tensors, no data, any number of workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gossamer.app.job import Job
from gossamer.app.summary import KINDS, summarise
from gossamer.sim.driver import Simulation
from gossamer.sim.models import SimResult
from gossamer.sim.timing import ComputeTime
from gossamer.worker.account import Hooks


def time_only(job: Job, rounds: int | None = None, *, noise: bool = True, hooks: Hooks | None = None) -> tuple[dict[str, Any], SimResult]:
    """Runs the programs of `job` on the virtual clock alone, under the plan as it stands: nothing is planned anew.

    Args:
        rounds: instead of the job's own.
        noise: False gives every step its nominal time, and no worker slows down.

    Returns:
        the summary (no losses, no hashes), and what the simulator counted.
    """
    job = replace(job, method=replace(job.method, rounds=rounds or job.method.rounds, replan=None))
    clock = job.config.clock
    sigma, drift = (clock.noise, clock.drift) if noise else (0.0, 0.0)
    sequence = job.config.plan.sequence
    result = Simulation(
        job.programs([job.first_state(i, {}) for i in range(job.n)]),
        None,
        job.network(),
        ComputeTime(
            job.fleet,
            sequence,
            job.flops_per_token,
            sigma,
            drift,
            job.config.seed,
            clock.codec_gbytes_per_s,
            job.slowdown if noise else None,
            job.method.rounds,
        ),
        hooks,
        charge=job.bytes_charge,
        sequence=sequence,
        servers=job.servers,
        ahead=job.config.run.ahead,
    ).run()
    plan = job.method.plan
    records = [
        {
            "kind": "round",
            "worker": i,
            "round": job.method.rounds,
            "tokens": job.method.rounds * plan.tokens(i),
            "wall_s": account.wall_s,
            "bytes_sent": account.bytes_sent,
            "bytes_received": account.bytes_received,
            **{f"{kind}_s": account.seconds.get(kind, 0.0) for kind in KINDS},
        }
        for i, account in enumerate(result.accounts[: job.n])
    ]
    return summarise(job, "sim (timing only)", records, final_loss=None, worker_losses=None, distance=None, hashes=[], model=None), result
