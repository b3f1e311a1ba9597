"""A run folder, read once and checked: `Run.load("runs/geomesh")`.

A folder holds four files (formats are stable, see the documentation of run folders):

    config.toml     the full resolved configuration
    metrics.jsonl   one object per event: rounds, evaluations
    trace.jsonl     spans of each worker's time
    summary.json    the numbers of the whole run
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput

CONFIG, METRICS, TRACE, SUMMARY = "config.toml", "metrics.jsonl", "trace.jsonl", "summary.json"
CONSENSUS = "consensus.json"
"""Gossip alone."""
FILES = (CONFIG, METRICS, TRACE, SUMMARY)
KINDS = ("compute", "encode", "send", "decode", "outer", "straggler_idle", "network_idle")
"""Kinds of time, in the order in which they are drawn everywhere."""
NEEDED = ("method", "world", "workers", "rounds", "tokens", "final_loss", "final_perplexity", "wall_s", "bytes_sent")


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
class Agreement:
    """How workers that may differ agreed, round by round; lists of equal length. None: nothing to tell."""

    round: tuple[int, ...]
    distance: tuple[float | None, ...]
    drift: tuple[float | None, ...]
    before: tuple[float | None, ...]
    after: tuple[float | None, ...]
    alignment: tuple[float | None, ...]
    expected: tuple[float | None, ...]
    contraction_expected: float | None
    exact: bool


@dataclass(frozen=True)
class Single:
    """Final losses of the workers' own models."""

    best: float
    worst: float
    mean: float
    workers: tuple[float | None, ...]


@dataclass(frozen=True)
class Span:
    """A stretch of one worker's time."""

    worker: int
    kind: str
    start_s: float
    end_s: float
    round: int


@dataclass(frozen=True)
class Share:
    """A fraction of wall time: the fleet's mean and each worker's."""

    mean: float
    workers: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """Everything a run folder says."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: tuple[Round, ...]
    closes: tuple[Close, ...]
    evaluations: tuple[Evaluation, ...]
    spans: tuple[Span, ...]
    plans: tuple[Replanned, ...]
    """Plans that replaced the first."""
    agreement: Agreement | None
    torn: tuple[str, ...]
    """Files whose last line was cut short (the run died while writing) and was left out."""

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Reads a run folder. BadInput when it is none, when a file is missing, or when a line that is not the last is damaged."""
        folder = Path(folder)
        if not folder.is_dir():
            raise BadInput(f"{str(folder)!r} is not a folder; expected a run folder with {', '.join(FILES)}")
        missing = [name for name in FILES if not (folder / name).is_file()]
        if len(missing) == len(FILES):
            raise BadInput(f"{str(folder)!r} is not a run folder: it holds none of {', '.join(FILES)}; give the folder that a run wrote")
        if missing:
            hint = "; the run has not finished: resume it" if missing == [SUMMARY] else "; run again, or copy the whole folder"
            raise BadInput(f"run folder {str(folder)!r} lacks {', '.join(missing)}{hint}")
        metrics, torn_metrics = _lines(folder / METRICS)
        trace, torn_trace = _lines(folder / TRACE)
        return cls(
            folder=folder,
            config=_config(folder / CONFIG),
            summary=_summary(folder / SUMMARY),
            rounds=tuple(_round(e) for e in metrics if e.get("kind") == "round"),
            closes=tuple(Close(e.whole("worker"), _seconds(e)) for e in metrics if e.get("kind") == "close"),
            evaluations=tuple(_evaluation(e) for e in metrics if e.get("kind") == "eval"),
            spans=tuple(_span(e) for e in trace),
            plans=tuple(_plan(e) for e in metrics if e.get("kind") == "plan"),
            agreement=_agreement(folder / CONSENSUS),
            torn=tuple(name for name, torn in ((METRICS, torn_metrics), (TRACE, torn_trace)) if torn),
        )

    @property
    def workers(self) -> int:
        """How many workers took part."""
        given = self.summary["workers"]
        return len(given) if isinstance(given, list) else int(given)

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Packet bytes sent, per worker, as charged to the clock."""
        return tuple(round(b * self.bytes_charge) for b in self.summary["bytes_sent"])

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """Packet bytes received, per worker; empty when the summary does not say."""
        return tuple(round(b * self.bytes_charge) for b in self.summary.get("bytes_received") or ())

    @property
    def bytes_charge(self) -> float:
        """Bytes on the clock per byte really sent: 1, unless a bigger model is charged."""
        return self.number("bytes_charge") or 1.0

    @property
    def charged_as(self) -> str | None:
        """The bigger model whose clock and bytes were charged, or None when the trained model's own were."""
        name = self.summary.get("charged_as")
        return None if name is None else str(name)

    @property
    def moves(self) -> bool:
        """Whether workers mix with others in other rounds."""
        heard: dict[int, set[frozenset[int]]] = {}
        for r in self.rounds:
            heard.setdefault(r.worker, set()).add(frozenset(r.weights))
        return any(len(peers - {frozenset()}) > 1 for peers in heard.values())

    @property
    def single(self) -> Single | None:
        """How good the workers' own models are; None where they are equal, or none was evaluated."""
        found = self.summary.get("final_loss_workers")
        if not isinstance(found, Mapping) or not all(isinstance(found.get(k), (int, float)) for k in ("best", "worst", "mean")):
            return None
        each = [v if isinstance(v, (int, float)) else None for v in found.get("workers") or ()]
        return Single(float(found["best"]), float(found["worst"]), float(found["mean"]), tuple(each))

    def number(self, key: str) -> float | None:
        """A number of the summary; None when it is absent, null or not finite."""
        value = self.summary.get(key)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if ok and value is not None else None

    def share(self, key: str) -> Share | None:
        """`utilisation`, `straggler_idle` or `network_idle`; None when the summary does not say."""
        value = self.summary.get(key)
        if isinstance(value, Mapping) and isinstance(value.get("mean"), (int, float)):
            return Share(float(value["mean"]), tuple(float(v) for v in value.get("workers") or ()))
        return Share(float(value), ()) if isinstance(value, (int, float)) else None


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{str(path)!r} is not valid TOML ({error}); restore it from the run's configuration") from error


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{str(path)!r} is not valid JSON ({error}); resume the run so that it is written again") from error
    if not isinstance(found, dict):
        raise BadInput(f"{str(path)!r} holds a {type(found).__name__}, expected an object")
    missing = [key for key in NEEDED if key not in found]
    if missing:
        raise BadInput(f"{str(path)!r} lacks {', '.join(missing)}; it was written by another version: run again with this one")
    if not isinstance(found["bytes_sent"], list):
        raise BadInput(f"{str(path)!r}: bytes_sent is {found['bytes_sent']!r}, expected a list with one number per worker")
    return found


class _Event(dict[str, Any]):
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


def _lines(path: Path) -> tuple[list[_Event], bool]:
    """The objects of a .jsonl file, and whether the last line was cut short. Damage anywhere else is an error."""
    lines = path.read_bytes().splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    events: list[_Event] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError(f"a {type(found).__name__}, expected an object")
        except ValueError as error:
            if index == len(lines) - 1:
                return events, True
            raise BadInput(
                f"{str(path)!r} line {index + 1} of {len(lines)} is damaged ({error}); only a cut last line can be left out"
            ) from error
        event = _Event(found)
        event.where = f"{str(path)!r} line {index + 1}"
        events.append(event)
    return events, False


def _seconds(e: _Event) -> dict[str, float]:
    """Seconds by kind; a kind that is not mentioned took none."""
    return {kind: e.num(f"{kind}_s") if f"{kind}_s" in e else 0.0 for kind in KINDS}


def _round(e: _Event) -> Round:
    return Round(
        round=e.whole("round"),
        worker=e.whole("worker"),
        tokens=0 if e["tokens"] is None else e.whole("tokens"),
        tokens_total=0 if e["tokens_total"] is None else e.whole("tokens_total"),
        time_s=e.num("time_s"),
        loss=e.num("loss"),
        seconds=_seconds(e),
        wall_s=e.num("wall_s"),
        bytes_sent=e.whole("bytes_sent"),
        bytes_received=e.whole("bytes_received"),
        steps=e.whole("steps") if "steps" in e else 0,
        weights=_weights(e),
    )


def _weights(e: _Event) -> dict[int, float]:
    found = e.get("weights") or {}
    if not isinstance(found, dict) or not all(k.isdigit() and isinstance(w, (int, float)) for k, w in found.items()):
        raise BadInput(f"{e.where}: weights is {found!r}, expected an object from workers to numbers")
    return {int(k): float(w) for k, w in found.items()}


def _plan(e: _Event) -> Replanned:
    return Replanned(e.whole("round"), tuple(map(int, e["steps"])), tuple(map(int, e["batch"])), e.num("predicted_gain"))


def _agreement(path: Path) -> Agreement | None:
    """What the file says; None where there is none. BadInput where it is not what runs write."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rounds = tuple(map(int, found["round"]))
        lists = {k: _numbers(found[k]) for k in ("distance", "drift", "before", "after", "alignment", "expected")}
        if any(len(values) != len(rounds) for values in lists.values()):
            raise ValueError("lists of unlike lengths")
        (law,) = _numbers([found["contraction_expected"]])
        return Agreement(rounds, contraction_expected=law, exact=bool(found["exact"]), **lists)
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{str(path)!r} is damaged ({error!r}): remove it, and the report leaves its figures out") from error


def _numbers(values: Any) -> tuple[float | None, ...]:
    return tuple(None if v is None else float(v) for v in values)


def _evaluation(e: _Event) -> Evaluation:
    worker = None if e["worker"] == "fleet" else e.whole("worker")
    apart = e.num("consensus_distance") if e.get("consensus_distance") is not None else None
    return Evaluation(e.whole("round"), worker, e.whole("tokens"), e.num("time_s"), e.num("loss"), apart)


def _span(e: _Event) -> Span:
    return Span(e.whole("worker"), str(e["kind"]), e.num("start_s"), e.num("end_s"), e.whole("round"))
