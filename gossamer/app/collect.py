"""The end of a real run: everybody's records and parameters to one worker, which writes the summary. Its bytes are counted apart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from gossamer.app.folder import JsonLines, RunFolder, write_atomically
from gossamer.app.job import Job
from gossamer.app.progress import still
from gossamer.app.simulate import FINAL, write_result
from gossamer.core.errors import RunFailed
from gossamer.core.ranges import rows_of
from gossamer.core.tree import Tree
from gossamer.real.group import Group
from gossamer.worker.effects import Addr
from gossamer.worker.state import State

STREAMS = ("metrics.jsonl", "trace.jsonl")
_POLL_S = 0.02
_DONE = "collected"


class Own(Protocol):
    """What a worker has of its own."""

    @property
    def records(self) -> Path:
        """The folder of its records, complete."""

    def judge(self, tree: Tree) -> float:
        """The validation loss of the parameters of a whole model."""


def opened(folder: Path, name: str) -> JsonLines:
    """One of STREAMS of a rank or a server, to add to."""
    return JsonLines(folder / name, every=64 if name.startswith("trace") else 1)


def of_rank(rank: int, record: dict[str, Any]) -> dict[str, Any] | None:
    """A record as a rank of a worker keeps it; None: not at all. The first keeps the books; of the others only bytes count."""
    if not rank:
        return record
    return {**record, "rank": rank} if "bytes_sent" in record else None


def by_worker(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """A record of a program names workers, not their ranks: whom it waited for, and from whom what came straight."""
    if job.ranges is None:
        return record
    worker = job.ranges.workers
    if (seat := record.get("waited_for")) is not None:
        record["waited_for"] = worker[seat]
    if "links" in record:
        merged: dict[str, list[float]] = {}
        for j, (nbytes, seconds) in record["links"].items():
            both = merged.setdefault(str(worker[int(j)]), [0, 0.0])
            both[:] = [both[0] + nbytes, max(both[1], seconds)]  # its ranks send side by side
        record["links"] = merged
    return record


def collect(job: Job, group: Group, folder: RunFolder, own: Own, state: State) -> None:
    """Everybody's records to worker 0, and the fleet's mean.

    Where workers go on without the dead, the lowest of the living takes the place of worker 0. All are on one machine then, so that it
    reads the records of the dead, too; and everybody stays until somebody has written the summary.
    """
    if not group.board.survives:
        for name in STREAMS:
            told = group.gather_bytes((own.records / name).read_bytes())
            if told is not None:
                merge(folder, name, told)
        if (trees := everybody(job, group, state, 0)) is not None:
            _conclude(job, group, folder, own, state, trees)
        return
    while group.posted([_DONE]) is None:
        to = group.living[0]
        if (trees := everybody(job, group, state, to)) is not None:  # whose records are complete, then
            for name in STREAMS:
                files = sorted((folder.path / "workers").glob(f"*/{name}"))
                merge(folder, name, (_whole_lines(path) for path in files if int(path.parent.name) < group.n))  # others have left
            _conclude(job, group, folder, own, state, trees)
            group.post(_DONE, str(to))
        while group.posted([_DONE]) is None and group.living[0] == to:
            group.board.check()
            time.sleep(_POLL_S)


def everybody(job: Job, group: Group, state: State, to: Addr) -> dict[Addr, Tree] | None:
    """The parameters of all workers at seat `to`, those of several ranks put together; None elsewhere. A worker with a dead rank is left
    out."""
    ranges = job.ranges
    if tiers := job.method.tiers:  # the global server's alone
        sizes = {name: value.shape for name, value in state.x.items()}
        found = group.gather_trees(state.x if group.me == tiers.top else {}, to, lambda seat: sizes if seat == tiers.top else {})
        return None if found is None else {seat: tree for seat, tree in found if tree}
    if ranges is None:
        trees = group.gather_trees(state.x, to)
        return None if trees is None else dict(trees)

    def shapes(seat: Addr) -> dict[str, torch.Size]:
        worker, rank = ranges.place(seat)
        found = {}
        for name, value in state.x.items():
            lo, hi = rows_of(ranges.rows[name], ranges.ranks[worker], rank)
            found[name] = torch.Size((hi - lo, *value.shape[1:]))
        return found

    shards = group.gather_trees(state.x, to, shapes)
    if shards is None:
        return None
    held = dict(shards)
    whole = [w for w in range(job.n) if all(s in held for s in ranges.seats(w))]
    return {w: {name: torch.cat([held[s][name] for s in ranges.seats(w)]) for name in state.x} for w in whole}


def _conclude(job: Job, group: Group, folder: RunFolder, own: Own, state: State, everybody: dict[Addr, Tree]) -> None:
    if job.servers and group.me >= job.n:
        raise RunFailed("no worker has come to the end of the run: all had died, so its servers wrote no summary")
    if job.servers and not everybody:
        raise RunFailed("the global server is gone, and with it the model of the run")
    if state.round == job.method.rounds:
        with still(f"{job.title} on {job.fleet.name}: {FINAL}"):
            write_result(job, "net", folder, everybody, own.judge, [i for i in range(job.n) if i in group.board.dead])


def merge(folder: RunFolder, name: str, told: Iterable[bytes]) -> None:
    """Writes one stream, in the order of time. Of a worker of several ranks the first one tells, with the bytes of all."""
    lines = [json.loads(line) for data in told for line in data.decode().splitlines()]
    others: dict[tuple[str, int, int], list[int]] = {}
    for r in lines:
        if r.pop("rank", 0) and "bytes_sent" in r:
            sums = others.setdefault((r["kind"], r["round"], r["worker"]), [0, 0])
            sums[0], sums[1] = sums[0] + r["bytes_sent"], sums[1] + r["bytes_received"]
            r["worker"] = None
    lines = [r for r in lines if r["worker"] is not None]
    for r in lines:
        if "bytes_sent" in r:
            sent, received = others.get((r["kind"], r["round"], r["worker"]), (0, 0))
            r |= {"bytes_sent": r["bytes_sent"] + sent, "bytes_received": r["bytes_received"] + received}
    lines.sort(key=lambda r: (r.get("time_s", r.get("start_s", 0.0)), -1 if r["worker"] == "fleet" else r["worker"]))
    write_atomically(folder.path / name, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in lines))


def _whole_lines(path: Path) -> bytes:
    """A worker that was killed may have left half a line."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]
