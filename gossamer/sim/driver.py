"""The virtual-clock world: answers the effects of N worker programs from an event queue, a network model and a model of compute time.

    Simulation(programs, bodies, network, timing, hooks).run()

A worker runs ahead of the clock through everything that nobody else can see (compute, load, spans): those only move its own time. Before
it sends, waits, notes or crosses a boundary it lets the clock catch up, so that what workers do to one another happens in one total
order (time, then order of scheduling) and a run is a pure function of its inputs. Spans are therefore reported in the order of time
within one worker, not across workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gossamer.core.errors import BadInput, RunFailed
from gossamer.sim.absence import Absences, without
from gossamer.sim.clock import EventQueue, collector_off
from gossamer.sim.deadlock import deadlock
from gossamer.sim.mailbox import Flight, Mailbox, Message, in_words
from gossamer.sim.models import NetworkModel, SimResult, TimeModel
from gossamer.sim.quick import Quick, paced
from gossamer.sim.rounds import Rounds
from gossamer.sim.worker import Worker, failure
from gossamer.worker.account import Hooks, TraceKind, split_at, split_wait
from gossamer.worker.effects import (
    Addr,
    Body,
    Boundary,
    Compute,
    Done,
    Effect,
    Expect,
    Gather,
    Go,
    Load,
    Note,
    Program,
    Ready,
    RecvAny,
    Reply,
    Send,
    SiteSum,
    Span,
    Stop,
    Work,
)
from gossamer.worker.pace import Paced
from gossamer.worker.state import State


class Simulation:
    """N logical workers on one virtual clock. Runs once.

    Args:
        programs: one program per seat, workers first and then servers; the address of a seat is its index.
        bodies: what does the inner steps, one per worker; None for a timing-only run (no tensors, packets without data).
        network: moves messages.
        timing: what compute, encoding, decoding and outer steps cost. `apply` costs nothing: its cost belongs to the step of its `grad`.
        hooks: metrics, trace, checkpoints; None for none of them (faster).
        charge: bytes on the clock per packet byte, to charge a bigger model's exchange. Accounts count real packet bytes.
        start_s: each worker's time at the start (a resumed run); 0 by default.
        rounds0: rounds each worker has completed before the start; 0 by default.
        sequence: tokens per sequence, for the token counts of a timing-only run.
        servers: how many of the programs, the last ones, are servers. They have no body and no rounds, their time is not traced, and of
            their effects the hooks see boundaries alone.
        absences: who dies, and comes back.
        ahead: the most rounds that a worker may have completed more than the slowest; 0: as many as its peers let it.

    Raises:
        BadInput: lists of unlike lengths, a charge that is not positive, a timing-only run without `sequence`.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        bodies: Sequence[Body] | None,
        network: NetworkModel,
        timing: TimeModel,
        hooks: Hooks | None,
        *,
        charge: float = 1.0,
        start_s: Sequence[float] | None = None,
        rounds0: Sequence[int] | None = None,
        sequence: int = 0,
        servers: int = 0,
        absences: Absences | None = None,
        ahead: int = 0,
    ) -> None:
        seats = len(programs)
        n = seats - servers
        for what, given in (("bodies", bodies), ("start_s", start_s), ("rounds0", rounds0)):
            if given is not None and len(given) != n:
                raise BadInput(f"{what} has {len(given)} entries for {n} programs of workers: give one per worker, or None")
        if not 0.0 < charge < float("inf"):
            raise BadInput(
                f"charge is {charge}, expected a positive number of bytes on the clock per packet byte (1.0 charges what is sent)"
            )
        if bodies is None and sequence < 1:
            raise BadInput(
                f"a timing-only run (bodies=None) counts tokens as steps * batch * sequence and got sequence={sequence}: give it"
            )
        starts = [0.0] * n if start_s is None else list(start_s)
        rounds = [0] * n if rounds0 is None else list(rounds0)
        self._workers = [
            Worker(i, program, None if bodies is None else bodies[i], starts[i], rounds[i], Mailbox(i, seats))
            for i, program in enumerate(programs[:n])
        ]
        first_s = min(starts, default=0.0)
        self._workers += [Worker(i, programs[i], None, first_s, 0, Mailbox(i, seats, serves=True), serves=True) for i in range(n, seats)]
        self._queue = EventQueue(first_s)
        self._flight = Flight()
        self._network = network
        self._timing = timing
        self._hooks = hooks
        self._charge = charge
        self._sequence = sequence
        self._timing_only = bodies is None
        self._absences = absences or Absences()
        plain = bodies is None and not (ahead or servers or self._absences.active or self._absences.gone)
        self._paced = paced(programs) if plain else None
        self._sent = 0  # messages so far: the key of the next
        self._rounds = Rounds(rounds, self._absences.forget, lambda w: self._queue.push(self._queue.now_s, ~w.addr, 0), ahead)

    def run(self) -> SimResult:
        """Runs all programs to their end, and delivers what is still on its way then.

        Raises:
            RunFailed: a program or a body raised, a message is not what was expected, or workers wait for each other (deadlock). The
                message names the worker; the other programs are closed.
        """
        workers = self._workers
        try:
            with collector_off(self._timing_only):
                events = self._quickly(self._paced) if self._paced else self._loop()
            if not all(worker.finished for worker in workers):
                raise RunFailed(deadlock(workers, self._queue.now_s))
        except BaseException:
            for worker in workers:
                with suppress(Exception):  # the first failure is the one to report
                    worker.program.close()
            raise
        for worker in workers:
            worker.settle()
            worker.account.wall_s = worker.now_s - worker.start_s
        return SimResult([worker.final for worker in workers], [worker.account for worker in workers], events)

    def _quickly(self, programs: Sequence[Paced]) -> int:
        """`_loop`, for a fleet of simple programs without tensors."""
        return Quick(
            programs, self._workers, self._queue, self._network, self._timing, self._rounds, self._hooks, self._spend, self._finish,
            self._charged, self._sequence,
        ).loop()  # fmt: skip

    def _loop(self) -> int:
        """Takes events until there are none. Returns how many there were."""
        queue, workers, finish, answer, arrive = self._queue, self._workers, self._network.finish, self._answer, self._arrive
        push, pop = queue.push, queue.pop
        events = 0
        for worker in workers:
            if self._absences.gone.get(worker.addr, 0) > worker.round:  # dead when the run stopped
                worker.finished = True
                worker.program.close()
                self._rounds.leave(worker)
            else:
                push(worker.now_s, ~worker.addr, 0)
        while len(queue):
            now_s, key, version = pop()
            events += 1
            if key < 0:
                worker = workers[~key]
                if version:
                    self._expire(worker, version, now_s)
                    continue
                effect, worker.parked = worker.parked, None
                answer(worker, effect, None)
                continue
            delivered, later = finish(now_s, key, version)
            for event in later:
                push(*event)
            if delivered:
                arrive(now_s, key)
        return events

    def _answer(self, worker: Worker, effect: Effect | None, reply: Reply) -> None:
        """Answers a worker's effects, from `effect` or else from `reply` on, until it waits for a message or for the clock."""
        clock_s, hooks, send = self._queue.now_s, self._hooks, worker.program.send
        while True:
            if effect is None:
                try:
                    effect = send(reply)
                except StopIteration as stop:
                    self._finish(worker, stop.value)
                    return
                except Exception as error:
                    raise failure(worker, error) from error
                reply = None
            if type(effect) is Span:
                self._spend(worker, effect.kind, self._timing.span_s(effect.kind, self._charged(effect.nbytes)))
            elif type(effect) is Expect:
                worker.mail.expect(effect.tag, effect.sizes)
            elif type(effect) is Compute:
                reply = self._compute(worker, effect.work)
            elif type(effect) is Ready:
                self._rounds.ready(worker, effect.round, effect.fragment)
            elif type(effect) is Load:
                if worker.body is not None:
                    try:
                        worker.body.load(effect.tree, effect.reset_inner)
                    except Exception as error:
                        raise failure(worker, error) from error
            elif type(effect) is SiteSum:
                reply = effect.value
            elif worker.now_s > clock_s:  # others can see what follows: let the clock catch up
                worker.parked = effect
                self._queue.push(worker.now_s, ~worker.addr, 0)
                return
            elif type(effect) is Send:
                self._send(worker, effect)
            elif type(effect) is Gather:
                if self._absences.active or effect.deadline_s is not None:
                    effect = self._absences.reduced(worker, effect, self._flight, len(self._workers))
                if not worker.mail.present(effect, worker.round):
                    self._wait(worker, effect)
                    return
                reply, _, _ = worker.mail.take(effect, worker.round, self._rounds.ready_s)
                if effect.deadline_s is not None:
                    self._absences.ended(worker.addr, effect.tag)
            elif type(effect) is RecvAny:
                reply = worker.mail.first(effect.tag)
                if reply is None:
                    return
                worker.seconds["network_idle"] += clock_s - worker.now_s
                worker.now_s = clock_s
            elif type(effect) is Boundary:
                if not worker.serves:
                    if not self._rounds.lets(worker, effect):
                        return
                    self._spend(worker, "straggler_idle", clock_s - worker.now_s)
                    self._rounds.cross(worker, effect.round)
                dies = self._absences.dies(worker.addr, effect.round)
                if dies:
                    self._absences.bury(worker.addr, [w.round for w in self._absences.living(self._workers) if w is not worker])
                reply = Go() if hooks is None else hooks.boundary(worker.addr, effect.round, clock_s, effect.state, worker.body)
                if dies:
                    self._die(worker, clock_s)
                    return
                if self._absences.active and not isinstance(reply, Stop):
                    reply = self._members(worker, effect.round, clock_s)
            elif type(effect) is Note:
                if hooks is not None:
                    hooks.note(worker.record(effect.record))
            else:
                raise RunFailed(f"worker {worker.addr}, round {worker.round}: its program asked for {effect!r}, which is no effect")
            effect = None

    def _charged(self, nbytes: int) -> int:
        return nbytes if self._charge == 1.0 else round(nbytes * self._charge)

    def _spend(self, worker: Worker, kind: TraceKind, seconds: float) -> None:
        """Moves a worker's own time on."""
        if seconds == 0.0:
            return
        if not seconds > 0.0:
            raise RunFailed(
                f"worker {worker.addr}, round {worker.round}: the time model charges {seconds!r} s for {kind}, expected 0 or more"
            )
        begin_s = worker.now_s
        worker.now_s = end_s = begin_s + seconds
        worker.seconds[kind] += seconds
        if self._hooks is not None and not worker.serves:
            self._hooks.span(worker.addr, kind, begin_s, end_s, worker.round)

    def _compute(self, worker: Worker, work: Work) -> Done:
        if worker.body is None:
            tokens = 0 if work.kind == "apply" else work.steps * work.batch * self._sequence
            done = Done(None, tokens, 0.0)
        else:
            try:
                done = worker.body.compute(work)
            except Exception as error:
                raise failure(worker, error) from error
        if work.kind != "apply":
            seconds = self._timing.steps_s(worker.addr, worker.round, worker.step, work.steps, work.batch)
            worker.step += work.steps
            self._spend(worker, "compute", seconds)
            if not done.seconds:
                done = Done(done.tree, done.tokens, done.loss_sum, seconds)
        return done

    def _send(self, worker: Worker, effect: Send) -> None:
        to, tag, packet = effect.to, effect.tag, effect.packet
        if self._absences.active:
            to = [j for j in to if not self._absences.lost(j, tag)]
        src, n, now_s = worker.addr, len(self._workers), worker.now_s
        nbytes = self._charged(packet.nbytes)
        slot = tag * n + src
        start, launch, push = self._flight.start, self._network.launch, self._queue.push
        key = self._sent
        for dst in to:
            if dst == src or not 0 <= dst < n:
                raise RunFailed(
                    f"worker {src}, round {worker.round}: sends {in_words(tag)} to worker {dst}, expected one of the {n - 1} other workers "
                    f"(0 to {n - 1} without {src})"
                )
            start(key, Message(src, dst, tag, packet, slot * n + dst))
            for event in launch(now_s, key, src, dst, nbytes):
                push(*event)
            key += 1
        self._sent = key
        worker.said_bytes += packet.nbytes * len(to)

    def _arrive(self, now_s: float, key: int) -> None:
        for src, dst, tag, packet, _ in self._flight.land(key):
            worker = self._workers[dst]
            if self._absences.active and self._absences.lost(dst, tag):
                continue
            worker.heard_bytes += packet.nbytes
            if self._absences.was_skipped(tag, src, dst):
                continue
            if worker.mail.put(src, tag, now_s, packet):
                if worker.serves:  # after all that arrives at this moment, so that the lowest sender comes first
                    worker.parked = RecvAny(tag)
                    self._queue.push(now_s, ~dst, 0)
                else:
                    self._resume(worker, now_s)

    def _wait(self, worker: Worker, gather: Gather) -> None:
        worker.gather = gather
        worker.waits += 1  # of a wait that is over, a deadline means nothing
        if gather.deadline_s is not None:
            self._queue.push(worker.now_s + gather.deadline_s, ~worker.addr, worker.waits)

    def _expire(self, worker: Worker, wait: int, now_s: float) -> None:
        """A deadline is over: what has not taken place by now is skipped by both, but for peers that have gone on with it."""
        gather = worker.gather
        if gather is None or worker.waits != wait:
            return
        tag, n = gather.tag, len(self._workers)
        for j in [j for j in gather.frm if tag * n + j in worker.mail.lacks]:
            if self._absences.skip(tag, worker.addr, j):
                self._miss(worker, tag, j, now_s)
                self._miss(self._workers[j], tag, worker.addr, now_s)

    def _miss(self, worker: Worker, tag: int, j: Addr, now_s: float) -> None:
        """Where `worker` waits for j's message of `tag`, it does so no longer."""
        gather = worker.gather
        if gather is not None and gather.tag == tag and j in gather.frm:
            worker.gather = without(worker, gather, j)
            if not worker.mail.lacks:
                self._resume(worker, now_s, missed=j)

    def _die(self, dead: Worker, now_s: float) -> None:
        """A worker is gone. What it has sent arrives; nobody waits for more."""
        self._finish(dead, None)
        dead.program.close()
        for worker in self._absences.living(self._workers):
            if worker.gather is not None and dead.addr in worker.gather.frm:
                left = self._absences.reduced(worker, worker.gather, self._flight, len(self._workers))
                if dead.addr not in left.frm:
                    worker.gather = left
                    if not worker.mail.lacks:
                        self._resume(worker, now_s, missed=dead.addr)

    def _members(self, worker: Worker, round: int, now_s: float) -> Go:
        """Who takes part from `round` on; whoever comes back with it starts now."""
        absences = self._absences
        absences.due(round, [w.round for w in absences.living(self._workers)])
        welcome = absences.welcome(round, self._workers) if absences.restart else ()
        for j in welcome:
            assert absences.restart is not None
            program = absences.restart(j, round, worker.addr, absences.roll)
            self._workers[j].revive(program, now_s, round, Mailbox(j, len(self._workers)))
            self._rounds.enter(round)
            self._queue.push(now_s, ~j, 0)
        return absences.reply(round, welcome)

    def _resume(self, worker: Worker, now_s: float, missed: Addr | None = None) -> None:
        """The last message of a wait has come (or that of `missed` never will): accounts for the wait and goes on with the answer."""
        gather, begin_s = worker.gather, worker.now_s
        assert gather is not None
        worker.gather = None
        heard, last, last_s = worker.mail.take(gather, worker.round, self._rounds.ready_s)
        if gather.deadline_s is not None:
            self._absences.ended(worker.addr, gather.tag)
        ready_s = self._rounds.ready_s.get((gather.round, gather.fragment), {})
        if missed is not None:  # it ends now; of somebody who was never ready, all of the wait is straggler idle
            last, last_s, ready_s = missed, now_s, {missed: now_s, **ready_s}
        if now_s > begin_s:
            if gather.carries is None:
                straggler_s, network_s = split_at(begin_s, max(begin_s, last_s), ready_s.get(last, begin_s))
            else:
                straggler_s, network_s = split_wait(begin_s, {last: last_s}, gather.carries, ready_s)
            worker.waited(last, now_s, straggler_s, network_s, self._hooks)
        self._answer(worker, None, heard)

    def _finish(self, worker: Worker, final: State | None) -> None:
        worker.final, worker.finished = final, True
        if not worker.serves:
            self._rounds.leave(worker)
