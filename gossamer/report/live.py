"""A run that has not finished, read from what lies in its folder by now: `load("runs/geomesh")`, as often as you like."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.report.planned import PLAN, Planned, planned_of
from gossamer.report.read import CONFIG, CONSENSUS, METRICS, SUMMARY, TRACE, Run, config_of
from gossamer.report.records import Close, Evaluation, Event, Members, Round, Told, lines, span_of, told_of
from gossamer.report.stopped import STOPPED, stop_of

SESSIONS = "sessions.json"
"""Of a site's folder: the last sessions of the run that it has come to."""
LOGS = "logs"
"""What processes print may be there before anything else."""


def files(folder: Path) -> list[Path]:
    """What is read: the records of the run where they have been put together, those of its workers before."""
    found = [path for name in (METRICS, TRACE) for path in sorted(folder.glob(f"workers/*/{name}"))]
    whole = [folder / name for name in (CONFIG, PLAN, METRICS, TRACE, SUMMARY, CONSENSUS, STOPPED, SESSIONS)]
    return [path for path in [*whole, *found] if path.is_file()]


def version(folder: Path) -> str:
    """A mark that changes when anything in the folder that is shown does."""
    marks = []
    for path in files(folder):
        try:
            stat = path.stat()
        except OSError:  # replaced at this moment
            continue
        marks.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()[:16]


def loads(folder: Path) -> bool:
    """Whether there is no run yet, and may be one soon: nothing is there, or what its processes print alone."""
    return not folder.exists() or (folder.is_dir() and all(path.name == LOGS for path in folder.iterdir()))


def load(folder: Path | str, spans: bool = True) -> Run:
    """The run in `folder`, finished or not. Torn last lines are left out.

    Args:
        spans: read the trace of a run that goes on, too; it may be long.

    BadInput when it is no run folder, or something other than a last line is damaged.
    """
    folder = Path(folder)
    if (folder / SUMMARY).is_file():
        return Run.load(folder)
    if not (folder / CONFIG).is_file():
        what = "is not a run folder: it has no config.toml" if folder.is_dir() else "is not a folder"
        raise BadInput(
            f"{str(folder)!r} {what}; a run that was just started is still loading, and makes its folder after that: look again in a "
            "minute. Otherwise give the folder that a run writes to"
        )
    config, planned, facts = config_of(folder / CONFIG), planned_of(folder), _facts(folder)
    n = len(facts.get("steps") or ()) or (planned.workers if planned else 0)
    metrics, trace = _records(folder, METRICS, n), _records(folder, TRACE, n) if spans else []
    told = told_of(metrics)
    absent = _absent(folder, told.members, n)
    return Run(
        folder=folder,
        config=config,
        summary=_so_far(config, planned, facts, n, told, absent),
        **told._asdict(),
        spans=tuple(span_of(e) for e in trace),
        agreement=None,
        planned=planned,
        torn=(),  # lines are being written: not worth a word
        finished=False,
        stopped=stop_of(folder),
    )


def _records(folder: Path, name: str, n: int) -> list[Event]:
    """Of each of n workers (0: of all), the first of its ranks alone, in the order of time; where they have none of their own, of the run.

    Those of the run are no newer: they are put together when it stops, and are what they were when it goes on. Workers from n on have left.
    """
    own = sorted((folder / "workers").glob(f"*/{name}"))
    paths = own or [path for path in [folder / name] if path.is_file()]
    found = [e for path in paths for e in lines(path)[0] if not e.get("rank") and not (n and _number(e) >= n)]
    return sorted(found, key=lambda e: float(e.get("time_s", e.get("start_s")) or 0.0)) if own else found


def _number(e: Event) -> int:
    """Of the worker; -1: of the fleet."""
    return worker if isinstance(worker := e.get("worker"), int) else -1


def _absent(folder: Path, members: Sequence[Members], n: int) -> list[int]:
    """Which of n workers are left out by now, as the newest that the folder has says it.

    The record of a session is in the folder of its lowest site alone; each site's has the members of the last sessions that it has come to.
    """
    last = max(members, key=lambda one: one.round, default=None)
    if (session := _session(folder)) is not None and (last is None or session[0] >= last.round):
        return [j for j in range(n) if j not in session[1]]
    return [] if last is None else list(last.absent)


def _session(folder: Path) -> tuple[int, list[int]] | None:
    """The round from which the last session of a site goes on, and its members; None: it has come to none, or that cannot be read."""
    try:
        bound = json.loads((folder / SESSIONS).read_text(encoding="utf-8"))["bound"]
        last = max(bound, key=lambda one: int(one["number"]))
        return int(last["round"]), [int(j) for j in last["members"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _so_far(
    config: Mapping[str, Any],
    planned: Planned | None,
    facts: Mapping[str, Any],
    n: int,
    told: Told,
    absent: Sequence[int],
) -> dict[str, Any]:
    """What a summary would say by now. `n`: workers; 0: those that are seen."""
    rounds, closes, evaluations, *_ = told
    seen = {r.worker for r in rounds}
    n = n or max((i + 1 for i in seen), default=1)
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    sent, received, tokens, wall, done = [0] * n, [0] * n, [0] * n, [0.0] * n, [0] * n
    for r in rounds:
        i = r.worker
        sent[i], received[i], tokens[i] = sent[i] + r.bytes_sent, received[i] + r.bytes_received, tokens[i] + r.tokens
        wall[i], done[i] = wall[i] + r.wall_s, max(done[i], r.round)
    every: list[Round | Close] = [*rounds, *closes]
    for event in every:
        for kind, spent in event.seconds.items():
            seconds[event.worker][kind] += spent

    def share(kind: str) -> dict[str, Any]:
        each = [seconds[i][kind] / wall[i] if wall[i] else 0.0 for i in range(n)]
        known = [v for i, v in enumerate(each) if i in seen]
        return {"mean": sum(known) / len(known) if known else 0.0, "workers": each}

    loss = _last_loss(evaluations)
    there = [i for i in seen if i not in absent]
    target = (config.get("eval") or {}).get("target_perplexity")
    hits = [e.time_s for e in evaluations if target and math.isfinite(e.loss) and e.loss <= math.log(target)]
    world = facts.get("world", "sim")
    return {
        "name": planned.title if planned else config.get("name") or "",
        "method": planned.method if planned else (config.get("method") or {}).get("name", "?"),
        "fleet": planned.fleet if planned else None,
        "world": world,
        "workers": n,
        "worker_names": list(planned.worker_names) if planned else None,
        "worker_regions": list(planned.worker_regions) if planned else None,
        "parameters": facts.get("parameters"),
        "rounds": min((done[i] for i in there), default=0),
        "tokens": sum(tokens),
        "seed": config.get("seed"),
        "final_loss": loss,
        "final_perplexity": None if loss is None else math.exp(min(loss, 700.0)),
        "wall_s": max([r.time_s for r in rounds], default=0.0),
        "time_to_target_s": min(hits, default=None),
        "target_perplexity": target,
        "utilisation": share("compute"),
        "straggler_idle": share("straggler_idle"),
        "network_idle": share("network_idle"),
        "bytes_sent": sent,
        "bytes_received": received,
        "dead": [],
        "params_sha256": [],
        "consensus_distance": next((e.consensus_distance for e in reversed(evaluations) if e.consensus_distance is not None), None),
        "charged_as": planned.charged_as if planned else None,
        "bytes_charge": planned.bytes_charge if planned else 1.0,
        "absent_now": [int(i) for i in absent],
    }


def _last_loss(evaluations: Iterable[Evaluation]) -> float | None:
    """Of the fleet at the last round that was evaluated, or the mean of its workers."""
    known = [e for e in evaluations if math.isfinite(e.loss)]
    if not known:
        return None
    last = max(e.round for e in known)
    fleet = [e.loss for e in known if e.round == last and e.worker is None]
    own = [e.loss for e in known if e.round == last and e.worker is not None]
    return fleet[-1] if fleet else sum(own) / len(own)
