"""What each worker goes on from where a run has other workers than its checkpoint.

Workers 0 to min(n, m) - 1 stay, higher ones leave, or come. From the checkpoint of n workers each of the m makes its own state:

- Synchronous methods: anchor and outer state are equal on all, so those who come have them exactly.
- Gossip: those who come begin at the mean of all n, outer state included. Where some leave, those who stay are moved together,
  x_i += mean over n - mean over those who stay, so that the mean of the fleet is the same before and after, to rounding, and what the
  leavers had learned stays in it. What momentum compares x_i with moves along.
- Who comes has a fresh inner optimizer, no error feedback, and the place in its own data that it would have had it been there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gossamer.app.job import Job
from gossamer.core.combine import mean
from gossamer.core.members import Roll
from gossamer.core.outer import PREVIOUS, STEP, OuterState
from gossamer.core.replan import Planned
from gossamer.core.tree import Tree
from gossamer.train import checkpoint
from gossamer.train.checkpoint import Part
from gossamer.train.recut import Place
from gossamer.worker.effects import Addr
from gossamer.worker.seat import Seat
from gossamer.worker.state import State, Stream


def part_of(job: Job, folder: Path, round: int, worker: Addr, device: torch.device, place: Place, seat: Seat) -> Part:
    """What `worker` goes on from at the round from which on there are other workers.

    Raises:
        RunFailed: a damaged part.
    """
    before = job.config.checkpoint.resized[-1][1]
    there = sorted(w for w in checkpoint.read_manifest(folder, round).parts if w < before)
    stay = [w for w in there if w < job.n]
    own = worker if worker in stay else there[0]
    part = checkpoint.read_part(folder, round, own, device, place)
    state = part.state
    if job.method.synchronous:
        x, outer = state.x, state.outer
    else:
        x, outer = _means(folder, round, there, device, place)
        if own == worker and len(stay) < len(there):
            of_stay = _means(folder, round, stay, device, place)[0]
            for tree in (state.x, state.outer.get(PREVIOUS, {})):  # both, or the move would be taken for momentum
                tree.update({name: v + (x[name] - of_stay[name]) for name, v in tree.items()})
    if own != worker:
        fresh = job.first_state(worker, x, seat)
        part = _newcomer(job, worker, part, replace(fresh, outer=outer, round=state.round, tokens=state.tokens))
        state = part.state
    if state.mean_residual is not None:
        state.mean_residual = {}  # of the own slice, which is another one now
    state.streams = [Stream(list(s.norms), s.tokens) for s in state.streams]
    state.planned, state.roll = Planned(), Roll()
    return part


def _newcomer(job: Job, worker: Addr, donor: Part, state: State) -> Part:
    plan = job.method.plan
    body = {"cursor": sum(plan.at(t).steps[worker] * plan.batch[worker] for t in range(state.round)), "steps": 0}
    body |= {key: value for key, value in donor.body.items() if key.startswith("buffer/")}
    return Part(state, body, donor.extra)


def _means(folder: Path, round: int, workers: Sequence[Addr], device: torch.device, place: Place) -> tuple[Tree, OuterState]:
    """Of anchors and outer states; each by the mean over `workers`, counts of steps from the first. One part is held at a time."""
    outer: OuterState = {}

    def anchors_and_outer() -> Iterator[Tree]:
        for worker in workers:
            state = checkpoint.read_part(folder, round, worker, device, place).state
            if not outer:
                outer.update({key: tree if key == STEP else {} for key, tree in state.outer.items()})
            apart = {"x": state.x, **{key: tree for key, tree in state.outer.items() if key != STEP}}
            yield {f"{key}/{name}": v for key, tree in apart.items() for name, v in tree.items()}

    found: dict[str, Tree] = {}
    for path, v in mean(anchors_and_outer(), [1.0] * len(workers)).items():
        key, _, name = path.partition("/")
        found.setdefault(key, {})[name] = v
    x = found.pop("x")
    return x, outer | found
