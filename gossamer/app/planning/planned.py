"""`plan.json`: what a run was meant to be, for those who read its folder: who does what, how long a round takes, what lies between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.app.folder import RunFolder, clean, write_atomically
from gossamer.app.job import Job
from gossamer.app.planning.forecast import forecast
from gossamer.app.summary import worker_names
from gossamer.core.errors import BadInput

PLAN = "plan.json"
MOST = 256
"""Workers up to which a round is forecast."""
MOST_SITES = 32
"""Sites up to which the lines between them are listed."""


def begin(path: Path, job: Job, facts: dict[str, Any], tokenizer: Path | None = None, names: Sequence[str] | None = None) -> RunFolder:
    """The folder of a new run, with what was planned beside its configuration and facts (see RunFolder.create, which this calls).

    Args:
        names: of the workers, where the fleet does not say them.

    Raises:
        BadInput: the folder holds something, or cannot be made.
        RunFailed: the files cannot be written.
    """
    folder = RunFolder.create(path, job.config, facts, tokenizer)
    write(path, job, facts["world"], names)
    return folder


def write(path: Path, job: Job, world: str, names: Sequence[str] | None = None) -> None:
    """Writes `plan.json` into the folder of a run: when it begins, and when it goes on with other workers.

    Raises:
        RunFailed: it cannot be written.
    """
    found = planned(job, world) | ({} if names is None else {"worker_names": list(names)})
    write_atomically(path / PLAN, json.dumps(clean(found), separators=(",", ":")) + "\n")


def planned(job: Job, world: str) -> dict[str, Any]:
    """The content of `plan.json` (docs/run-folder.md). Seconds are those of the clock of `world`."""
    method, fleet = job.method, job.fleet
    return {
        "title": job.title,
        "method": job.method_name,
        "fleet": fleet.name,
        "workers": job.n,
        "worker_names": worker_names(job),
        "worker_regions": [fleet.site(i).region for i in range(job.n)],
        "rounds": method.rounds,
        "tokens": method.total_tokens,
        "sequence": method.plan.sequence,
        "steps": list(method.plan.steps),
        "batch": list(method.plan.batch),
        "round": _round(job, world),
        "charged_as": job.charged_as if world == "sim" else None,
        "bytes_charge": job.bytes_charge if world == "sim" else 1.0,
        "lines": _lines(job) if len(fleet.sites) <= MOST_SITES else None,
    }


def _round(job: Job, world: str) -> dict[str, Any] | None:
    """A round by the formulas of `gossamer plan`; of a real run that is paced, its inner steps alone. None: not known."""
    if world != "sim" and job.config.clock.pace_s:
        compute_s = [h * (job.pace_s(i) or 0.0) for i, h in enumerate(job.method.plan.steps)]
        return {"clock": "pace", "round_s": max(compute_s), "compute_s": compute_s}
    if job.method.tiers or job.n > MOST:
        return None
    try:
        seen = forecast(job)
    except BadInput:
        return None
    return {
        "clock": "virtual" if world == "sim" else "fleet",
        "round_s": seen.round_s,
        "compute_s": list(seen.compute_s),
        "straggler_idle_s": list(seen.straggler_s),
        "network_idle_s": list(seen.network_s),
        "bytes_sent": [b / job.bytes_charge for b in seen.sent_bytes],
    }


def _lines(job: Job) -> dict[str, Any]:
    """Each worker's site; what each site can send and receive; what one message gets alone from site a to site b: [a, b, Mbit/s, ms]."""
    fleet = job.fleet
    sites = [fleet.site(i) for i in range(job.n)]
    index = {site.name: a for a, site in enumerate(fleet.sites)}
    first = {index[site.name]: i for i, site in reversed(list(enumerate(sites)))}
    links = [(a, b, fleet.link(i, j)) for a, i in sorted(first.items()) for b, j in sorted(first.items()) if a != b]
    return {
        "sites": list(index),
        "site": [index[site.name] for site in sites],
        "up_mbps": [site.up_mbps for site in fleet.sites],
        "down_mbps": [site.down_mbps for site in fleet.sites],
        "between": [[a, b, link.flow_mbps, link.latency_ms] for a, b, link in links],
        "within": [fleet.local.flow_mbps, fleet.local.latency_ms],
    }
