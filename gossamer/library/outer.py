"""The outer loop beside somebody's own training loop: its optimizer steps are the inner steps, every H_i-th call exchanges."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.schedule import Schedule
from gossamer.core.tree import digest, rounded
from gossamer.library.agreement import Agreement
from gossamer.library.course import Course, Seen
from gossamer.library.loop import Loop
from gossamer.library.mean import mean_everywhere
from gossamer.library.records import Closed, Record, Work
from gossamer.library.saved import Partial, Place, pack, unpack
from gossamer.library.scheduler import PlannedLR
from gossamer.real.driver import RealWorld
from gossamer.real.group import Group
from gossamer.worker.effects import Done
from gossamer.worker.effects import Work as Stretch
from gossamer.worker.peer import peer
from gossamer.worker.pump import Final
from gossamer.worker.replanning import plan_at
from gossamer.worker.seat import Seat
from gossamer.worker.state import State
from gossamer.worker.stream import held

_IDLE = Done(None, 0, 0.0)


class Outer:
    """What `gossamer.join` returns. See docs/library.md.

    Args:
        loop: the model and its optimizers.
        state: as `gossamer.worker.peer.start` makes it of the parameters as they are.
        place: of which run a saved state is.
        group: the connections to the other workers, which `close` ends.
    """

    def __init__(self, loop: Loop, seat: Seat, state: State, place: Place, group: Group) -> None:
        self.seat = seat
        self.group = group
        self._loop, self._state, self._place = loop, state, place
        self._agreement = Agreement(group)
        self._world: RealWorld | None = None
        self._course: Course
        self._stretch: Stretch | None = None
        """The inner steps that the program waits for; None at a boundary, before the first step, and at the end."""
        self._first = True
        """The program has not come beyond the first stretch of the round: the state is still that of the boundary."""
        self._partial = Partial()
        self._loss: Tensor | float = 0.0
        self._since_s = time.monotonic()
        self._resumed = False
        self._over = self._stopped = self._shut = False
        self._failure: BaseException | None = None
        self._spare = 0  # steps after the end of the run
        self._averages = 0
        self._schedulers: list[PlannedLR] = []

    # ---- where the run stands

    @property
    def worker(self) -> int:
        """This worker, from 0."""
        return self.seat.me

    @property
    def workers(self) -> int:
        """All of them."""
        return self.seat.method.n

    @property
    def over(self) -> bool:
        """Whether the run has come to its end: stop stepping, and `close`."""
        return self._over

    @property
    def stopped(self) -> bool:
        """Whether it has done so before its last round, since somebody has called `ask_stop`: save `state_dict`, and resume later."""
        return self._stopped

    @property
    def work(self) -> Work:
        """What this worker is to do in the round it is in, and where the run stands."""
        method, state, stretch = self.seat.method, self._state, self._stretch
        plan = plan_at(self.seat, state)
        h = plan.steps[self.worker]
        taken, tokens = self._partial.steps, float(state.tokens)
        if stretch is not None:
            tokens = stretch.tokens0 + taken * stretch.tokens_per_step
            taken += round((stretch.tokens0 - state.tokens) / stretch.tokens_per_step)
        elif taken:  # resumed within a round
            tokens += taken * (plan.tokens_per_round / h)
        return Work(h, plan.batch[self.worker], plan.sequence, state.round, method.rounds, taken, tokens, method.total_tokens)

    # ---- stepping

    def step(self, *, tokens: int | None = None, loss: Tensor | float | None = None) -> Record:
        """To be called after each `optimizer.step()`, or after each backward pass: the steps of the optimizer are counted, and every
        H_i-th exchanges.

        Args:
            tokens: that went through the model since the last call: this worker's weight. None: B_i L for each step.
            loss: their mean loss in nats, for the records; it is read at exchanges only.

        Raises:
            BadInput: the optimizer has stepped more than once since the last call, or the run is closed.
            RunFailed: the run cannot go on; a PeerLost names the worker that is gone.
        """
        self._check_open()
        taken = self._loop.taken()
        if taken > 1:
            raise BadInput(f"the optimizer has stepped {taken} times since the last outer.step: call outer.step after each optimizer.step")
        if tokens is not None and tokens < 0:
            raise BadInput(f"tokens = {tokens}: expected the number of tokens since the last call, 0 or more")
        if self._over:
            self._spare += taken
            return self._record(taken, None)
        work = self.work
        tokens = taken * work.batch * work.sequence if tokens is None else int(tokens)
        with self._failing():
            if self._stretch is None and (taken or tokens):
                self._enter()
            if self._world is not None:
                self._world.check()
            if tokens:
                self._loss = self._loss + _double(loss) * tokens
            self._partial = self._partial._replace(steps=self._partial.steps + taken, tokens=self._partial.tokens + tokens)
            seen = None
            if taken and self._stretch is not None and self._partial.steps >= self._stretch.steps:
                self._hand_in()
                seen = self._course.take()
        self._follow()
        return self._record(taken, seen)

    def ask_stop(self) -> None:
        """Asks all workers to stop at one boundary, which they agree on: step on until `stopped`. Safe in a signal handler."""
        self.group.ask_stop()

    def scheduler(self, schedule: Schedule | None = None, optimizer: Optimizer | None = None) -> PlannedLR:
        """A learning-rate scheduler that follows the planned tokens of all workers. The optimizer's present learning rate is the peak.

        Args:
            schedule: None: the method's.
            optimizer: None: the (first) one that joined.
        """
        made = PlannedLR(optimizer or self._loop.optimizers[0], schedule or self.seat.method.schedule, lambda: self.work)
        self._schedulers.append(made)
        return made

    # ---- looking and keeping

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the model has the parameters of all: of a synchronous method the agreed ones of the last exchange, at any time
        and without a message; of gossip the plain mean of the workers after the last complete round, which they form together: all call it
        after the same round.

        Raises:
            BadInput: gossip, and the workers are not at the same round.
            RunFailed: gossip, and a worker is gone, or goes just now.
        """
        self._check_open()
        x = self._state.x
        if not self.seat.method.synchronous and self.workers > 1:
            self._averages += 1
            with self._failing():
                rounds = self._agreement.everybody(f"averaged/{self._averages}", str(self._state.round))
            if len(set(rounds.values())) > 1:
                raise BadInput(f"averaged() is called after unlike rounds ({rounds}): call it on all workers after the same record")
            with self._failing():
                x = mean_everywhere(self.group, x)
        own = {name: v.clone() for name, v in self._loop.tree.items()}
        self._loop.load(x)
        try:
            yield
        finally:
            self._loop.load(own)

    def state_dict(self) -> dict[str, Any]:
        """All that this side remembers: anchor, outer state, residuals, what is in flight, how far the round is. Keep it with the model's
        and the optimizer's own state, one file a worker, all of the same round.

        Raises:
            BadInput: in the middle of a round of which something is said already (overlap, fragments, local_dadam).
            RunFailed: the run has failed, and what there is may be half of a step.
        """
        if self._failure is not None:
            raise RunFailed(f"the run has failed ({self._failure}): go on from the last state that was kept")
        within = self._partial.steps or self._partial.tokens
        if (within and self.seat.method.outer.before) or not self._first:
            raise BadInput(
                "state_dict() in the middle of a round in which something was said or has landed already: call it when the record says "
                "completed"
            )
        partial = self._partial._replace(loss_sum=float(self._loss))
        return pack(self._place, self._state, partial, self._loop.tree if within else None)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave, bit for bit; also sets the model's parameters. Before the first step. Of a run that had come
        to its end there is nothing to go on with: it is `over`.

        Raises:
            BadInput: it is of another run or worker, or not whole; or a step was taken already.
        """
        if self._world is not None or self._resumed:
            raise BadInput("load_state_dict comes right after gossamer.join, before the first step (and sync is left out)")
        self._state, self._partial, live = unpack(saved, self._place, self._state.x, self._loop.device)
        self._loss = self._partial.loss_sum
        self._resumed = True
        self._loop.load(live or self._state.local or rounded(held(self.seat, self._state), self._loop.tree))
        self._over = self._state.round >= self.seat.method.rounds
        if self._over:  # others may be at the start, and are told that they differ
            self._agreement.tell("start", self._start)
            self._agreement.ended(self._state.round)
        self._follow()

    # ---- ending

    def close(self, *, partial: Literal["send", "drop"] = "send") -> Closed:
        """Ends this worker's part, and waits for the others. Where they have work left, this one stays with them: it sends and takes in
        what their rounds need, without weight, until nobody has any. So a data loader that ends early is a leave, not a failure.

        Args:
            partial: what becomes of the steps since the last exchange. "send": they count, with their tokens. "drop": they do not, and the
                model goes on from what is agreed.

        Raises:
            RunFailed: the run cannot go on.
        """
        if partial not in ("send", "drop"):
            raise BadInput(f"partial = {partial!r}: expected 'send' or 'drop'")
        if self._shut or self._failure is not None:
            self._release()
            return Closed(self._state.round, "none", 0, 0)
        with self._failing():
            closed = self._end(partial)
            self.group.close()
        self._release()
        return closed

    def __enter__(self) -> Outer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif not self._shut:
            self._failure = self._failure or error
            self.group.abort(error)
            self._release()

    # ---- within

    def _end(self, partial: Literal["send", "drop"]) -> Closed:
        steps, idle = self._partial.steps, 0
        fate: Literal["none", "sent", "dropped"] = "none" if not steps else "sent" if partial == "send" else "dropped"
        self._loop.keep_inner = True
        if self._over:
            if self._spare:
                self._loop.load(rounded(held(self.seat, self._state), self._loop.tree))
                return Closed(self._state.round, "dropped", self._spare, 0)
            return Closed(self._state.round, "none", 0, 0)
        if self._partial.tokens or steps:
            if self._stretch is None:  # resumed within a round, and closed at once
                self._enter()
            if partial == "drop":
                self._partial, self._loss = Partial(), 0.0
            self._idle_away()
        while not self._over:
            at = self._state.round
            if self._stretch is None:
                self._agreement.ended(at)
                if self._agreement.takes_place(at):
                    idle += 1
                    self._resume()
                elif self._world is None:
                    break
                else:
                    self._course.end_here = True
                    self._resume()
                    break
            self._idle_away()
        return Closed(self._state.round, fate, steps, idle)

    def _idle_away(self) -> None:
        """To the end of the round, with what there is of it."""
        while self._stretch is not None:
            self._hand_in()

    def _enter(self) -> None:
        """Work begins in a round."""
        self._agreement.begun(self._state.round)
        self._resume()

    def _resume(self) -> None:
        """From a boundary into the round, or from before the first step."""
        if self._world is None:
            self._begin()
        else:
            self._advance(_IDLE)

    def sync(self) -> None:
        """Takes the first parameters from the worker that the method names. Called by `gossamer.join`."""
        with self._failing():
            self._begin()

    @property
    def _start(self) -> str:
        """How this worker starts, in words."""
        return f"after round {self._state.round}" if self._resumed else "fresh"

    def _begin(self) -> None:
        """Compares how everybody starts, and runs the program to its first inner step."""
        method, state = self.seat.method, self._state
        starts = self._agreement.everybody("start", self._start)
        if len(set(starts.values())) > 1:
            said = ", ".join(f"worker {j}: {text}" for j, text in starts.items())
            raise BadInput(f"the workers do not start alike ({said}): load on all of them the states of one round, or on none")
        if not self._resumed and method.sync_from is None:
            marks = self._agreement.everybody("first parameters", f"{digest(state.x):016x}")
            odd = [j for j, mark in marks.items() if mark != marks[min(marks)]]
            if odd:
                raise BadInput(
                    f"the first parameters of worker{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} are not those of worker "
                    f'{min(marks)}: set the same seed before the model is made, load the same weights, or join with sync="from:0"'
                )
        self._course = Course(peer(self.seat, state), method.rounds)
        self._world = RealWorld(self._course, self.group, rounds0=state.round)
        self._world.begin(self._course.program(), self._loop)
        self._loop.deaf = self._resumed or method.sync_from is None  # the model has these parameters, or has stepped on from them
        self._advance(None)
        self._loop.deaf = False

    def _hand_in(self) -> None:
        """The stretch is done, as far as it is: on to the next, or to the boundary."""
        partial, self._partial = self._partial, Partial()
        loss, self._loss = float(self._loss), 0.0
        done = Done(self._loop.tree, partial.tokens, loss, max(time.monotonic() - self._since_s, 1e-9))
        self._since_s = time.monotonic()
        self._first = False
        self._advance(done)
        self._since_s = time.monotonic()

    def _advance(self, done: Done | None) -> None:
        assert self._world is not None
        step = self._world.advance(done)
        if isinstance(step, Final):
            self._state, self._stretch, self._over = step.state, None, True
            self._stopped = self.group.stopped_by is not None and not self._course.end_here
            self._first = True
            self._world.close()
        elif step.work.steps:
            self._stretch = step.work
        else:
            self._stretch, self._first = None, True

    def _record(self, taken: int, seen: Seen | None) -> Record:
        work, dead = self.work, tuple(sorted(self.group.board.dead))
        record = Record(work.round, work.step, taken > 0, lost=dead, over=self._over, stopped=self._stopped)
        return record if seen is None else seen.on(record)

    def _follow(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RunFailed(f"the run has failed ({self._failure}): join again, from the last state that was kept")
        if self._shut:
            raise BadInput("this run is closed: join again for another one")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            self.group.abort(error)
            self._release()
            raise

    def _release(self) -> None:
        self._shut = True
        self._loop.release()


def _double(loss: Tensor | float | None) -> Tensor | float:
    """Not a number where it was not said: nor is the mean over the round then."""
    return math.nan if loss is None else loss.detach().double() if isinstance(loss, Tensor) else float(loss)
