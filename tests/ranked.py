"""The smallest world of workers with several ranks: toy bodies whose inner steps are one rank's, cut into shards. No clock, no process.

What the ranks of a worker hold together is bit for bit what one rank would hold, so every difference to a run of single ranks is the fault
of what lies between: ranges, sums over a site, pieces of packets.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.method import Method
from gossamer.core.ranges import Ranges
from gossamer.core.tree import Tree
from gossamer.worker.effects import Boundary, Compute, Done, Expect, Gather, Go, Load, Note, Send, SiteSum, Stop
from gossamer.worker.packet import unseal
from gossamer.worker.peer import peer, start
from gossamer.worker.ranks import among_ranks, check_ranks
from gossamer.worker.seat import Seat
from gossamer.worker.state import State


def shard(ranges: Ranges, tree: Tree, worker: int, rank: int) -> Tree:
    """Views of the rows that a rank holds."""
    held = {p.name: p.held for p in ranges.held(toy_layout(), worker, rank)}
    return {k: v.view(-1)[held[k][0] : held[k][1]].view(-1, *v.shape[1:]) for k, v in tree.items()}


def seat_of(method: Method, ranges: Ranges, seat: int) -> Seat:
    worker, rank = ranges.place(seat)
    atoms = ranges.atoms(toy_layout())
    return Seat(worker, method, ranges.held(atoms, worker, rank), run_id=7, rank=rank, ranges=ranges, whole=atoms)


class Ranked:
    """Runs one method on workers of so many ranks each. `lose(src, dst, tag)`, of seats, tells which messages never arrive."""

    def __init__(self, method: Method, ranks: Sequence[int], bodies: Sequence[ToyBody] | None = None, lose: Any = None) -> None:
        check_ranks(method)
        self.method = method
        self.ranges = Ranges(tuple(ranks), {k: len(v) for k, v in toy_start().items()})
        self.bodies = list(bodies) if bodies else [ToyBody(i, method.inner) for i in range(method.n)]
        self.lose = lose or (lambda src, dst, tag: False)
        self.notes: list[tuple[int, dict[str, Any]]] = []
        self.sent = [0] * self.ranges.n
        self.snapshots: dict[int, list[Any]] = defaultdict(lambda: [None] * self.ranges.n)

    def run(self, stop: int | None = None, resume: Sequence[State] | None = None) -> list[State]:
        ranges, n = self.ranges, self.ranges.n
        seats = [seat_of(self.method, ranges, s) for s in range(n)]
        states = [copy.deepcopy(s) for s in resume] if resume else []
        for s in range(n if not resume else 0):
            x = {k: v.clone() for k, v in shard(ranges, toy_start(), *ranges.place(s)).items()}
            states.append(start(seats[s], x))
        programs = [among_ranks(seats[s], peer(seats[s], states[s])) for s in range(n)]
        box: dict[Any, deque[Any]] = defaultdict(deque)
        expected: dict[Any, deque[int]] = defaultdict(deque)
        asked: list[Any] = [None] * n
        final: list[Any] = [None] * n

        def advance(s: int, reply: Any) -> None:
            try:
                asked[s] = programs[s].send(reply)
            except StopIteration as end:
                asked[s], final[s] = None, end.value

        for s in range(n):
            advance(s, None)
        while any(f is None for f in final):
            moved = False
            for s in range(n):
                e, (worker, rank) = asked[s], ranges.place(s)
                if e is None:
                    continue
                siblings = list(ranges.seats(worker))
                body, reply, ready = self.bodies[worker], None, True
                match e:
                    case Compute() | SiteSum():
                        if s == siblings[0] and all(type(asked[k]) is type(e) for k in siblings):
                            moved = True
                            for k, answer in zip(siblings, self._together(worker, [asked[k] for k in siblings]), strict=True):
                                advance(k, answer)
                        continue
                    case Load(tree, reset):
                        for k, v in shard(ranges, {k: p.data for k, p in body.params.items()}, worker, rank).items():
                            if k in tree:
                                v.copy_(tree[k])
                        if reset:
                            body._fresh()
                    case Expect():
                        for j, size in e.sizes.items():
                            expected[s, e.tag, j].append(size)
                    case Send():
                        for j in e.to:
                            self.sent[s] += e.packet.data.numel()
                            box[j, e.tag, s].append(None if self.lose(s, j, e.tag) else unseal(e.packet.data.clone()))
                    case Gather():
                        ready = all(box[s, e.tag, j] for j in e.frm)
                        if ready:
                            got = {j: box[s, e.tag, j].popleft() for j in e.frm}
                            sizes = {j: expected[s, e.tag, j].popleft() for j in e.frm}
                            reply = {j: packet for j, packet in got.items() if packet is not None}
                            assert all(sizes[j] == packet.data.numel() for j, packet in reply.items())
                    case Boundary():
                        self.snapshots[e.round][s] = (copy.deepcopy(e.state), copy.deepcopy(body.state()))
                        reply = Stop() if e.round == stop else Go()
                    case Note():
                        self.notes.append((s, e.record))
                if ready:
                    moved = True
                    advance(s, reply)
            assert moved, f"deadlock: {asked}"
        assert not any(box.values()), "messages that nobody has taken"
        return final

    def _together(self, worker: int, effects: Sequence[Any]) -> list[Any]:
        """What all ranks of a worker ask for at once."""
        if isinstance(effects[0], SiteSum):
            total = torch.zeros_like(effects[0].value)
            for e in effects:
                total = total + e.value
            return [total.clone() for _ in effects]
        work = effects[0].work
        if work.kind == "apply":
            work = work._replace(tree=self.joined([e.work.tree for e in effects]))
        done: Done = self.bodies[worker].compute(work)
        return [done._replace(tree=shard(self.ranges, done.tree, worker, r), seconds=1.0) for r in range(len(effects))]

    def joined(self, trees: Sequence[Tree]) -> Tree:
        """The whole tree of a worker from those of its ranks."""
        return {k: torch.cat([t[k] for t in trees]) for k in trees[0]}

    def whole(self, states: Sequence[State], worker: int) -> Tree:
        """A worker's anchor."""
        return self.joined([states[s].x for s in self.ranges.seats(worker)])
