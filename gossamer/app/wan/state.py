"""What a site of a wide-area run holds at a boundary, and how it becomes the state of a session."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gossamer.app.job import Job
from gossamer.core import ranges
from gossamer.core.errors import RunFailed
from gossamer.core.outer import STEP
from gossamer.core.tree import Tree, digest, master
from gossamer.train import checkpoint
from gossamer.train.compute import TrainBody
from gossamer.train.recut import ALONE, Place
from gossamer.wan.roster.records import Have, Member, Session, Spec
from gossamer.wan.state_service import StateAsk, fetch
from gossamer.worker.effects import Body
from gossamer.worker.regroup import taken
from gossamer.worker.seat import Seat
from gossamer.worker.state import State, Stream


@dataclass
class Snapshot:
    """A site at a boundary. The state is a copy of its own."""

    state: State
    body: dict[str, Any]
    """What the body's `state` gave."""
    time_s: float
    session: int
    """The last session in which this site held the run's state; 0: it never did."""

    @classmethod
    def of(cls, state: State, body: Body, time_s: float, session: int) -> Snapshot:
        """Copied."""
        return cls(copy.deepcopy(state), body.state(), time_s, session)


def part_of_mark(seat: Seat, state: State) -> int:
    """A mark of what all workers of a synchronous method have equal: anchor, outer state and plan, as far as this rank holds it. Over the
    ranks of a worker these add up to that of the whole, modulo 2^64, however many there are."""
    if seat.ranges is None:
        return digest(state.x, *state.outer.values())
    trees = [state.x, *(tree for name, tree in state.outer.items() if name != STEP)]
    return ranges.mark(seat.layout, trees, state.outer.get(STEP))


def keeps(spec: Spec, held: Snapshot, after: Session | None) -> bool:
    """Whether a site that takes a state keeps the work that it has done since its own one (`late`). Not where the others have it already:
    they have completed the round in which it was done.

    Args:
        after: the session after the last in which it held the state of the run; None: not known.
    """
    return spec.late == "keep" and held.session > 0 and after is not None and after.round <= held.state.round


def mark_of(parts: Sequence[int], state: State) -> str:
    """The mark of a whole state, as sites compare it."""
    return f"{sum(parts) % 2**64 ^ state.planned.mark:016x}"


def have_of(held: Snapshot, parts: Sequence[int]) -> Have:
    """As sites compare it. `parts`: of the marks of all ranks."""
    return Have(round=held.state.round, digest=mark_of(parts, held.state), session=held.session)


def write(folder: Path, me: int, held: Snapshot, place: Place = ALONE) -> tuple[Path, str]:
    """A part of a checkpoint; the file and its SHA-256."""
    round = held.state.round
    extra = {"time_s": held.time_s, "session": held.session}
    sha = checkpoint.write_part(folder, round, me, held.state, held.body, extra, place)
    return checkpoint.part_path(folder, round, me, place), sha


def give(folder: Path, me: int, held: Snapshot, inner: bool, place: Place) -> Path:
    """The same for another site, without what is this one's alone."""
    state = replace(held.state, streams=[Stream(list(stream.norms)) for stream in held.state.streams], local={}, said={}, others={})
    return write(folder, me, replace(held, state=state, body=held.body if inner else {}), place)[0]


def read(folder: Path, round: int, me: int, body: TrainBody, place: Place = ALONE) -> Snapshot:
    """This site's own checkpoint.

    Raises:
        RunFailed: it cannot be read, or is of another model.
    """
    part = checkpoint.read_part(folder, round, me, body.home, place)
    remedy = f"put its own checkpoints back into {folder}, or remove that folder to take the state of another site"
    for name, own in body.tree.items():
        if name not in part.state.x or part.state.x[name].shape != own.shape:
            raise RunFailed(f"the checkpoint of round {round} in {folder} is of another model, which has another {name}: {remedy}")
    if {"time_s", "session"} - part.extra.keys():
        raise RunFailed(f"the checkpoint of round {round} in {folder} is none that a site has written: {remedy}")
    body.load_state(part.body)
    return Snapshot(part.state, part.body, float(part.extra["time_s"]), int(part.extra["session"]))


async def bring(channels: Sequence[Any], session: Session, inner: bool, folder: Path, donor: Member, timeout_s: float) -> None:
    """The state of a donor as a checkpoint of its own, in `folder`.

    Args:
        channels: to each of its ranks.

    Raises:
        RunFailed: it did not come.
    """
    ranks, ask = len(channels), StateAsk(session=session.number, inner=inner)
    paths = [checkpoint.part_path(folder, session.round, donor.seat, Place(r, ranks)) for r in range(ranks)]
    offers = await asyncio.gather(*(fetch(channel, ask, path, timeout_s) for channel, path in zip(channels, paths, strict=True)))
    for offer in offers:
        if offer.round != session.round:
            raise RunFailed(f"site {donor.site} offers the state after {offer.round} rounds, expected {session.round}")
    checkpoint.close(folder, session.round, 0, {donor.seat: [offer.sha256 for offer in offers]})


def take(
    job: Job, me: int, round: int, donor: int, folder: Path, body: TrainBody, mine: Snapshot | None, drift: Tree, place: Place = ALONE
) -> State:
    """The state that was brought, as this site's own. Its data go on where they would be had it been there, its inner optimizer is its own
    where it has one, else the donor's or a fresh one.

    Args:
        mine: what this site had before.
        drift: parameters that it had come to from there; empty: they are let go.
    """
    part = checkpoint.read_part(folder, round, donor, body.home, place)
    state, plan = part.state, job.method.plan
    kept = dict(mine.body if mine is not None and mine.session else part.body)
    if kept:
        kept["cursor"] = sum(plan.at(t).steps[me] * plan.batch[me] for t in range(state.round))
        body.load_state(kept)
    else:
        body.cursor = sum(plan.at(t).steps[me] * plan.batch[me] for t in range(state.round))
        body.load(master(state.x), reset_inner=True)
    taken(state, mine.state if mine is not None and mine.session else None, drift, plan.tokens(me))
    return state


def advance(job: Job, me: int, round: int, held: Snapshot, body: TrainBody) -> State:
    """Of a method with servers: the state of a worker that was in the session before, and had completed fewer blocks than another. It goes
    on from its own parameters, with the blocks of now."""
    state, plan = copy.deepcopy(held.state), job.method.plan
    state.round, state.tokens = round, round * plan.tokens_per_round
    body.load_state({**held.body, "cursor": round * plan.steps[me] * plan.batch[me]})
    return state
