"""How a run stands: rounds, pace, and where each worker is. What `gossamer watch` shows in a terminal is made of this."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from gossamer.report.curves import curves
from gossamer.report.read import CONFIG, METRICS, Run
from gossamer.report.records import Round
from gossamer.report.stopped import said
from gossamer.report.words import fleet_name, plain_label, worker_name, worker_names

RECENT = 5
"""Rounds that shares and paces are taken over."""
LATE = 4.0
"""Times its usual round without a record, and a worker of a real run is called silent."""
_LEAST_S = 15.0


@dataclass(frozen=True)
class Standing:
    """One worker."""

    worker: int
    name: str
    round: int
    loss: float | None
    """Training loss of its last round."""
    shares: tuple[float, float, float] | None
    """Compute, straggler idle, network idle as fractions of its recent time."""
    waits_for: str
    """Whom it waited for longest, of late; empty: nobody."""
    waited: float
    """Share of its recent time that it waited."""
    sent_bytes: float
    state: str
    """running, behind, silent, absent, done, stopped, no record here."""


@dataclass(frozen=True)
class Progress:
    """The run."""

    title: str
    world: str
    finished: bool
    stopped: str
    """It was, and how it goes on, in words; empty: it was not."""
    round: int
    """Completed by all that are there."""
    rounds: int | None
    """Of the whole run; None: not known."""
    clock_s: float
    """What the run's clock shows (virtual in the simulator)."""
    round_s: float | None
    """Real seconds a round takes now; None: not known yet."""
    tokens_s: float | None
    """Real tokens a second."""
    left_s: float | None
    losses: tuple[float, ...]
    """By evaluation, or by round."""
    what: str
    """Whose losses these are."""
    workers: tuple[Standing, ...]


class Watcher:
    """Takes what is seen of a run from time to time, and knows its pace from that.

    Args:
        now_s: seconds since the epoch, as files have them.
    """

    def __init__(self, now_s: float | None = None) -> None:
        self._fixed_s = now_s
        self._seen: list[tuple[float, int, int]] = []  # real time, rounds, tokens

    def look(self, run: Run) -> Progress:
        """How it stands now."""
        now_s = time.time() if self._fixed_s is None else self._fixed_s
        done, tokens = int(run.summary["rounds"]), int(run.summary["tokens"])
        if not self._seen or self._seen[-1][1:] != (done, tokens):
            self._seen = [*self._seen[-20:], (now_s, done, tokens)]
        planned = run.planned.rounds if run.planned else _configured(run)
        round_s, tokens_s = self._pace(run, done, tokens)
        left_s = None
        if planned and round_s is not None and not run.finished and not run.stopped:
            left_s = max(0.0, round_s * (planned - done))
        (points,), what = curves([run])
        return Progress(
            title=plain_label(run) + (f" on {fleet}" if (fleet := fleet_name(run)) else ""),
            world=str(run.summary["world"]),
            finished=run.finished,
            stopped=said(run.stopped, run.folder, done) if run.stopped else "",
            round=done,
            rounds=planned,
            clock_s=run.number("wall_s") or 0.0,
            round_s=round_s,
            tokens_s=tokens_s,
            left_s=left_s,
            losses=tuple(p.loss for p in points),
            what=what,
            workers=standings(run, planned, now_s),
        )

    def _pace(self, run: Run, done: int, tokens: int) -> tuple[float | None, float | None]:
        """(seconds a round, tokens a second): as seen; before that, since the run began, by its files, or its clock where that is real."""
        first, last = self._seen[0], self._seen[-1]
        if last[1] > first[1] and last[0] > first[0]:
            spent_s = last[0] - first[0]
            return spent_s / (last[1] - first[1]), (last[2] - first[2]) / spent_s
        if not done:
            return None, None
        spent_s = (run.number("wall_s") or 0.0) if run.summary["world"] != "sim" else _written_s(run.folder)
        return (spent_s / done, tokens / spent_s) if spent_s > 0 else (None, None)


def standings(run: Run, planned: int | None, now_s: float) -> tuple[Standing, ...]:
    """A line for each worker that was planned or has been seen."""
    rounds: dict[int, list[Round]] = defaultdict(list)
    for r in sorted(run.rounds, key=lambda r: r.round):
        rounds[r.worker].append(r)
    names = worker_names(run)
    front = max((mine[-1].round for mine in rounds.values()), default=0)
    found = []
    for i in range(max(len(names), max(rounds, default=-1) + 1)):
        mine = rounds.get(i, [])
        recent = mine[-RECENT:]
        spent_s = sum(r.wall_s for r in recent)
        shares = None
        if spent_s > 0:
            each = [sum(r.seconds[kind] for r in recent) / spent_s for kind in ("compute", "straggler_idle", "network_idle")]
            shares = (each[0], each[1], each[2])
        idle: dict[int, float] = defaultdict(float)
        for r in recent:
            if r.waited_for is not None:
                idle[r.waited_for] += r.seconds["straggler_idle"] + r.seconds["network_idle"]
        peer = max(idle, key=lambda j: (idle[j], -j), default=None)
        found.append(
            Standing(
                worker=i,
                name=worker_name(names, i),
                round=mine[-1].round if mine else 0,
                loss=mine[-1].loss if mine and math.isfinite(mine[-1].loss) else None,
                shares=shares,
                waits_for="" if peer is None else worker_name(names, peer),
                waited=idle[peer] / spent_s if peer is not None and spent_s > 0 else 0.0,
                sent_bytes=sum(r.bytes_sent for r in mine) * run.bytes_charge,
                state=_state(run, i, mine, front, planned, now_s),
            )
        )
    return tuple(found)


def _state(run: Run, i: int, mine: list[Round], front: int, planned: int | None, now_s: float) -> str:
    if i in (run.summary.get("absent_now") or ()) or i in (run.summary.get("dead") or ()):
        return "absent"
    if run.finished or (planned and mine and mine[-1].round >= planned):
        return "done"
    if run.stopped:
        return "stopped"
    if not mine:
        return "no record here" if run.rounds else "starting"
    own = run.folder / "workers" / str(i) / METRICS
    if own.is_file():  # of a real run, whose clock is the machine's
        usual_s = sum(r.wall_s for r in mine[-RECENT:]) / len(mine[-RECENT:])
        quiet_s = now_s - own.stat().st_mtime
        if quiet_s > max(_LEAST_S, LATE * usual_s):
            return f"silent for {_rough(quiet_s)}"
    behind = front - mine[-1].round
    return f"{behind} behind" if behind > 1 else "running"


def _rough(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _written_s(folder: Path) -> float:
    """Real seconds between the start of a run and its last record, by the times of its files."""
    try:
        return (folder / METRICS).stat().st_mtime - (folder / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def _configured(run: Run) -> int | None:
    section = run.config.get("run")
    rounds = section.get("rounds") if isinstance(section, dict) else None
    return rounds if isinstance(rounds, int) and rounds > 0 else None
