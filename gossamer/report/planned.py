"""`plan.json` of a run folder: what the run was meant to be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.report.records import damage

PLAN = "plan.json"


@dataclass(frozen=True)
class Lines:
    """What lies between workers. Rates in Mbit/s, infinite where nothing limits."""

    sites: tuple[str, ...]
    site: tuple[int, ...]
    """Of each worker."""
    up_mbps: tuple[float, ...]
    """Of each site, for each of its workers; and so on."""
    down_mbps: tuple[float, ...]
    between: Mapping[tuple[int, int], tuple[float, float]]
    """(from site, to site) -> (Mbit/s of one message that is alone, one-way latency in ms)."""
    within: tuple[float, float]

    def nominal(self, i: int, j: int) -> tuple[float, float]:
        """(Mbit/s, ms) that a message from worker i to worker j can get when it is alone: the least of uplink, link and downlink."""
        a, b = self.site[i], self.site[j]
        mbps, latency_ms = self.within if a == b else self.between[a, b]
        return min(mbps, self.up_mbps[a], self.down_mbps[b]), latency_ms


@dataclass(frozen=True)
class Forecast:
    """A round as it should be, seconds by worker; an empty list: not known."""

    clock: str
    """virtual: of the simulation; fleet: of a fleet as described; pace: inner steps at a pace that was asked for."""
    round_s: float
    compute_s: tuple[float, ...]
    straggler_idle_s: tuple[float, ...]
    network_idle_s: tuple[float, ...]
    bytes_sent: tuple[float, ...]


@dataclass(frozen=True)
class Planned:
    """What was planned."""

    title: str
    method: str
    fleet: str
    workers: int
    worker_names: tuple[str, ...]
    worker_regions: tuple[str, ...]
    rounds: int
    tokens: int
    sequence: int
    steps: tuple[int, ...]
    batch: tuple[int, ...]
    charged_as: str | None
    bytes_charge: float
    round: Forecast | None
    lines: Lines | None


def planned_of(folder: Path) -> Planned | None:
    """What the folder says; None where it says nothing. BadInput where the file is damaged."""
    path = folder / PLAN
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        n = int(found["workers"])
        made = Planned(
            title=str(found["title"]),
            method=str(found["method"]),
            fleet=str(found["fleet"]),
            workers=n,
            worker_names=tuple(map(str, found["worker_names"])),
            worker_regions=tuple(map(str, found["worker_regions"])),
            rounds=int(found["rounds"]),
            tokens=int(found["tokens"]),
            sequence=int(found["sequence"]),
            steps=tuple(map(int, found["steps"])),
            batch=tuple(map(int, found["batch"])),
            charged_as=None if found["charged_as"] is None else str(found["charged_as"]),
            bytes_charge=float(found["bytes_charge"]),
            round=_forecast(found["round"], n),
            lines=_lines(found["lines"]),
        )
        if {len(made.worker_names), len(made.worker_regions), len(made.steps), len(made.batch)} != {n}:
            raise ValueError(f"lists that are not of {n} workers")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BadInput(f"{str(path)!r} is damaged ({damage(error)}): remove it, and what was planned is left out") from error
    return made


def _forecast(found: Mapping[str, Any] | None, n: int) -> Forecast | None:
    if found is None:
        return None
    each = {key: tuple(map(float, found.get(key) or ())) for key in ("compute_s", "straggler_idle_s", "network_idle_s", "bytes_sent")}
    if any(len(values) not in (0, n) for values in each.values()):
        raise ValueError(f"lists that are not of {n} workers")
    return Forecast(str(found["clock"]), float(found["round_s"]), **each)


def _lines(found: Mapping[str, Any] | None) -> Lines | None:
    if found is None:
        return None
    sites = tuple(map(str, found["sites"]))
    between = {(int(a), int(b)): (_rate(mbps), float(ms)) for a, b, mbps, ms in found["between"]}
    made = Lines(
        sites,
        tuple(map(int, found["site"])),
        _rates(found["up_mbps"]),
        _rates(found["down_mbps"]),
        between,
        (_rate(found["within"][0]), float(found["within"][1])),
    )
    count = len(sites)
    if any(not 0 <= a < count for a in made.site) or {len(made.up_mbps), len(made.down_mbps)} != {count}:
        raise ValueError(f"lists that are not of {count} sites")
    if any((a, b) not in between for a in range(count) for b in range(count) if a != b):
        raise ValueError("a pair of sites without a link")
    return made


def _rates(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(_rate, values))


def _rate(value: Any) -> float:
    return math.inf if value is None else float(value)
