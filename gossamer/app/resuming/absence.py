"""Deaths and returns as a configuration asks for them, and resuming where a worker has left no part of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gossamer.app.job import Job
from gossamer.app.resuming import resized
from gossamer.core.members import Roll
from gossamer.core.tree import master
from gossamer.sim.absence import Absences
from gossamer.sim.memo import MemoCombine
from gossamer.train import checkpoint
from gossamer.train.checkpoint import Part
from gossamer.train.compute import TrainBody
from gossamer.train.recut import Place
from gossamer.worker.effects import Addr, Program
from gossamer.worker.entry import back
from gossamer.worker.peer import peer
from gossamer.worker.seat import Seat
from gossamer.worker.state import Stream


def absences_of(job: Job, bodies: Sequence[TrainBody], combine: MemoCombine, parts: dict[int, Part], round: int) -> Absences:
    """Who dies and comes back in a simulated run that goes on from `parts`, the checkpoint of `round`; empty: from the start.

    Whoever has left no part was dead. What had been agreed on is in the part that was written last.
    """

    def restart(worker: Addr, round: int, sponsor: Addr, roll: Roll) -> Program:
        seat = job.seat(worker, combine)
        state = job.first_state(worker, master(bodies[worker].tree))
        state.round, state.roll = round, Roll(list(roll.epochs))
        return back(seat, state, sponsor, peer(seat, state))

    kept: dict[str, Any] | None = None
    if parts:
        kept = max((part.extra for part in parts.values()), key=lambda extra: extra["time_s"]).get("absences")
    if not parts and (never := {i for i, at in job.kills.items() if at == 0}):
        kept = {"epochs": [[0, sorted(never)]], "gone": {str(i): None for i in never}}
    found = Absences(job.kills, job.returns, restart, kept, job.goes_on, job.method.rounds)
    for worker in [i for i in range(job.n) if parts and i not in parts and found.gone.get(i, 0) <= round]:  # or on its way back
        found.gone[worker] = math.inf
        found.roll.enter(round + 1, {*found.roll.absent(round + 1), worker})
    return found


def part_of(job: Job, folder: Path, round: int, worker: Addr, device: torch.device, place: Place, seat: Seat) -> Part:
    """What `worker` goes on from in a real run that is resumed with all of its workers: its own part, or, where it had died, that of the
    lowest worker that was there, with an own place in the data. Where there are other workers than before, see
    gossamer.app.resuming.resized.

    The graphs are again drawn over all. An exchange that was in flight with a worker that has lost its own part does not take place.
    """
    if job.config.checkpoint.resized and round == job.method.since[0]:
        return resized.part_of(job, folder, round, worker, device, place, seat)
    there = checkpoint.read_manifest(folder, round).parts
    part = checkpoint.read_part(folder, round, worker if worker in there else min(there), device, place)
    state = part.state
    if lost := frozenset(range(job.n)) - there.keys():
        state.roll.unheard = (round, lost)
    if worker not in there:
        state.streams = [Stream() for _ in state.streams]
        state.local, state.said = {}, {}
    state.roll.enter(round, ())
    return part
