"""The smallest world: answers programs in turn, with no clock. For tests of the mathematics."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from toy import ToyBody, toy_layout, toy_start

from gossamer.core.method import Method
from gossamer.core.tree import Layout, Tree
from gossamer.worker.effects import Boundary, Compute, Expect, Gather, Go, Load, Note, Send, SiteSum, Stop
from gossamer.worker.packet import unseal
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat
from gossamer.worker.state import State


class Lockstep:
    """Runs one method on toy bodies. `wire` sees (and may replace) the bytes of each message."""

    def __init__(
        self,
        method: Method,
        bodies: Sequence[Any] | None = None,
        wire: Any = None,
        x0: Sequence[Tree] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.method = method
        self.layout = layout or toy_layout()
        self.bodies = list(bodies) if bodies is not None else [ToyBody(i, method.inner) for i in range(method.n)]
        self.wire = wire
        self.x0 = x0
        self.notes: list[dict[str, Any]] = []
        self.snapshots: dict[int, list[Any]] = defaultdict(lambda: [None] * method.n)
        self.sent = [0] * method.n

    def run(self, stop: int | None = None, resume: Sequence[Any] | None = None, members: Sequence[int] | None = None) -> list[State]:
        """`members`: only these run (the roll of their states says so too)."""
        n, method = self.method.n, self.method
        there = range(n) if members is None else members
        seats = [Seat(i, method, self.layout, run_id=7) for i in range(n)]
        if resume:
            states = [copy.deepcopy(r[0]) for r in resume]
            for body, r in zip(self.bodies, resume, strict=True):
                body.load_state(copy.deepcopy(r[1]))
        else:
            states = [start(seats[i], self.x0[i] if self.x0 else toy_start()) for i in range(n)]
        programs = [peer(seats[i], states[i]) for i in range(n)]
        box: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        expected: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
        waiting: list[Gather | None] = [None] * n
        reply: list[Any] = [None] * n
        final: list[State | None] = [None] * n
        while any(final[i] is None for i in there):
            moved = False
            for i in there:
                if final[i] is not None:
                    continue
                if waiting[i] is not None:
                    g = waiting[i]
                    if not all(box[i, g.tag, j] for j in g.frm):
                        continue
                    reply[i] = {j: box[i, g.tag, j].popleft() for j in g.frm}
                    assert all(expected[i, g.tag, j].popleft() == packet.nbytes for j, packet in reply[i].items())
                    waiting[i] = None
                moved = True
                while waiting[i] is None and final[i] is None:
                    try:
                        e = programs[i].send(reply[i])
                    except StopIteration as end:
                        final[i] = end.value
                        break
                    reply[i] = None
                    match e:
                        case Compute(work):
                            reply[i] = self.bodies[i].compute(work)
                        case Load(tree, reset):
                            self.bodies[i].load(tree, reset)
                        case Expect(tag, sizes):
                            for j, size in sizes.items():
                                expected[i, tag, j].append(size)
                        case Send(to, tag, packet):
                            for j in to:
                                data = packet.data.clone()
                                if self.wire:
                                    data = self.wire(i, j, tag, data)
                                self.sent[i] += data.numel()
                                box[j, tag, i].append(unseal(data))
                        case Gather():
                            waiting[i] = e
                        case SiteSum(value):
                            reply[i] = value
                        case Boundary(round, state):
                            self.snapshots[round][i] = copy.deepcopy((state, self.bodies[i].state()))
                            reply[i] = Stop() if round == stop else Go()
                        case Note(record):
                            self.notes.append(record)
            assert moved, f"deadlock: {waiting}"
        return final  # type: ignore[return-value]
