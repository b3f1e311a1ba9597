"""Lines of metrics.jsonl and trace.jsonl, as objects."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.core.errors import BadInput

KINDS = ("compute", "encode", "send", "decode", "outer", "straggler_idle", "network_idle")
"""Kinds of time, in the order in which they are drawn everywhere."""


@dataclass(frozen=True)
class Round:
    """One worker's account of one round."""

    round: int
    worker: int
    tokens: int
    """The worker's own tokens of the round."""
    tokens_total: int
    """Planned global tokens after the round."""
    time_s: float
    loss: float
    """Nats per token on the worker's own data."""
    seconds: Mapping[str, float]
    """Seconds by kind (see KINDS)."""
    wall_s: float
    bytes_sent: int
    bytes_received: int
    steps: int
    """Inner steps; 0 where it does not say."""
    weights: Mapping[int, float]
    """Whom the worker heard, with weight; empty where it does not say."""
    waited_for: int | None = None
    """Whose message ended the longest wait."""
    links: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """What came straight from each sender: bytes, and seconds since that was ready."""


@dataclass(frozen=True)
class Close:
    """What a worker spent after its last round, draining what was still under way."""

    worker: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text; `worker` is None for the mean model of the fleet."""

    round: int
    worker: int | None
    tokens: int
    time_s: float
    loss: float
    consensus_distance: float | None = None
    """How far the workers were from their mean."""


@dataclass(frozen=True)
class Replanned:
    """A new plan, in force from the round after `round` on."""

    round: int
    steps: tuple[int, ...]
    batch: tuple[int, ...]
    gain: float
    """Predicted, as a fraction of the time per token."""


@dataclass(frozen=True)
class Members:
    """After `round` rounds other workers are left out than before."""

    round: int
    absent: tuple[int, ...]
    """All that are."""


@dataclass(frozen=True)
class Span:
    """A stretch of one worker's time."""

    worker: int
    kind: str
    start_s: float
    end_s: float
    round: int


class Event(dict[str, Any]):
    """One line of a .jsonl file that remembers where it stood, so that a missing key is reported by file and line."""

    where: str = ""

    def __missing__(self, key: str) -> Any:
        raise BadInput(f"{self.where} lacks {key!r}; expected a line as documented for run folders")

    def num(self, key: str) -> float:
        value = self[key]
        if value is None:
            return math.nan  # a run of the clock alone has no loss and no tokens
        if isinstance(value, (int, float)):
            return float(value)
        raise BadInput(f"{self.where}: {key} is {value!r}, expected a number")

    def whole(self, key: str) -> int:
        value = self.num(key)
        if not math.isfinite(value):
            raise BadInput(f"{self.where}: {key} is {self[key]!r}, expected a whole number")
        return int(value)


def damage(error: Exception) -> str:
    """What is wrong with a file, as somebody who looks into it would say."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def lines(path: Path) -> tuple[list[Event], bool]:
    """The objects of a .jsonl file, and whether the last line was cut short. Damage anywhere else is an error."""
    found_lines = path.read_bytes().splitlines()
    while found_lines and not found_lines[-1].strip():
        found_lines.pop()
    events: list[Event] = []
    for index, line in enumerate(found_lines):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError(f"a {type(found).__name__}, expected an object")
        except ValueError as error:
            if index == len(found_lines) - 1:
                return events, True
            raise BadInput(
                f"{str(path)!r} line {index + 1} of {len(found_lines)} is damaged ({error}); only a cut last line can be left out"
            ) from error
        event = Event(found)
        event.where = f"{str(path)!r} line {index + 1}"
        events.append(event)
    return events, False


def seconds_of(e: Event) -> dict[str, float]:
    """Seconds by kind; a kind that is not mentioned took none."""
    return {kind: e.num(f"{kind}_s") if f"{kind}_s" in e else 0.0 for kind in KINDS}


def round_of(e: Event) -> Round:
    """A record of kind "round"."""
    return Round(
        round=e.whole("round"),
        worker=e.whole("worker"),
        tokens=0 if e["tokens"] is None else e.whole("tokens"),
        tokens_total=0 if e["tokens_total"] is None else e.whole("tokens_total"),
        time_s=e.num("time_s"),
        loss=e.num("loss"),
        seconds=seconds_of(e),
        wall_s=e.num("wall_s"),
        bytes_sent=e.whole("bytes_sent"),
        bytes_received=e.whole("bytes_received"),
        steps=e.whole("steps") if "steps" in e else 0,
        weights=_weights(e),
        waited_for=None if e.get("waited_for") is None else e.whole("waited_for"),
        links=_links(e),
    )


def _weights(e: Event) -> dict[int, float]:
    found = e.get("weights") or {}
    if not isinstance(found, dict) or not all(k.isdigit() and isinstance(w, (int, float)) for k, w in found.items()):
        raise BadInput(f"{e.where}: weights is {found!r}, expected an object from workers to numbers")
    return {int(k): float(w) for k, w in found.items()}


def _links(e: Event) -> dict[int, tuple[int, float]]:
    try:
        return {int(j): (int(told[0]), float(told[1])) for j, told in (e.get("links") or {}).items()}
    except (AttributeError, ValueError, TypeError, IndexError) as error:
        raise BadInput(f"{e.where}: links is {e['links']!r}, expected an object from workers to [bytes, seconds]") from error


def plan_of(e: Event) -> Replanned:
    """A record of kind "plan"."""
    return Replanned(e.whole("round"), tuple(map(int, e["steps"])), tuple(map(int, e["batch"])), e.num("predicted_gain"))


def evaluation_of(e: Event) -> Evaluation:
    """A record of kind "eval"."""
    worker = None if e["worker"] == "fleet" else e.whole("worker")
    apart = e.num("consensus_distance") if e.get("consensus_distance") is not None else None
    return Evaluation(e.whole("round"), worker, e.whole("tokens"), e.num("time_s"), e.num("loss"), apart)


class Told(NamedTuple):
    """What metrics.jsonl says, by kind."""

    rounds: tuple[Round, ...]
    closes: tuple[Close, ...]
    evaluations: tuple[Evaluation, ...]
    plans: tuple[Replanned, ...]
    members: tuple[Members, ...]


def told_of(metrics: Iterable[Event]) -> Told:
    """All records of these kinds, in their order."""
    kinds: dict[Any, list[Event]] = defaultdict(list)
    for e in metrics:
        kinds[e.get("kind")].append(e)
    return Told(
        tuple(round_of(e) for e in kinds["round"]),
        tuple(Close(e.whole("worker"), seconds_of(e)) for e in kinds["close"]),
        tuple(evaluation_of(e) for e in kinds["eval"]),
        tuple(plan_of(e) for e in kinds["plan"]),
        tuple(Members(e.whole("round"), tuple(map(int, e["absent"]))) for e in kinds["members"]),
    )


def span_of(e: Event) -> Span:
    """A line of trace.jsonl."""
    return Span(e.whole("worker"), str(e["kind"]), e.num("start_s"), e.num("end_s"), e.whole("round"))
