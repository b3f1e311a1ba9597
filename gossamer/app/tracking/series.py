"""The numbers of records by name: what every logger shows, under the same names (docs/loggers.md).

>>> [*row_of({"kind": "eval", "round": 2, "worker": "fleet", "tokens": 640, "loss": 1.5, "perplexity": 4.5}).values]
['eval/loss', 'eval/perplexity']
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

MOST_WORKERS = 64
"""So many workers have series of their own, the first ones; those of the fleet count all."""
_SHARES = {"time/utilisation": "compute_s", "time/straggler_idle": "straggler_idle_s", "time/network_idle": "network_idle_s"}
_COUNTS = {"bytes/sent": "bytes_sent", "bytes/received": "bytes_received"}
_EVALUATED = {"eval/loss": "loss", "eval/perplexity": "perplexity", "eval/consensus_distance": "consensus_distance"}
_ROUND = {
    "train/loss": "loss",
    "train/drift_norm": "drift_norm",
    "train/steps": "steps",
    "time/clock_s": "time_s",
    "time/round_s": "wall_s",
}
_KEPT = ("tokens", "tokens_total", "loss", "time_s", "wall_s", *_SHARES.values(), *_COUNTS.values())


class Row(NamedTuple):
    """Numbers that belong together, and where they stand: planned tokens of all workers so far, and rounds completed."""

    values: dict[str, float]
    tokens: int
    round: int


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Parts of the round's time, 0 to 1."""
    return {name: record[key] / record["wall_s"] for name, key in _SHARES.items()} if record["wall_s"] else {}


def row_of(record: Mapping[str, Any], speaker: int | None = None, tokens: int = 0) -> Row | None:
    """The numbers of one record; None: it has none to show.

    Args:
        record: of metrics.jsonl, or as it is about to be written there.
        speaker: the worker whose evaluations are those of the fleet, as all workers have one model; None: nobody's are.
        tokens: where a record without tokens of its own stands.
    """
    worker = record["worker"]
    if record["kind"] == "round":
        found = {name: record[key] for name, key in _ROUND.items()} | _shares(record)
        found |= {name: record[key] for name, key in _COUNTS.items()}
        found["train/refused"] = len(record.get("refused", ()))
        named, tokens = _of_worker(found, worker), record["tokens_total"]
    elif record["kind"] == "eval":
        found = {name: record[key] for name, key in _EVALUATED.items() if key in record}
        named = {} if worker == "fleet" else _of_worker(found, worker)
        named |= found if worker in ("fleet", speaker) else {}
        tokens = record["tokens"]
    elif record["kind"] == "members":
        named = {"members/absent": len(record["absent"])}
    elif record["kind"] == "plan":
        named = {"plan/version": record["version"], "plan/predicted_gain": record["predicted_gain"]}
        for i, (steps, batch) in enumerate(zip(record["steps"], record["batch"], strict=True)):
            named |= _of_worker({"plan/steps": steps, "plan/batch": batch}, i)
    else:
        return None
    values = _finite(named)
    return Row(values, tokens, record["round"]) if values else None


def _of_worker(values: Mapping[str, Any], worker: int) -> dict[str, Any]:
    return {f"worker/{worker}/{name}": value for name, value in values.items()} if worker < MOST_WORKERS else {}


class Fleet:
    """The numbers of all workers together, once each has completed a round: the loss weighted by tokens, means of shares, sums of bytes.

    Args:
        n: so many workers complete a round; where it may be fewer, `closed` says when all have.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._open: dict[int, list[dict[str, Any]]] = {}

    def add(self, record: Mapping[str, Any]) -> Row | None:
        """One more record. The numbers of the round that it completes."""
        if record["kind"] != "round":
            return None
        there = self._open.setdefault(record["round"], [])
        there.append({key: record[key] for key in _KEPT})
        return self.closed(record["round"]) if len(there) == self.n else None

    def closed(self, round: int) -> Row | None:
        """All that come to the end of the round have; None: nobody did, or it is known."""
        there = self._open.pop(round, [])
        if not there:
            return None
        learned = [(r["tokens"], r["loss"]) for r in there if r["loss"] is not None and math.isfinite(r["loss"])]
        tokens = sum(t for t, _ in learned)
        values: dict[str, Any] = {"train/loss": sum(t * loss for t, loss in learned) / tokens if tokens else None}
        shares = [_shares(r) for r in there if r["wall_s"]]
        values |= {name: sum(s[name] for s in shares) / len(shares) for name in _SHARES if shares}
        values |= {name: sum(r[key] for r in there) for name, key in _COUNTS.items()}
        values |= {"time/clock_s": max(r["time_s"] for r in there), "time/round_s": max(r["wall_s"] for r in there)}
        return Row(_finite(values), max(r["tokens_total"] for r in there), round)

    def left(self) -> Iterator[Row]:
        """The numbers of rounds that not all have completed, and will not."""
        for round in sorted(self._open):
            if (row := self.closed(round)) is not None:
                yield row

    def back_to(self, round: int) -> None:
        """What lies after `round` did not happen."""
        for later in [r for r in self._open if r > round]:
            del self._open[later]
