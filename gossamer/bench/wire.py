"""Bytes and time of one exchange by route and number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.app.config import Config, override
from gossamer.app.job import resolve
from gossamer.app.planning.timing import time_only

ROUTES = {
    "ring, fp32": {"method.codec": "fp32", "method.exchange": "ring"},
    "gather, sign": {"method.codec": "sign", "method.exchange": "gather"},
    "shard, sign": {"method.codec": "sign", "method.exchange": "shard"},
}


def wire_table(base: Config, workers: Sequence[int]) -> list[dict[str, Any]]:
    """For each n: what a worker sends in a round of each route, and how long the exchange takes on equal workers with 1 Gbit/s lines.

    The layout is that of the model that is charged, so the bytes are exact, headers included; the seconds are those of the event
    simulator without noise.
    """
    found = []
    for n in workers:
        for route, options in ROUTES.items():
            config = override(
                base,
                {
                    "method.name": "geomesh",
                    **options,
                    "plan.name": "uniform",
                    "model.preset": base.clock.charge_as,
                    "data.vocab_size": 32_000,
                    "clock.charge_as": "",
                    "clock.charge_tokens": 0,
                    "fleet.name": "uniform",
                    "fleet.workers": n,
                },
            )
            job = resolve(config)
            summary, result = time_only(job, rounds=1, noise=False)
            compute_s = max(account.seconds.get("compute", 0.0) for account in result.accounts)
            found.append(
                {
                    "workers": n,
                    "route": route,
                    "bytes": sum(summary["bytes_sent"]) / n,
                    "exchange_s": summary["wall_s"] - compute_s,
                }
            )
    return found
