"""What a run would do to each worker, before it is run."""

from __future__ import annotations

from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.app.job import Job
from gossamer.app.progress import count, duration
from gossamer.app.timing import time_only
from gossamer.core.consensus import exact, rate, rounds_to
from gossamer.core.exchange import Gather
from gossamer.core.outer import Gossip
from gossamer.core.tree import numel
from gossamer.sim.driver import SimResult
from gossamer.worker.packet import HEADER_BYTES

_ROUNDS = 3
_MANY = 64
_SHOWN = 24


def predict(job: Job) -> tuple[tuple[dict[str, Any], SimResult], int]:
    """A few rounds on the virtual clock, without noise; and how many: one where all workers of a large fleet send to all."""
    rounds = min(1 if job.method.synchronous and job.n > _MANY else _ROUNDS, job.method.rounds)
    return time_only(job, rounds=rounds, noise=False), rounds


def show(job: Job, console: Console, timed: tuple[dict[str, Any], SimResult], rounds: int) -> None:
    """Prints each worker's share of a round, as timed over `rounds` of them, and what it means for the run."""
    method, plan, n = job.method, job.method.plan, job.n
    summary, result = timed
    title = f"{job.title}: a round on {job.fleet.name}" + (f"  (clock and bytes charged as {job.charged_as})" if job.charged_as else "")
    table = Table(title=title, box=box.SIMPLE, title_style="bold", title_justify="left", pad_edge=False)
    for name in ("worker", "site", "GPU"):
        table.add_column(name, justify="left", no_wrap=True)
    for name in ("steps\nH", "batch\nB", "tokens", "compute\ns", "straggler\ns", "network\ns", "sent\nMB", "utilisation\n%"):
        table.add_column(name, justify="right", no_wrap=True)
    for i in range(min(n, _SHOWN)):
        account, site = result.accounts[i], job.fleet.site(i)
        per_round = {k: v / rounds for k, v in account.seconds.items()}
        table.add_row(
            str(i), site.name, site.gpu.name, str(plan.steps[i]), str(plan.batch[i]), f"{plan.tokens(i):,}",
            f"{per_round.get('compute', 0.0):.2f}", f"{per_round.get('straggler_idle', 0.0):.2f}",
            f"{per_round.get('network_idle', 0.0):.2f}", f"{account.bytes_sent * job.bytes_charge / rounds / 1e6:.1f}",
            f"{100 * account.share('compute'):.1f}",
        )  # fmt: skip
    console.print(table)
    if n > _SHOWN:
        console.print(f"... and {n - _SHOWN} more workers")
    parameters = numel(job.layout)
    whole_s = summary["wall_s"] / rounds * method.rounds
    heard_by = len(method.topology.at(0).out(0)) if isinstance(method.exchange, Gather) else n - 1
    sent = method.exchange.sent_bytes(method.codec, job.layout, heard_by, n, HEADER_BYTES)
    lines = [
        f"{method.rounds} rounds of {count(plan.tokens_per_round)} tokens: {count(method.total_tokens)} tokens, "
        f"about {duration(whole_s)} of virtual time",
        f"model: {count(parameters)} parameters; a worker sends {sent / 1e6:.2f} MB a round ({sent / (4 * parameters):.3f} x fp32)"
        + (f", charged as {sent * job.bytes_charge / 1e6:.1f} MB" if job.charged_as else ""),
        f"mean: utilisation {100 * summary['utilisation']['mean']:.1f} %, straggler idle {100 * summary['straggler_idle']['mean']:.1f} %, "
        f"network idle {100 * summary['network_idle']['mean']:.1f} %",
    ]
    copies = 1 + len(method.outer.init({"p": torch.zeros(1)})) + (method.feedback is not None) + (method.cadence.overlap > 0)
    names = "anchor" + ("" if copies == 1 else f" and {copies - 1} more float32 {'copy' if copies == 2 else 'copies'}")
    charged = 4 * copies * parameters * job.bytes_charge
    of = " of the model that is charged" if job.charged_as else ""
    lines.append(f"outer state per worker, beside the model: {charged / 1e6:.1f} MB ({names}{of})")
    if isinstance(method.outer, Gossip) and n > 1:
        o = method.outer
        r = rate(o.form, method.topology, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov)
        lines.append(
            f"consensus: the workers' disagreement shrinks by {r:.3f} a round ({'exact' if exact(method.topology) else 'estimated'}), "
            + (f"to a thousandth in {rounds_to(r):.0f} rounds" if r < 1 else "so it does NOT shrink: lower the outer momentum")
        )
    for line in lines:
        console.print(line, highlight=False)
