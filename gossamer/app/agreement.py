"""How the workers of a gossip run agreed, round by round: `consensus.json`, worked out at the end from what each noted of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.app.folder import RunFolder, clean, write_atomically
from gossamer.app.job import Job
from gossamer.core.consensus import exact, rate, spectral_gap
from gossamer.core.disagreement import MOST, drift_lr, expected, response
from gossamer.core.outer import CombineWhileAdapt, Gossip
from gossamer.core.sketch import read, spread

FILE = "consensus.json"
_SLOW = 1000
"""Workers from which on a spectral gap that is not exact takes too long."""


def write_agreement(job: Job, folder: RunFolder, records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Writes the file, if replicas may differ, and returns what the summary says of it."""
    found = agreement(job, records)
    if found is None:
        return None
    write_atomically(folder.path / FILE, json.dumps(clean(found), indent=1) + "\n")
    pairs = [(b, a) for b, a in zip(found["before"], found["after"], strict=True) if b]
    return {
        "contraction": math.sqrt(sum((a / b) ** 2 for b, a in pairs) / len(pairs)) if pairs else None,
        "contraction_expected": found["contraction_expected"],
        "distance_expected": found["expected"][-1],
    }


def agreement(job: Job, records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Distances of all rounds, as documented for run folders; None without sketches."""
    rounds: dict[int, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == "round" and "sketch" in record:
            rounds.setdefault(record["round"], {})[record["worker"]] = record
    if not rounds or job.n == 1:
        return None
    numbers = sorted(rounds)
    seen = [_Seen(job.n, rounds[t]) for t in numbers]
    before, after = _mixed(job, seen)
    drifts = [spread(s.drift[s.there]) for s in seen]
    law = response(job.method.outer)
    chi = None
    if law is not None and not job.method.cadence.overlap and job.n <= MOST and numbers[0] == 1:
        chi = expected(law, [s.weights for s in seen], drifts, [s.there for s in seen])
    graph, outer = job.method.topology, job.method.outer
    quick = exact(graph) or job.n < _SLOW
    return {
        "round": numbers,
        "distance": [spread(s.x[s.there]) for s in seen],
        "drift": drifts,
        "before": before,
        "after": after,
        "alignment": _alignment(seen),
        "expected": chi or [None] * len(seen),
        "contraction_expected": 1.0 - spectral_gap(graph) if quick else None,
        "exact": exact(graph),
        "rate": rate(outer.form, graph, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
        if quick and isinstance(outer, Gossip) and outer.linear
        else None,
    }


class _Seen:
    """What all workers noted of a round. Rows of those who did not come to its end are zero."""

    def __init__(self, n: int, records: Mapping[int, Mapping[str, Any]]) -> None:
        self.there = np.array([i in records for i in range(n)])
        self.x = _rows(n, {i: r["sketch"]["x"] for i, r in records.items()})
        self.drift = _rows(n, {i: r["sketch"]["drift"] for i, r in records.items()})
        self.weights = np.eye(n)
        """W of the exchange that landed."""
        for i, record in records.items():
            if row := record.get("weights"):
                self.weights[i] = 0.0
                for j, w in row.items():
                    self.weights[i, int(j)] = w


def _rows(n: int, texts: Mapping[int, str]) -> NDArray[np.float64]:
    first = read(next(iter(texts.values())))
    rows = np.zeros((n, len(first)))
    for i, text in texts.items():
        rows[i] = read(text)
    return rows


def _mixed(job: Job, seen: list[_Seen]) -> tuple[list[float | None], list[float | None]]:
    """Distances of what was mixed in each round, before and after: z = x + eta g as said in this round, with overlap in the one before.
    None where nothing was to be mixed: nothing said yet, all equal, or not all there that were heard."""
    eta, late = drift_lr(job.method.outer), bool(job.method.cadence.overlap)
    before: list[float | None] = []
    after: list[float | None] = []
    for k, now in enumerate(seen):
        told, z = now.there, None
        if late and k and not isinstance(job.method.outer, CombineWhileAdapt):
            last = seen[k - 1]
            z, told = last.x - eta * last.drift, now.there & last.there
        elif not late:
            x = seen[k - 1].x if k else np.zeros_like(now.x)  # all start from the same
            told = now.there & seen[k - 1].there if k else told
            z = x - eta * now.drift
        whole = not now.weights[now.there][:, ~told].any() and told.sum() > 1
        apart = spread(z[told]) if z is not None and whole else 0.0
        before.append(apart or None)
        after.append(spread((now.weights @ z)[told]) if z is not None and apart else None)
    return before, after


def _alignment(seen: list[_Seen]) -> list[float | None]:
    """Correlation of each worker's deviation from the mean with that of its drift g, over all workers."""
    out: list[float | None] = [None]
    for last, now in pairwise(seen):
        told = last.there & now.there
        x, g = last.x[told], -now.drift[told]
        x, g = x - x.mean(axis=0), g - g.mean(axis=0)
        size = math.sqrt(float((x * x).sum() * (g * g).sum()))
        out.append(float((x * g).sum()) / size if size else None)
    return out
