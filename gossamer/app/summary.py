"""A run in one small object, computed from its round records: the same for every world, and for a run that was resumed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gossamer.app.job import Job
from gossamer.core.combine import mean
from gossamer.core.tree import Tree, numel
from gossamer.train.evaluate import perplexity

KINDS = ("compute", "straggler_idle", "network_idle")


def worker_names(job: Job) -> list[str]:
    """Each worker's site, numbered where a site has several."""
    names = []
    for i in range(job.n):
        site = job.fleet.site(i)
        names.append(site.name if site.workers == 1 else f"{site.name}-{job.fleet.rank(i)}")
    return names


def fleet_mean(job: Job, trees: Sequence[Tree]) -> Tree:
    """The model of the run: what all workers of a synchronous method hold, the mean of the workers of a gossip method."""
    return trees[0] if job.method.synchronous else mean(trees)


def consensus_distance(trees: Sequence[Tree]) -> float:
    """sqrt(mean_i |x_i - xbar|^2): how far the workers are from their mean, in the norm of all parameters together; 0 for equal ones."""
    if all(torch.equal(trees[0][k], t[k]) for t in trees[1:] for k in trees[0]):
        return 0.0
    centre = mean(trees)
    squares = [sum(float(((t[k] - c).double() ** 2).sum()) for k, c in centre.items()) for t in trees]
    return math.sqrt(sum(squares) / len(squares))


def _single(losses: Sequence[float | None] | None) -> dict[str, Any] | None:
    """The losses of the workers' own models: best, worst and mean of those that are left, and each."""
    left = [loss for loss in losses or () if loss is not None]
    return {"best": min(left), "worst": max(left), "mean": sum(left) / len(left), "workers": list(losses or ())} if left else None


def summarise(
    job: Job,
    world: str,
    records: Iterable[Mapping[str, Any]],
    *,
    final_loss: float | None,
    worker_losses: Sequence[float | None] | None,
    distance: float | None,
    hashes: Sequence[str | None],
    model: str | None,
    dead: Sequence[int] = (),
    agreed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of `summary.json` (design: run folder). `hashes` are of the workers' parameters, `model` is that of their mean."""
    records = list(records)
    n = job.n
    seconds = [dict.fromkeys(KINDS, 0.0) for _ in range(n)]
    wall = [0.0] * n
    sent, received, tokens, rounds = [0] * n, [0] * n, [0] * n, [0] * n
    refused, absent, exact_zeros = 0, 0, 0.0
    for r in records:
        if r["kind"] not in ("round", "close"):
            continue
        i = r["worker"]
        for kind in KINDS:
            seconds[i][kind] += r[f"{kind}_s"]
        wall[i] += r["wall_s"]
        sent[i] += r["bytes_sent"]
        received[i] += r["bytes_received"]
        if r["kind"] == "round":
            tokens[i] += r["tokens"] or 0
            rounds[i] = max(rounds[i], r["round"])
            refused += i in r.get("refused", ())
            absent += len(r.get("absent", ()))
            exact_zeros = max(exact_zeros, r.get("exact_zeros", 0.0))

    def shares(kind: str) -> dict[str, Any]:
        each = [seconds[i][kind] / wall[i] if wall[i] else 0.0 for i in range(n)]
        return {"mean": sum(each) / n, "workers": each}

    target = job.config.eval.target_perplexity
    hit_s = None
    if target is not None:
        hits = [r["time_s"] for r in records if r["kind"] == "eval" and r["loss"] is not None and perplexity(r["loss"]) <= target]
        hit_s = min(hits, default=None)
    return {
        "name": job.title,
        "method": job.method_name,
        "world": world,
        "fleet": job.fleet.name,
        "workers": n,
        "worker_names": worker_names(job),
        "worker_regions": [job.fleet.site(i).region for i in range(n)],
        "parameters": numel(job.layout),
        "frozen_parameters": job.outline.frozen[0],
        "rounds": min(rounds[i] for i in range(n) if i not in dead),
        "tokens": job.method.since[1] + sum(tokens),
        "seed": job.config.seed,
        "final_loss": final_loss,
        "final_perplexity": None if final_loss is None else perplexity(final_loss),
        "final_perplexity_workers": None
        if worker_losses is None
        else [None if loss is None else perplexity(loss) for loss in worker_losses],
        "final_loss_workers": _single(worker_losses),
        "wall_s": max(wall),
        "time_to_target_s": hit_s,
        "target_perplexity": target,
        "utilisation": shares("compute"),
        "straggler_idle": shares("straggler_idle"),
        "network_idle": shares("network_idle"),
        "bytes_sent": sent,
        "bytes_received": received,
        "refused": refused,
        "absent": absent,
        "dead": list(dead),
        "exact_zeros": exact_zeros,
        "consensus_distance": distance,
        "consensus": None if agreed is None else dict(agreed),
        "params_sha256": list(hashes),
        "model_sha256": model,
        "charged_as": None if world != "sim" else job.charged_as,
        "bytes_charge": 1.0 if world != "sim" else job.bytes_charge,
    }
