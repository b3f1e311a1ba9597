"""A run folder, read once and checked: `Run.load("runs/geomesh")`.

A folder holds four files (formats are stable, see the documentation of run folders):

    config.toml     the full resolved configuration
    metrics.jsonl   one object per event: rounds, evaluations
    trace.jsonl     spans of each worker's time
    summary.json    the numbers of the whole run

and, where there are any, plan.json (what was meant to be) and consensus.json.
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
from gossamer.report.planned import Planned, planned_of
from gossamer.report.records import Close, Evaluation, Members, Replanned, Round, Span, damage, lines, span_of, told_of
from gossamer.report.stopped import Stop

CONFIG, METRICS, TRACE, SUMMARY = "config.toml", "metrics.jsonl", "trace.jsonl", "summary.json"
CONSENSUS = "consensus.json"
"""Gossip alone."""
FILES = (CONFIG, METRICS, TRACE, SUMMARY)
NEEDED = ("method", "world", "workers", "rounds", "tokens", "final_loss", "final_perplexity", "wall_s", "bytes_sent")


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
    members: tuple[Members, ...]
    """Who is left out, whenever that changes."""
    agreement: Agreement | None
    planned: Planned | None
    """None: an older run, which does not say."""
    torn: tuple[str, ...]
    """Files whose last line was cut short (the run died while writing) and was left out."""
    finished: bool = True
    """False: it goes on, or was broken off, and `summary` is of what has been so far."""
    stopped: Stop | None = None
    """It was stopped, and does not go on now."""

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Reads a run folder. BadInput when it is none, when a file is missing, or when a line that is not the last is damaged."""
        folder = Path(folder)
        if not folder.is_dir():
            raise BadInput(f"{str(folder)!r} is not a folder; expected a run folder with {', '.join(FILES)}")
        missing = [name for name in FILES if not (folder / name).is_file()]
        if len(missing) == len(FILES) and (folder / "grid.json").is_file() and (folder / "index.html").is_file():
            raise BadInput(
                f"{str(folder)!r} is the folder of a grid, not of a run: its table is a page that is there already, {folder / 'index.html'}"
            )
        if len(missing) == len(FILES):
            raise BadInput(f"{str(folder)!r} is not a run folder: it holds none of {', '.join(FILES)}; give the folder that a run wrote")
        if missing:
            hint = (
                "; the run has not finished: look at it with gossamer watch, or resume it"
                if missing == [SUMMARY]
                else "; run again, or copy the whole folder"
            )
            raise BadInput(f"run folder {str(folder)!r} lacks {', '.join(missing)}{hint}")
        metrics, torn_metrics = lines(folder / METRICS)
        trace, torn_trace = lines(folder / TRACE)
        return cls(
            folder=folder,
            config=config_of(folder / CONFIG),
            summary=_summary(folder / SUMMARY),
            **told_of(metrics)._asdict(),
            spans=tuple(span_of(e) for e in trace),
            agreement=_agreement(folder / CONSENSUS),
            planned=planned_of(folder),
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


def config_of(path: Path) -> dict[str, Any]:
    """A configuration. BadInput where it is damaged."""
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
    given, sent = found["workers"], len(found["bytes_sent"])
    if (len(given) if isinstance(given, list) else given) != sent:
        raise BadInput(
            f"{str(path)!r}: workers is {given!r}, and bytes_sent has {sent} numbers; resume the run so that it is written again"
        )
    return found


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
        raise BadInput(f"{str(path)!r} is damaged ({damage(error)}): remove it, and its figures are left out") from error


def _numbers(values: Any) -> tuple[float | None, ...]:
    return tuple(None if v is None else float(v) for v in values)
