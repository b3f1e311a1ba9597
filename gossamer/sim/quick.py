"""The driver's loop for fleets whose programs are all `gossamer.worker.pace.Paced`: the same events, for a fraction of the work.

A round of such a program is always the same: steps, one message to each who hears it, one wait, one outer step. Most of what the driver
does for one of ten thousand of them is to find out, effect by effect, which comes next. Here that is known, so the programs are never
asked. Every event is scheduled at the time and in the order of `gossamer.sim.driver`, and hooks hear the same in the same order: a test
holds one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossamer.core.mixing import Mixing
from gossamer.sim.clock import EventQueue
from gossamer.sim.models import NetworkModel, TimeModel
from gossamer.sim.rounds import Rounds
from gossamer.sim.worker import Worker
from gossamer.worker.account import Hooks, TraceKind, split_at
from gossamer.worker.effects import Addr, Gather, Program, Stop, Tag
from gossamer.worker.pace import Paced, note
from gossamer.worker.state import State

_KEPT = 8
"""Rounds whose graphs are kept."""
_BEGIN, _SEND, _LISTEN, _MIX, _TELL = range(5)
"""What a worker does next: steps; its message to all; its wait; the outer step; note and boundary."""


def paced(programs: Sequence[Program]) -> list[Paced] | None:
    """The programs, where they are all of one method and model, seated in order, none of them begun; else None."""
    found = [program for program in programs if type(program) is Paced and not program.begun]
    if len(found) < len(programs) or not found:
        return None
    first = found[0].seat
    same = all(p.seat.method is first.method and p.seat.layout is first.layout and p.seat.me == i for i, p in enumerate(found))
    return found if same and len(found) == first.method.n else None


class Quick:
    """One run of a fleet of paced programs, on the parts of a `Simulation`.

    Args:
        spend: moves a worker's own time on: (worker, kind, seconds).
        finish: ends a worker: (worker, its last state).
        charged: bytes on the clock, of bytes.
        sequence: tokens per sequence.
    """

    def __init__(
        self,
        programs: Sequence[Paced],
        workers: Sequence[Worker],
        queue: EventQueue,
        network: NetworkModel,
        timing: TimeModel,
        rounds: Rounds,
        hooks: Hooks | None,
        spend: Callable[[Worker, TraceKind, float], None],
        finish: Callable[[Worker, State | None], None],
        charged: Callable[[int], int],
        sequence: int,
    ) -> None:
        self._workers, self._queue, self._network, self._timing, self._rounds = workers, queue, network, timing, rounds
        self._hooks, self._spend, self._finish, self._sequence = hooks, spend, finish, sequence
        seat, n = programs[0].seat, len(workers)
        method, elements = seat.method, seat.elements
        self._total, self._topology = method.rounds, method.topology
        self._seats, self._states = [program.seat for program in programs], [program.state for program in programs]
        self._per_round, self._work = method.plan.tokens_per_round, list(zip(method.plan.steps, method.plan.batch, strict=True))
        self._nbytes, self._on_clock = seat.whole_bytes, charged(seat.whole_bytes)
        self._encode, self._outer, self._decode = (
            charged(4 * elements),
            charged(12 * elements),
            [charged(4 * elements * k) for k in range(1, n + 1)],
        )
        self._graphs: dict[int, Mixing] = {}
        self._next = [_BEGIN] * n
        self._frm: list[Sequence[Addr]] = [()] * n
        self._to: list[Sequence[Addr]] = [()] * n
        self._lacks = [0] * n
        """Messages that the wait of each still lacks."""
        self._came: list[dict[int, tuple[int, float, Addr]]] = [{} for _ in range(n)]
        """By round: how many messages have come, when the last of them, and from whom (a tie: the lowest address)."""
        self._flying: dict[int, tuple[Addr, Addr, int]] = {}
        """(from, to, round) of the messages on their way, by key."""
        self._sent = 0

    def loop(self) -> int:
        """Takes events until there are none. Returns how many there were."""
        queue, workers, then, go = self._queue, self._workers, self._next, self._go
        push, pop, finish, flying = queue.push, queue.pop, self._network.finish, self._flying
        came, states, lacks, nbytes = self._came, self._states, self._lacks, self._nbytes
        events = 0
        for worker in workers:
            push(worker.now_s, ~worker.addr, 0)
        while len(queue):
            now_s, key, version = pop()
            events += 1
            if key < 0:
                go(workers[~key], then[~key])
                continue
            delivered, later = finish(now_s, key, version)
            for event in later:
                push(*event)
            if delivered:
                src, dst, t = flying.pop(key)
                workers[dst].heard_bytes += nbytes
                count, last_s, last = came[dst].get(t, (0, now_s, src))
                came[dst][t] = count + 1, now_s, (src if now_s > last_s or src < last else last)
                if lacks[dst] and states[dst].round == t:
                    lacks[dst] -= 1
                    if not lacks[dst]:
                        self._resume(workers[dst], now_s)
        for worker in workers:
            if not worker.finished:
                self._explain(worker)
        return events

    def _go(self, worker: Worker, phase: int) -> None:
        """What a worker does, from `phase` on, until it waits for a message or for the clock."""
        i, clock_s = worker.addr, self._queue.now_s
        state, (steps, batch) = self._states[i], self._work[i]
        while True:
            if phase == _BEGIN:
                t = state.round
                if t >= self._total:
                    self._finish(worker, state)
                    return
                mixing = self._graphs.get(t) or self._graph(t)
                self._frm[i], to = mixing.inn(i), mixing.out(i)
                self._to[i] = self._seats[i].others if len(to) == len(self._seats) - 1 else to
                seconds = self._timing.steps_s(i, worker.round, worker.step, steps, batch)
                worker.step += steps
                self._spend(worker, "compute", seconds)
                self._rounds.ready(worker, t, 0)
                self._spend(worker, "encode", self._timing.span_s("encode", self._encode))
                phase = _SEND if to else _LISTEN if self._frm[i] else _MIX
            elif phase == _MIX:
                self._spend(worker, "decode", self._timing.span_s("decode", self._decode[len(self._frm[i])]))
                self._spend(worker, "outer", self._timing.span_s("outer", self._outer))
                state.tokens += self._per_round
                state.round += 1
                phase = _TELL
            elif worker.now_s > clock_s:  # others can see what follows: let the clock catch up
                self._next[i] = phase
                self._queue.push(worker.now_s, ~i, 0)
                return
            elif phase == _SEND:
                self._send(worker, i, state.round, clock_s)
                phase = _LISTEN if self._frm[i] else _MIX
            elif phase == _LISTEN:
                came = self._came[i].get(state.round)
                lacks = self._lacks[i] = len(self._frm[i]) - (came[0] if came else 0)
                if lacks:
                    return
                del self._came[i][state.round]
                phase = _MIX
            else:
                if self._hooks is None:
                    self._rounds.cross(worker, state.round)
                else:
                    self._tell(worker, state, steps * batch * self._sequence)
                if worker.finished:
                    return
                phase = _BEGIN

    def _graph(self, t: int) -> Mixing:
        if len(self._graphs) >= _KEPT:
            del self._graphs[min(self._graphs)]
        found = self._graphs[t] = self._topology.at(t)
        return found

    def _send(self, worker: Worker, i: Addr, t: int, now_s: float) -> None:
        key, to, launch, push = self._sent, self._to[i], self._network.launch, self._queue.push
        for j in to:
            self._flying[key] = (i, j, t)
            for event in launch(now_s, key, i, j, self._on_clock):
                push(*event)
            key += 1
        self._sent = key
        worker.said_bytes += self._nbytes * len(to)

    def _tell(self, worker: Worker, state: State, tokens: int) -> None:
        """Note and boundary, for hooks."""
        assert self._hooks is not None
        self._hooks.note(worker.record(note(self._seats[worker.addr], state, tokens, 0.0)))
        self._rounds.cross(worker, state.round)
        reply = self._hooks.boundary(worker.addr, state.round, self._queue.now_s, state, None)
        if isinstance(reply, Stop):
            self._finish(worker, state)

    def _resume(self, worker: Worker, now_s: float) -> None:
        """The last message of a wait has come."""
        i, begin_s = worker.addr, worker.now_s
        t = self._states[i].round
        _, last_s, last = self._came[i].pop(t)
        if now_s > begin_s:
            straggler_s, network_s = split_at(begin_s, max(begin_s, last_s), self._rounds.ready_s.get((t, 0), {}).get(last, begin_s))
            worker.waited(last, now_s, straggler_s, network_s, self._hooks)
        self._go(worker, _MIX)

    def _explain(self, worker: Worker) -> None:
        """Puts down what a worker lacks that nobody will send: what those who stopped earlier have not said."""
        states, n, t = self._states, len(self._workers), self._states[worker.addr].round
        frm, tag = self._frm[worker.addr], Tag.of(t, Tag.SAY)
        worker.gather = Gather(tag, frm, t)
        worker.mail.lacks |= {tag * n + j for j in frm if states[j].round < t or (self._workers[j].finished and states[j].round == t)}
