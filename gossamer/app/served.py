"""Real runs of methods with servers: one process a server, after the workers', and the evaluation of the global server's parameters.

The global server is not held up by an evaluation: a thread beside it has a model of its own, and a copy of the parameters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gossamer.app.folder import RunFolder
from gossamer.app.job import Job
from gossamer.app.metrics import evaluation
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree, master
from gossamer.real.driver import run
from gossamer.real.group import Group
from gossamer.real.seats import Seats
from gossamer.train import checkpoint
from gossamer.train.data import Corpus
from gossamer.train.model import parameters_of
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Addr, Body, Done, Go, Program, RecvAny, Reply, Work
from gossamer.worker.server import first_of, server
from gossamer.worker.server_state import ServerState
from gossamer.worker.state import State


class Records(Protocol):
    """Where a process keeps what it notes."""

    folder: RunFolder

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Adds a record to a stream."""

    def close(self) -> None:
        """Closes the files."""


def processes(job: Job) -> int:
    """How many processes a real run has: one a rank of each worker, and one a server."""
    return sum(job.fleet.ranks) + job.servers


def seats_of(job: Job) -> Seats | None:
    """Which processes are ranks of one worker, and which are servers; None where each is a worker."""
    tiers = job.method.tiers
    if tiers is None:
        return Seats(job.ranges.workers) if job.ranges else None
    names = {tiers.home(i): f"the server of region {job.fleet.site(i).region}" for i in range(job.n)}
    return Seats(range(job.n + job.servers), names | {tiers.top: "the global server"})


def servers_of(job: Job) -> range:
    """The seats of the servers."""
    return range(job.n, job.n + job.servers)


def serve(job: Job, group: Group, mine: Records, corpus: Corpus, folder: RunFolder, round0: int) -> tuple[State, ServerHooks]:
    """The program of one server, to its end.

    Args:
        round0: of the checkpoint that it goes on from; 0: from the start.

    Raises:
        RunFailed: the run could not go on.
    """
    keeps = Keeping(job, group, folder, round0)
    for name in ("metrics.jsonl", "trace.jsonl") if round0 else ():
        mine.folder.cut(name, round0)
    hooks = ServerHooks(job, group, mine, corpus, since=round0)
    program = keeps.watched(server(job.seat(group.me), keeps.held, since=round0))
    return to_its_end(job, group, program, hooks, start_s=keeps.time_s, round0=round0, ended=keeps.ended), hooks


def to_its_end(
    job: Job,
    group: Group,
    program: Program,
    hooks: ServerHooks,
    *,
    start_s: float,
    round0: int,
    ended: Callable[[], None] = lambda: None,
) -> State:
    """Runs the program of a server, and what is left to evaluate when it has ended.

    Args:
        start_s, round0: what its clock shows when it begins, and blocks that all have completed by then.
        ended: called when the program has ended and all know who is there, before the last evaluations.

    Raises:
        RunFailed: the run could not go on.
    """
    try:
        state, _ = run(
            program, NoBody(), hooks, group, start_s=start_s, rounds0=round0, ahead=job.config.run.ahead, servers=servers_of(job)
        )
        group.board.wait(lambda: group.notes.members.settled)
        ended()
        hooks.ended()
    finally:
        hooks.close()
    return state


def part_key(round: int, seat: Addr) -> str:
    """Under which a process posts the SHA-256 of its part of a checkpoint."""
    return f"checkpoint/{round}/{seat}"


def last_key(round: int) -> str:
    """Under which a worker posts, before its part of the checkpoint, that all stop at this boundary."""
    return f"checkpoint/{round}/last"


class Keeping:
    """A server's part in the checkpoints of a run over torch.distributed.

    It writes what it has when it first waits for messages after all workers have written their parts of a round (the global one: and all
    local servers). By then some workers are ahead: these do some blocks again when the run is resumed, and what their servers have taken in
    they do not take in twice. At a stop all is at rest, and nothing is done again.
    """

    def __init__(self, job: Job, group: Group, folder: RunFolder, round0: int) -> None:
        self._job, self._group, self._folder = job, group, folder.checkpoints
        self.time_s = 0.0
        self.held = self._take_up(round0) if round0 else first_of(job.seat(group.me), master(first_tree(job)))
        self._begun_s = time.monotonic() - self.time_s
        every, rounds = job.config.checkpoint.every, job.method.rounds
        self._due = iter(range(round0 - round0 % every + every, rounds, every) if every else ())
        self._next = next(self._due, None)

    def _take_up(self, round: int) -> ServerState:
        """What the checkpoint has; of a server that had died, a beginning from the parameters of its first worker that is there."""
        tiers, me = self._job.method.tiers, self._group.me
        assert tiers is not None
        there = checkpoint.read_manifest(self._folder, round).parts

        def part_of(seat: Addr) -> checkpoint.Part:
            return checkpoint.read_part(self._folder, round, seat, self._job.home)

        if me in there:
            part = part_of(me)
            held = ServerState.unpack(part.state, part.extra)
        else:
            part = part_of(min({*tiers.clients(me)} & there.keys() or there))
            held = first_of(self._job.seat(me), master(part.state.x), fresh=False)
            if tiers.top in there:
                held.reports = ServerState.unpack(*part_of(tiers.top)[::2]).taken.get(me, 0)
        self.time_s = float(part.extra["time_s"])
        return held

    def watched(self, program: Program) -> Program:
        """The program, which is looked at whenever it waits for messages."""
        reply: Reply = None
        while True:
            try:
                effect = program.send(reply)
            except StopIteration as end:
                final: State = end.value
                return final
            if isinstance(effect, RecvAny):
                self._look()
            reply = yield effect

    def _look(self) -> None:
        before = range(self._job.n if self._group.me < self._job.n + self._job.servers - 1 else self._group.me)
        while self._next is not None and self._group.posted_by({i: part_key(self._next, i) for i in before}):
            if self._group.posted([last_key(self._next)]):  # it is written when all is at rest, and once: a hash of it may be in a manifest
                return
            self._write(self._next)
            self._next = next(self._due, None)

    def _write(self, round: int) -> None:
        state, extra = self.held.pack()
        extra["time_s"] = time.monotonic() - self._begun_s
        sha = checkpoint.write_part(self._folder, round, self._group.me, state, {}, extra)
        self._group.post(part_key(round, self._group.me), sha)

    def ended(self) -> None:
        """The program has, at the end of the run or at the boundary where all stop."""
        last = self._group.last_round
        end = self._job.method.rounds if last is None else min(last, self._job.method.rounds)
        while self._next is not None and self._next < end:  # as late as this, but whole
            self._write(self._next)
            self._next = next(self._due, None)
        self._write(end)


def first_tree(job: Job) -> Mapping[str, Any]:
    """The first parameters as a worker's model has them."""
    return {name: p.detach().to(job.home) for name, p in parameters_of(job.models.worker()).items()}


def due(job: Job, block: int) -> bool:
    """Whether the global server's parameters are evaluated when all workers have completed so many blocks."""
    tiers = job.method.tiers
    return tiers is not None and (block == job.method.rounds or tiers.evaluates(job.config.eval.every, block))


def _due_of(job: Job, since: int = 0) -> Iterator[int]:
    for block in count(since + 1):
        if due(job, block):
            yield block
        if block >= job.method.rounds:
            return


class Passing:
    """A worker's part in evaluations: it says that it has completed a block, and hears what the global server's parameters were worth.

    Args:
        since: blocks that were completed before.
    """

    def __init__(self, job: Job, group: Group, since: int = 0) -> None:
        self._job, self._group = job, group
        self._unheard = _due_of(job, since)
        self._next: int | None = next(self._unheard, None)
        self.loss: float | None = None
        """The last that was heard, in nats."""

    def completed(self, block: int, time_s: float) -> None:
        """This worker has completed so many blocks, at this time of its clock."""
        if due(self._job, block):
            self._group.post(f"block/{block}/{self._group.me}", repr(time_s))
        while self._next is not None and self._next < block and (said := self._group.posted([f"loss/{self._next}"])):
            self.loss, self._next = float(said[0]), next(self._unheard, None)


class NoBody(Body):
    """A server's: it trains nothing."""

    def compute(self, work: Work) -> Done:
        self._refuse()

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        self._refuse()

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RunFailed("a server has no model to train: its program asked for what workers do")


class ServerHooks:
    """Of a server nothing is noted. The global one's parameters are evaluated as in a simulation: those of the time at which the last
    worker completed the block, and those that it ends with.

    Args:
        workers: who takes part.
        since: blocks that each has completed before.
    """

    def __init__(
        self, job: Job, group: Group, mine: Records, corpus: Corpus, workers: Collection[Addr] | None = None, since: int = 0
    ) -> None:
        self._job, self._group, self._mine, self._corpus = job, group, mine, corpus
        self._workers = range(job.n) if workers is None else workers
        self._first: int | None = None
        self._cuts = _due_of(job, since)
        self._cut: int | None = next(self._cuts, None)
        self._judge: Callable[[Tree], float] | None = None
        self._x: Tree = {}
        self._x_s = self._last_s = 0.0
        self._judged = True  # as it is now
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[int, float, Future[float]]] = deque()

    @property
    def records(self) -> Path:
        """The folder of the server's own records."""
        return self._mine.folder.path

    def judge(self, tree: Tree) -> float:
        """The validation loss of a model."""
        if self._judge is None:
            self._judge = self._job.judge(self._corpus)
        return self._judge(tree)

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: Body | None) -> Go:
        self._look()  # whatever all have completed by now, they did under the parameters from before
        self._first = round if self._first is None else self._first
        self._x, self._x_s, self._judged = master(state.x), time_s, round == self._first
        return Go()

    def note(self, record: dict[str, Any]) -> None:
        """Servers have no metrics."""

    def span(self, worker: Addr, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        """Their time is not traced."""

    def _look(self) -> None:
        while self._x and self._cut is not None:
            passed = self._group.posted_by({i: f"block/{self._cut}/{i}" for i in self._workers})
            if not passed:
                break
            self._evaluate(self._cut, max(map(float, passed.values())))
            self._cut = next(self._cuts, None)
        while self._waiting and self._waiting[0][2].done():
            self._write()

    def _evaluate(self, block: int, time_s: float) -> None:
        self._judged, self._last_s = True, time_s
        self._waiting.append((block, time_s, self._thread.submit(self.judge, self._x)))

    def _write(self) -> None:
        block, time_s, judged = self._waiting.popleft()
        loss = judged.result()
        self._mine.add("metrics.jsonl", evaluation(block, "fleet", block * self._job.method.plan.tokens_per_round, time_s, loss))
        if self._group.posted([f"loss/{block}"]) is None:
            self._group.post(f"loss/{block}", repr(loss))

    def ended(self) -> None:
        """The program has: the last reports came after the last cut."""
        self._look()
        rounds, last = self._job.method.rounds, self._group.last_round
        if not self._judged and (last is None or last >= rounds):
            self._evaluate(rounds, max(self._x_s, self._last_s))  # no clock is another's
        while self._waiting:
            self._write()

    def close(self) -> None:
        """Ends the thread, and closes the records."""
        self._thread.shutdown(cancel_futures=True)
        self._mine.close()
