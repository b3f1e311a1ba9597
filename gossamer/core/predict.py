"""How long a round takes, worked out rather than simulated: the recurrence of each worker's clock over a few rounds.

    end_i   = start_i + H_i t_i                       the inner steps
    heard_i = when the last of what it waits for has come: over uplink, link and downlink (gossamer.core.wires)
    start_i of the next round = max(end_i + encode, heard_i) + decode + outer

With overlap the wait comes after a share of the next round's steps, and with fragments this is gone through for each. What this leaves
out: noise and drift of step times, traces of rates, the spread of jitter (its mean is in the delays), and how messages of unlike senders
interleave in one downlink (gossip excepted). The event simulator has them all; a test holds the two within a tenth of each other. They
differ most, by 2 to 5 %, with one slow line (ring, gather) and where more is sent under overlap than the steps hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, is_dataclass, replace

import numpy as np

from gossamer.core.awb import continuous
from gossamer.core.errors import BadInput
from gossamer.core.exchange import Hub, Ring, Shard
from gossamer.core.fleet import Fleet
from gossamer.core.fragment import fragments
from gossamer.core.method import Method
from gossamer.core.star import inward, outward
from gossamer.core.topology import KEPT, Complete, Topology
from gossamer.core.tree import Layout, numel
from gossamer.core.wires import Arrival, Free, Net, Seconds, Walk, by_law, everybody, together

_ROUNDS, _FEWER, _MANY = 16, 8, 100
"""Rounds of gossip worked out; fewer from so many workers on, who make up for it."""
_SYNCHRONOUS = 8
"""Rounds where everybody hears everybody, or fewer where the pace is steady before."""
_WARM = 3
"""Of those, how many are left out of the mean if it does not become steady."""
_STEADY = 1e-3
_OUTER = 3
"""Passes over the model that an outer step is charged for: it reads two and writes one."""


@dataclass(frozen=True)
class Costs:
    """What the clock charges."""

    step_s: tuple[float, ...]
    """t_i: seconds of an inner step of each worker at its B_i."""
    codec_gbytes_per_s: float
    """How fast encoding, decoding and the outer step pass over their float32 bytes."""
    header_bytes: int
    """Of a packet."""
    charge: float = 1.0
    """Bytes on the clock per byte sent."""


@dataclass(frozen=True)
class Prediction:
    """One round, the mean over those worked out. Arrays have shape [n], one number a worker."""

    round_s: float
    """From one round to the next: of the time at which the last worker ends."""
    wall_s: Seconds
    """Of each worker: the sum of the next four."""
    compute_s: Seconds
    codec_s: Seconds
    """Encoding, decoding, outer step."""
    straggler_s: Seconds
    network_s: Seconds
    exchange_s: Seconds
    """What the exchange takes when all finish their steps together, hidden or not."""
    sent_bytes: Seconds
    """Bytes on the clock that each worker sends, headers included (of a shard and a ring the mean over workers)."""

    @property
    def utilisation(self) -> Seconds:
        """Compute over wall time."""
        return self.compute_s / self.wall_s

    def share(self, seconds: Seconds) -> float:
        """The mean over workers of a part of their wall time."""
        return float(np.mean(seconds / self.wall_s))


def predict(method: Method, net: Net, layout: Layout, costs: Costs, rounds: int = 0) -> Prediction:
    """A round of `method` on `net`. `layout` is what is exchanged: the trained model's. `rounds`: of gossip to work out; 0: 16 or 8.

    Raises:
        BadInput: unlike numbers of workers.
    """
    if not method.n == net.n == len(costs.step_s):
        raise BadInput(f"{method.n} workers in the method, {net.n} in the fleet and {len(costs.step_s)} step times: make them equal")
    return _Clock(method, net, layout, costs).run(rounds)


class _Sizes:
    """What travels of one fragment: bytes and codec seconds."""

    def __init__(self, method: Method, n: int, layout: Layout, costs: Costs) -> None:
        per_s = 1e9 * costs.codec_gbytes_per_s
        self.all_hear = isinstance(method.topology, Complete)
        """Everybody says something to everybody."""
        self.degree = n - 1 if self.all_hear else max(len(method.topology.at(0).out(i)) for i in range(min(n, 2)))
        whole = costs.header_bytes + method.wire.nbytes(layout)
        sliced = method.exchange.everybody
        sent = method.exchange.sent_bytes(method.wire, layout, 0, n, costs.header_bytes) if sliced else self.degree * whole
        self.waves: tuple[float, ...] = ()
        """What a hub sends to each other worker, in order."""
        if isinstance(method.exchange, Hub):
            sent = whole if n > 1 else 0
            self.waves = tuple(costs.charge * b for b in method.exchange.hands(method.codec, layout, n, costs.header_bytes))
        self.sent = np.full(n, costs.charge * sent)
        if isinstance(method.exchange, Hub):
            self.sent[method.exchange.at] = (n - 1) * sum(self.waves)
        self.message = costs.charge * (sent / max(1, 2 * (n - 1)) if sliced else whole)
        """Bytes of one message: all of the fragment, or a slice of it."""
        self.pass_s = costs.charge * 4 * numel(layout) / per_s
        """Seconds of one pass over it: encoding it, or decoding it once."""
        means = len(self.waves) == n  # the hub forms the mean
        self.meets_s = (n + 1) * self.pass_s if means else 0.0
        """Seconds of decoding and encoding at the hub before it sends."""
        self.decoded = 1 if isinstance(method.exchange, Shard) or means else self.degree + 1
        """Packets with all of it that are decoded on landing, or as much."""
        passes = {Ring: 2 * (n - 1) / n + 1, Shard: 2 + 1 / n}.get(type(method.exchange), self.decoded)
        self.heard_s = (passes + _OUTER) * self.pass_s + self.meets_s
        """Seconds of decoding and the outer step (and, of a shard, of encoding its mean)."""


class _Clock:
    """The recurrence: every worker's time, taken through the events of the method's cadence."""

    def __init__(self, method: Method, net: Net, layout: Layout, costs: Costs) -> None:
        n = net.n
        self._method, self._net, self._n = method, net, n
        pieces = fragments(layout, method.cadence.fragments) if method.cadence.fragments > 1 else (layout,)
        self._parts = [_Sizes(method, n, piece, costs) for piece in pieces]
        self._whole = _Sizes(method, n, layout, costs)
        self._t, self._steps = np.array(costs.step_s), np.array(method.plan.steps)
        self._clear()

    def _clear(self) -> None:
        self._free = Free.new(self._n)
        self._straggler, self._network = np.zeros((2, self._n))
        self._ready_s = 0.0

    def run(self, asked: int = 0) -> Prediction:
        """Rounds until the pace is steady, then one; or, where peers change, the mean of all."""
        zero = np.zeros(self._n)
        if self._whole.all_hear:
            exchange_s = np.max([self._landed(p, *self._met(p, self._said(p, zero, zero), zero)) - p.heard_s for p in self._parts], axis=0)
            self._clear()
            marks = self._rounds()
            since = len(marks) - 2 if len(marks) <= _SYNCHRONOUS else _WARM
            first, last, rounds = marks[since], marks[-1], len(marks) - 1 - since
        else:
            rounds = asked or (_ROUNDS if self._n < _MANY else _FEWER)
            exchange_s = together(self._net, self._method.topology, self._whole.message)
            first, last, rounds = np.zeros((3, self._n)), self._gossip(rounds), rounds
        wall_s, straggler_s, network_s = (last - first) / rounds
        compute_s = self._t * self._steps
        return Prediction(
            round_s=float(last[0].max() - first[0].max()) / rounds,
            wall_s=wall_s,
            compute_s=compute_s,
            codec_s=np.maximum(0.0, wall_s - compute_s - straggler_s - network_s),
            straggler_s=straggler_s,
            network_s=network_s,
            exchange_s=exchange_s,
            sent_bytes=np.sum([p.sent for p in self._parts], axis=0),
        )

    def _rounds(self) -> list[Seconds]:
        """Everybody hears everybody. Returns, after each round: its end, straggler and network seconds so far, shape [3, n]."""
        method, parts = self._method, self._parts
        timeline = method.cadence.timeline(method.exchange.meets)
        until = [np.array([event.step(h) for h in method.plan.steps]) for event in timeline]
        at_s = ready_s = np.zeros(self._n)
        flying: dict[int, Arrival] = {}
        marks = [np.zeros((3, self._n))]
        for r in range(_SYNCHRONOUS):
            done = np.zeros(self._n, np.int64)
            if method.outer.before:  # what is said carries the compute of the round before
                at_s = at_s + parts[0].pass_s
                early = self._said(parts[0], ready_s, at_s)
            for event, steps in zip(timeline, until, strict=True):
                part = parts[event.fragment]
                if event.kind != "launch" and event.fragment not in flying:
                    continue
                at_s, done = at_s + np.maximum(0, steps - done) * self._t, np.maximum(steps, done)
                if event.kind == "meet":
                    flying[event.fragment], at_s = self._met(part, flying[event.fragment], at_s)
                elif event.kind == "land":
                    at_s = self._landed(part, flying.pop(event.fragment), at_s)
                elif method.outer.before:
                    ready_s, at_s = at_s, self._landed(part, early, at_s)
                else:
                    ready_s, at_s = at_s, at_s + part.pass_s
                    arrival = self._said(part, ready_s, at_s)
                    if method.cadence.overlap:
                        flying[event.fragment] = arrival
                    else:
                        at_s = self._landed(part, *self._met(part, arrival, at_s))
            marks.append(np.stack([at_s, self._straggler, self._network]))
            if r > 1 and _steady(marks):
                break
        return marks

    def _said(self, part: _Sizes, ready_s: Seconds, launch_s: Seconds) -> Arrival:
        """What is said at `launch_s` arrives."""
        if self._n == 1 or isinstance(self._method.exchange, Ring):  # a ring begins to send when it begins to listen
            return Arrival(np.full(self._n, -np.inf), ready_s)
        if isinstance(self._method.exchange, Hub):
            self._ready_s = float(ready_s.max())
            return inward(self._net, self._free, self._method.exchange.at, launch_s, ready_s, part.message)
        return everybody(self._net, self._free, launch_s, ready_s, part.message)

    def _met(self, part: _Sizes, arrival: Arrival, at_s: Seconds) -> tuple[Arrival, Seconds]:
        """Halfway: of a shard, its mean is formed and sent; a hub hands on. Returns what comes now, and when that was done."""
        if isinstance(self._method.exchange, Hub) and self._n > 1:
            hub = self._method.exchange.at
            met_s = self._wait(at_s, arrival)
            met_s[hub] += part.meets_s
            return outward(self._net, self._free, hub, float(met_s[hub]), self._ready_s, part.waves), met_s
        if not isinstance(self._method.exchange, Shard):
            return arrival, at_s
        at_s = self._wait(at_s, arrival) + (1 + 1 / self._n) * part.pass_s
        if self._n == 1:
            return arrival, at_s
        return everybody(self._net, self._free, at_s, np.zeros(self._n), part.message), at_s

    def _landed(self, part: _Sizes, arrival: Arrival, at_s: Seconds) -> Seconds:
        """Listens from `at_s` on, and steps. Returns when that is done."""
        exchange = self._method.exchange
        if isinstance(exchange, Ring):
            return self._ring(part, arrival.ready_s, at_s) + (1 + _OUTER) * part.pass_s
        return self._wait(at_s, arrival) + (part.decoded + _OUTER) * part.pass_s

    def _wait(self, at_s: Seconds, arrival: Arrival) -> Seconds:
        """Waits, and says for whom: until the sender was ready a straggler, from then on the network."""
        end_s = np.maximum(at_s, arrival.heard_s)
        middle_s = np.clip(arrival.ready_s, at_s, end_s)
        self._straggler += middle_s - at_s
        self._network += end_s - middle_s
        return end_s

    def _ring(self, part: _Sizes, ready_s: Seconds, at_s: Seconds) -> Seconds:
        """2 (n - 1) hops to the right neighbour, each after the one before has come from the left."""
        net, n, b = self._net, self._n, part.message
        if n == 1:
            return at_s
        right = np.roll(net.place, -1)
        wire_s = b * np.maximum(net.up, np.maximum(net.link_s[net.place, right], np.roll(net.down, -1)))
        delay_s = net.delay_s[net.place, right]
        latest, origin, sent_s = np.full(n, -np.inf), ready_s, np.full(n, -np.inf)
        for hop in range(2 * (n - 1)):
            sent_s = np.maximum(at_s, sent_s) + wire_s
            origin = np.roll(origin, 1)
            latest = np.maximum(latest, origin)
            at_s = self._wait(at_s, Arrival(np.roll(sent_s + delay_s, 1), latest))
            if hop < n - 1:
                at_s = at_s + 2 / n * part.pass_s
        return at_s

    def _gossip(self, rounds: int) -> Seconds:
        """Each hears its peers of the round, and may be rounds ahead of the others: heads of messages are taken in the order of time, as
        the downlinks do. Fragments are taken as one. Returns the last of what `_rounds` does."""
        n, pass_s, method = self._n, self._whole.pass_s, self._method
        before, compute_s = method.outer.before, self._t * self._steps
        hold_s = compute_s if before else self._t * [method.cadence.landing_step(h) for h in method.plan.steps]
        gap_s = (compute_s - hold_s + pass_s).tolist()  # from landing one round to speaking in the next; hold: from there to listening
        walk = Walk(self._net, method.topology, rounds, self._whole.message)
        launch_s = [pass_s + (0.0 if before else c) for c in compute_s.tolist()]
        holds_s = hold_s.tolist()
        end_s, straggler, network = ([0.0] * n for _ in range(3))
        for i in range(n):
            walk.launch(i, launch_s[i], 0.0 if before else launch_s[i] - pass_s)
        for i, heard_s, peer_ready_s, heard in walk:
            at_s = launch_s[i] + holds_s[i]
            stop_s = max(at_s, heard_s)
            middle_s = min(max(peer_ready_s, at_s), stop_s)
            straggler[i] += middle_s - at_s
            network[i] += stop_s - middle_s
            end_s[i] = stop_s + (heard + 1 + _OUTER) * pass_s
            launch_s[i] = end_s[i] + gap_s[i]
            walk.launch(i, launch_s[i], at_s if before else launch_s[i] - pass_s)
        return np.array([end_s, straggler, network])


def _steady(marks: list[Seconds]) -> bool:
    """The last two rounds took as long as each other, for everybody."""
    last, before = marks[-1][0] - marks[-2][0], marks[-2][0] - marks[-3][0]
    return bool(np.ptp(np.concatenate([last, before])) <= _STEADY * last.max())


def unhidden_s(method: Method, net: Net, layout: Layout, costs: Costs) -> list[float]:
    """c_i: from the end of worker i's steps to the start of its next round, when all finish such that what they say lands together.

        u_i = seconds until the last of what it says has left its uplink, passed the slowest link and come;  d_i = downlink seconds
        gather   c_i = u_i + max(0, d_i - min_j u_j)          what came with its own part has already passed
        gossip   as gather, with u_i and d_i the means over the law of the graph (`gossamer.core.wires.by_law`)
        shard    c_i = u_i + max(max_j (d_j + u_j), 2 d_i)    then everybody waits for the slowest worker's slice
        ring     the same for all: 2 (n - 1) hops over the slowest
        hub      c_i = u_i + what the hub's answer takes from its start to i; 0 for the hub itself

    With overlap that share of a round's steps hides it, once for each fragment. Encoding, decoding and outer steps are alike for all and
    left out: only differences of c_i matter to a plan. Only +, -, *, /, max and an exact sum are used: all machines find the same numbers.
    """
    n = net.n
    if n == 1 or method.outer.before:
        return [0.0] * n
    sizes = _Sizes(method, n, layout, costs)
    slow_s, far_s = net.farthest(sizes.message)
    one_up, one_down = sizes.message * net.up, sizes.message * net.down
    if isinstance(method.exchange, Ring):
        hop_s = float((np.maximum(np.maximum(one_up, one_down), slow_s) + far_s).max())
        c = np.full(n, 2 * (n - 1) * hop_s)
    elif isinstance(method.exchange, Hub):
        hub = method.exchange.at
        to_hub = net.place, net.place[hub]
        u = sizes.message * np.maximum(net.up, net.link_s[to_hub]) + net.delay_s[to_hub]
        c = u + outward(net, Free.new(n), hub, 0.0, 0.0, sizes.waves).heard_s
        c[hub] = 0.0
    elif not sizes.all_hear:
        u, d = by_law(net, of_law(method.topology), sizes.message, rounds_of_law(n))
        c = u + np.maximum(0.0, d - float(u.min()))
    else:
        u = (sizes.degree - 1) * one_up + np.maximum(one_up, slow_s) + far_s
        d = sizes.degree * one_down
        c = u + (np.maximum(float((d + u).max()), 2 * d) if isinstance(method.exchange, Shard) else np.maximum(0.0, d - float(u.min())))
    if method.cadence.overlap:
        plan = method.plan
        round_s = continuous(costs.step_s, plan.batch, [0.0] * n, math.fsum(map(int.__mul__, plan.steps, plan.batch)))
        c = np.maximum(0.0, c - method.cadence.overlap * method.cadence.fragments * round_s)
    return [float(v) for v in c]


def step_times(fleet: Fleet, batch: tuple[int, ...], sequence: int, flops_per_token: float) -> tuple[float, ...]:
    """t_i of each worker at its B_i, in seconds."""
    return tuple(fleet.step_s(i, b, sequence, flops_per_token) for i, b in enumerate(batch))


def of_law(topology: Topology) -> Topology:
    """Another draw from the same law, the same whatever the run's seed: what is planned must not depend on it."""
    if is_dataclass(topology) and hasattr(topology, "seed"):
        drawn: Topology = replace(topology, seed=0)
        return drawn
    return topology


def rounds_of_law(n: int) -> int:
    """Rounds over which a plan of gossip looks at the law of its graphs: 32, fewer from 128 workers on, and 8 at the least."""
    return max(8, min(KEPT, 4096 // n))
