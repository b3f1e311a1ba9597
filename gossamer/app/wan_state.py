"""What a site of a wide-area run holds at a boundary, and how it becomes the state of a session."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.app.job import Job
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree, digest, master
from gossamer.train import checkpoint
from gossamer.train.compute import TrainBody
from gossamer.wan.records import Have, Member, Session, Spec
from gossamer.wan.state_service import StateAsk, fetch
from gossamer.worker.effects import Body
from gossamer.worker.regroup import taken
from gossamer.worker.state import State


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

    @property
    def have(self) -> Have:
        """As sites compare it."""
        return Have(round=self.state.round, digest=mark_of(self.state), session=self.session)


def keeps(spec: Spec, held: Snapshot, after: Session | None) -> bool:
    """Whether a site that takes a state keeps the work that it has done since its own one (`late`). Not where the others have it already:
    they have completed the round in which it was done.

    Args:
        after: the session after the last in which it held the state of the run; None: not known.
    """
    return spec.late == "keep" and held.session > 0 and after is not None and after.round <= held.state.round


def mark_of(state: State) -> str:
    """Of what all workers of a synchronous method have equal: anchor, outer state and plan."""
    return f"{digest(state.x, *state.outer.values()) ^ state.planned.mark:016x}"


def write(folder: Path, me: int, held: Snapshot, *, inner: bool = True) -> tuple[Path, str]:
    """A part of a checkpoint; the file and its SHA-256."""
    round = held.state.round
    extra = {"time_s": held.time_s, "session": held.session}
    sha = checkpoint.write_part(folder, round, me, held.state, held.body if inner else {}, extra)
    return checkpoint.round_folder(folder, round) / f"worker-{me}.safetensors", sha


def read_latest(job: Job, folder: Path, me: int, body: TrainBody) -> Snapshot | None:
    """This site's own newest checkpoint; None where there is none."""
    found = checkpoint.latest(folder)
    if found is None:
        return None
    part = checkpoint.read_part(folder, found, me, body.device)
    body.load_state(part.body)
    return Snapshot(part.state, part.body, float(part.extra["time_s"]), int(part.extra["session"]))


async def bring(channel: Any, session: Session, inner: bool, folder: Path, donor: Member, timeout_s: float) -> None:
    """The state of a donor as a checkpoint of its own, in `folder`.

    Raises:
        RunFailed: it did not come.
    """
    path = checkpoint.round_folder(folder, session.round) / f"worker-{donor.seat}.safetensors"
    offer = await fetch(channel, StateAsk(session=session.number, inner=inner), path, timeout_s)
    if offer.round != session.round:
        raise RunFailed(f"site {donor.site} offers the state after {offer.round} rounds, expected {session.round}")
    checkpoint.close(folder, session.round, 0, {donor.seat: offer.sha256})


def take(job: Job, me: int, session: Session, donor: int, folder: Path, body: TrainBody, mine: Snapshot | None, drift: Tree) -> State:
    """The state that was brought, as this site's own. Its data go on where they would be had it been there, its inner optimizer is its own
    where it has one, else the donor's or a fresh one.

    Args:
        mine: what this site had before.
        drift: parameters that it had come to from there; empty: they are let go.

    Raises:
        RunFailed: it is not the state of the session.
    """
    part = checkpoint.read_part(folder, session.round, donor, body.device)
    if session.digest is not None and (found := mark_of(part.state)) != session.digest:
        raise RunFailed(f"the state of seat {donor} is {found}, that of the session is {session.digest}: it is not taken")
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
