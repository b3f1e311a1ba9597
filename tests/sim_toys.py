"""Toy networks, clocks, bodies and programs for the tests of the virtual-clock world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from gossamer.sim.driver import Simulation
from gossamer.sim.models import Event, SimResult
from gossamer.worker.effects import (
    Addr,
    Boundary,
    Compute,
    Done,
    Expect,
    Gather,
    Go,
    Note,
    Program,
    Ready,
    Send,
    Span,
    Stop,
    Tag,
    Work,
)
from gossamer.worker.packet import Header, Packet
from gossamer.worker.state import State

SAY = Tag.SAY


class Links:
    """Every message takes `seconds(src, dst, nbytes)`, whatever else is on its way. Each delivery is announced twice, as by a network that
    changes its mind: version 0 is out of date."""

    def __init__(self, seconds: Callable[[Addr, Addr, int], float]) -> None:
        self.seconds = seconds
        self.launched: list[tuple[float, Addr, Addr, int]] = []

    def launch(self, now_s: float, key: int, src: Addr, dst: Addr, nbytes: int) -> list[Event]:
        self.launched.append((now_s, src, dst, nbytes))
        return [(now_s, key, 0)]

    def finish(self, when_s: float, key: int, version: int) -> tuple[bool, list[Event]]:
        _, src, dst, nbytes = self.launched[key]
        return version == 1, [] if version else [(when_s + self.seconds(src, dst, nbytes), key, 1)]


class Times:
    """A step of worker i takes step_s[i]; encoding, decoding and outer steps take 1 ns per byte."""

    def __init__(self, *step_s: float) -> None:
        self.step_s = step_s
        self.asked: list[tuple[Addr, int, int, int, int]] = []

    def steps_s(self, worker: Addr, round: int, first_step: int, steps: int, batch: int) -> float:
        self.asked.append((worker, round, first_step, steps, batch))
        return steps * self.step_s[worker]

    def span_s(self, kind: str, nbytes: int) -> float:
        return nbytes * 1e-9


class Hooks:
    """Remembers all it is told; stops everybody at `last_round`."""

    def __init__(self, last_round: int = 1 << 30) -> None:
        self.spans: list[tuple[Addr, str, float, float, int]] = []
        self.notes: list[dict[str, Any]] = []
        self.crossed: list[tuple[Addr, int, float]] = []
        self.last_round = last_round

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: object) -> Go | Stop:
        self.crossed.append((worker, round, time_s))
        return Stop() if round >= self.last_round else Go()

    def note(self, record: dict[str, Any]) -> None:
        self.notes.append(record)

    def span(self, worker: Addr, kind: str, start_s: float, end_s: float, round: int) -> None:
        self.spans.append((worker, kind, start_s, end_s, round))


def packet(sender: Addr, round: int, nbytes: int) -> Packet:
    return Packet(Header(0, round, sender, SAY, 0, 1, 0, 0, 0), nbytes, None)


def gossip(me: Addr, peers: Callable[[int], Sequence[Addr]], rounds: int, nbytes: int = 1000, steps: int = 3) -> Program:
    """Work, say to all peers, hear from all peers."""
    state = State(x={})
    while state.round < rounds:
        t, mine = state.round, peers(state.round)
        yield Expect(Tag.of(t, SAY), dict.fromkeys(mine, nbytes))
        yield Compute(Work(steps, 2, 0.0, 0.0))
        yield Ready(mine, t)
        yield Span("encode", nbytes)
        yield Send(mine, Tag.of(t, SAY), packet(me, t, nbytes))
        heard = yield Gather(Tag.of(t, SAY), mine, t)
        assert {j: p.header.sender for j, p in heard.items()} == {j: j for j in mine}
        yield Span("decode", nbytes * len(mine))
        yield Span("outer", 7 * nbytes)
        state.round += 1
        yield Note({"kind": "round", "round": state.round})
        if isinstance((yield Boundary(state.round, state)), Stop):
            break
    return state


def ring(n: int, rounds: int = 3) -> list[Program]:
    sides = [sorted({(i - 1) % n, (i + 1) % n}) for i in range(n)]
    return [gossip(i, lambda _, mine=mine: mine, rounds) for i, mine in enumerate(sides)]


def cycle_of(n: int, round: int) -> dict[Addr, tuple[Addr, Addr]]:
    order = Random(round).sample(range(n), n)
    return {w: (order[k - 1], order[(k + 1) % n]) for k, w in enumerate(order)}


def simulate(programs: Sequence[Program], links: Links, times: Times, hooks: Hooks | None = None, **options: Any) -> SimResult:
    return Simulation(programs, None, links, times, hooks, sequence=16, **options).run()


def uneven(src: Addr, dst: Addr, nbytes: int) -> float:
    return 0.1 + 0.07 * src + 0.013 * dst + nbytes / 1e4


class Body:
    """Counts; its parameters are live views as the contract allows."""

    def __init__(self) -> None:
        self.w = torch.zeros(1)
        self.loaded: list[float] = []

    def compute(self, work: Work) -> Done:
        self.w += work.steps
        return Done({"w": self.w}, work.steps, 0.5)

    def load(self, tree: Mapping[str, torch.Tensor], reset_inner: bool = False) -> None:
        self.w.copy_(tree["w"])
        self.loaded.append(float(tree["w"]))

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def waiter(me: Addr, hear: Sequence[Addr], tell: Sequence[Addr] = ()) -> Program:
    yield Boundary(3, State(x={}))
    yield Expect(Tag.of(3, SAY), dict.fromkeys(hear, 10))
    yield Send(tell, Tag.of(3, SAY), packet(me, 3, 10))
    if hear:
        yield Gather(Tag.of(3, SAY), hear, 3)
    return State(x={})
