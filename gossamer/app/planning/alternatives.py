"""Other methods on the same fleet, and which of them comes to the token budget first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gossamer.app.job import Job
from gossamer.app.planning.cost import cost, priced
from gossamer.app.planning.forecast import Forecast, forecast
from gossamer.app.settings import MethodSection, Option
from gossamer.core.errors import BadInput
from gossamer.core.wires import Net

_ALIKE = 0.01
"""Times that differ by less are not told apart."""


@dataclass(frozen=True)
class Row:
    """A method on the fleet, to the token budget."""

    label: str
    plan: str
    forecast: Forecast
    time_s: float
    settings: tuple[str, ...] = ()
    """What to set to have it; nothing where it is the configuration itself."""
    cost: float | None = None
    """In the fleet's currency; None where it has no prices."""
    configured: bool = False
    """Whether it is the configuration's own method, and its own work."""


_OTHERS: tuple[tuple[str, str, dict[str, Option], str], ...] = (
    ("DiLoCo", "diloco", {}, "uniform"),
    ("CSS only", "geomesh", {}, "uniform"),
    ("AWB only, fp32", "geomesh", {"codec": "fp32"}, "awb"),
    ("GeoMesh", "geomesh", {}, "awb"),
    ("GeoMesh + overlap", "geomesh", {"overlap": 0.5}, "awb"),
    ("GeoMesh by shard + overlap", "geomesh", {"exchange": "shard", "overlap": 0.5}, "awb"),
    ("gossip (GASLoC, two peers)", "gasloc", {"topology": "two_peer"}, "awb"),
)
"""Label, method, its options, plan. From the plainest on: of two that take as long, the first is chosen."""


def others(job: Job, net: Net) -> list[Row]:
    """The usual methods on the job's fleet, to its token budget. One that cannot be (two peers among two workers) is left out."""
    rows = []
    for label, name, options, plan in _OTHERS:
        method = MethodSection.model_validate({"name": name, **options})
        config = job.config.model_copy(update={"method": method, "plan": job.config.plan.model_copy(update={"name": plan})})
        try:
            other = job.variant(config)
        except BadInput:
            continue
        found = row(other, label, plan, forecast(other, net), job.method.total_tokens)
        asked = {"method.name": name, **{f"method.{key}": value for key, value in options.items()}, "plan.name": plan}
        rows.append(replace(found, settings=tuple(f"{key}={value}" for key, value in asked.items()), configured=other.method == job.method))
    return rows


def row(job: Job, label: str, plan: str, seen: Forecast, tokens: int) -> Row:
    """`seen` taken to a budget of `tokens`."""
    rounds = tokens / (job.method.total_tokens / job.method.rounds)
    return Row(label, plan, seen, seen.round_s * rounds, cost=cost(job, seen, tokens).total if priced(job) else None)


def choice(rows: Sequence[Row]) -> Row:
    """The row with the least time; of several within a hundredth of it, the first."""
    least = min(r.time_s for r in rows)
    return next(r for r in rows if r.time_s <= least * (1 + _ALIKE))
