"""What a round of a job would cost each worker, before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gossamer.app.job import Job
from gossamer.app.planning.timing import time_only
from gossamer.app.workload import costs_of
from gossamer.core.compensate import changes_peers, model_s
from gossamer.core.predict import predict
from gossamer.core.wires import Net

_ROUNDS = 3
"""Of a simulation, where there is no formula."""


@dataclass(frozen=True)
class Forecast:
    """A round, by worker."""

    round_s: float
    compute_s: Sequence[float]
    exchange_s: Sequence[float] | None
    """If all finish their steps together, hidden or not. None: not known."""
    straggler_s: Sequence[float]
    network_s: Sequence[float]
    wall_s: Sequence[float]
    sent_bytes: Sequence[float]
    """On the clock."""

    @property
    def utilisation(self) -> float:
        """Compute over wall time, the mean over workers."""
        return self._share(self.compute_s)

    @property
    def straggler(self) -> float:
        """Straggler idle over wall time, the mean over workers."""
        return self._share(self.straggler_s)

    @property
    def network(self) -> float:
        """Network idle over wall time, the mean over workers."""
        return self._share(self.network_s)

    def _share(self, seconds: Sequence[float]) -> float:
        return fmean(s / wall_s for s, wall_s in zip(seconds, self.wall_s, strict=True))


def forecast(job: Job, net: Net | None = None) -> Forecast:
    """By formula (gossamer.core.predict); a method with servers is simulated for a few rounds."""
    if job.method.tiers:
        return simulated(job, min(_ROUNDS, job.method.rounds), noise=False)
    costs = costs_of(job.config, job.fleet, job.method.plan.batch, job.charged)
    p = predict(job.method, net or Net(job.fleet), job.layout, costs)
    return Forecast(
        p.round_s, p.compute_s.tolist(), p.exchange_s.tolist(), p.straggler_s.tolist(), p.network_s.tolist(), p.wall_s.tolist(),
        p.sent_bytes.tolist(),
    )  # fmt: skip


def modelled_s(job: Job) -> float | None:
    """A round by the literature's model (gossamer.core.compensate.model_s). None: it has nothing to say of the method, which is neither
    gossip nor an all-reduce of float32 or a codec's packets."""
    if job.method.tiers or not (job.method.exchange.everybody or changes_peers(job.method)):
        return None
    return model_s(job.method, Net(job.fleet), job.layout, costs_of(job.config, job.fleet, job.method.plan.batch, job.charged))


def simulated(job: Job, rounds: int | None = None, *, noise: bool = True) -> Forecast:
    """The mean round of a run on the virtual clock alone: of all its rounds, or of the first few."""
    summary, result = time_only(job, rounds=rounds, noise=noise)
    rounds = rounds or job.method.rounds
    accounts = result.accounts[: job.n]
    kinds = ("compute", "straggler_idle", "network_idle")
    compute, straggler, network = ([a.seconds.get(kind, 0.0) / rounds for a in accounts] for kind in kinds)
    return Forecast(
        summary["wall_s"] / rounds, compute, None, straggler, network, [a.wall_s / rounds for a in accounts],
        [a.bytes_sent * job.bytes_charge / rounds for a in accounts],
    )  # fmt: skip
