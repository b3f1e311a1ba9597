"""The end of a real run: everybody's records and parameters to one worker, which writes the summary. Its bytes are counted apart."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from gossamer.app.folder import RunFolder, write_atomically
from gossamer.app.job import Job
from gossamer.app.simulate import write_result
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

    judge: Callable[[Tree], float]
    """The validation loss of parameters."""


def collect(job: Job, group: Group, folder: RunFolder, own: Own, state: State) -> None:
    """Everybody's records to worker 0, and the fleet's mean.

    Where workers go on without the dead, the lowest of the living takes the place of worker 0. All are on one machine then, so that it
    reads the records of the dead, too; and everybody stays until somebody has written the summary.
    """
    if not group.board.survives:
        for name in STREAMS:
            told = group.gather_bytes((own.records / name).read_bytes())
            if told is not None:
                _merge(folder, name, told)
        if (trees := group.gather_trees(state.x)) is not None:
            _conclude(job, folder, own, state, dict(trees))
        return
    while group.posted([_DONE]) is None:
        to = group.living[0]
        if (trees := group.gather_trees(state.x, to)) is not None:
            everybody = dict(trees)  # whose records are complete, then
            for name in STREAMS:
                _merge(folder, name, (_whole_lines(path) for path in sorted((folder.path / "workers").glob(f"*/{name}"))))
            _conclude(job, folder, own, state, everybody)
            group.post(_DONE, str(to))
        while group.posted([_DONE]) is None and group.living[0] == to:
            group.board.check()
            time.sleep(_POLL_S)


def _conclude(job: Job, folder: RunFolder, own: Own, state: State, everybody: dict[Addr, Tree]) -> None:
    if state.round == job.method.rounds:
        write_result(job, "net", folder, everybody, own.judge)


def _merge(folder: RunFolder, name: str, told: Iterable[bytes]) -> None:
    """Writes one stream, in the order of time."""
    lines = [json.loads(line) for data in told for line in data.decode().splitlines()]
    lines.sort(key=lambda r: (r.get("time_s", r.get("start_s", 0.0)), r["worker"]))
    write_atomically(folder.path / name, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in lines))


def _whole_lines(path: Path) -> bytes:
    """A worker that was killed may have left half a line."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]
