"""Max-min fair sharing of up- and downlinks between the messages under way.

Rates are such that none can grow without another, no larger one, shrinking (Bertsekas and Gallager, Data Networks, sec. 6.5). They are
found by progressive filling: raise all rates together; whoever hits the limit of its own link or a full up- or downlink stays there. Only
messages that share an up- or downlink, directly or through others, are looked at again when one comes or goes.

Events of one moment are settled together: coming and going marks the nodes concerned, and one SETTLE event at the same time works out the
new rates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from gossamer.core.trace import Trace
from gossamer.sim.paths import Event, Paths, Route

DELIVER, SETTLE, CHANGE = -1, -2, -3
"""Versions of events other than "this flow is through"."""

_LEFT = 1e-9
"""A flow with this part of its bytes left is through: equal flows end together in spite of rounding."""

Node: TypeAlias = int
"""An uplink (2 * worker) or a downlink (2 * worker + 1)."""


class Flow:
    """A message that moves."""

    __slots__ = ("dst", "key", "left", "nbytes", "rate", "route", "since_s", "src", "version")

    def __init__(self, key: int, src: int, dst: int, nbytes: int, route: Route) -> None:
        self.key, self.src, self.dst, self.nbytes, self.route = key, src, dst, nbytes, route
        self.left = float(nbytes)
        self.rate = 0.0
        """Bytes per second since `since_s`, when `left` bytes were left."""
        self.since_s = 0.0
        self.version = 0

    @property
    def nodes(self) -> tuple[Node, Node]:
        return 2 * self.src, 2 * self.dst + 1


def fill(caps: Sequence[float], users: Sequence[Sequence[Node]], room: dict[Node, float]) -> list[float]:
    """Max-min fair rates by progressive filling.

    Args:
        caps: what each flow may get on its own.
        users: the nodes that each flow passes.
        room: the capacity of each node.

    >>> fill([9.0, 9.0, 1.0], [(0, 1), (0, 3), (2, 3)], {0: 10.0, 1: 4.0, 2: 10.0, 3: 10.0})
    [4.0, 6.0, 1.0]
    """
    rates = [0.0] * len(caps)
    room = dict(room)
    waiting: dict[Node, dict[int, None]] = {node: {} for node in room}
    for f, nodes in enumerate(users):
        for node in nodes:
            waiting[node][f] = None
    by_cap = deque(sorted(range(len(caps)), key=lambda f: (caps[f], f)))
    open_flows = set(by_cap)

    def settle(f: int, rate: float) -> None:
        rates[f] = rate
        open_flows.discard(f)
        for node in users[f]:
            del waiting[node][f]
            room[node] = max(0.0, room[node] - rate)

    while open_flows:
        level = min(room[node] / len(w) for node, w in waiting.items() if w)
        capped = False
        while by_cap and (by_cap[0] not in open_flows or caps[by_cap[0]] <= level):
            f = by_cap.popleft()
            if f in open_flows:
                settle(f, caps[f])
                capped = True
        if capped:
            continue
        full = [node for node, w in waiting.items() if w and room[node] / len(w) <= level * (1 + 1e-12)]
        for f in sorted({f for node in full for f in waiting[node]}):
            settle(f, level)
    return rates


class Fair:
    """The fair mode of `gossamer.sim.network.Network`: a message holds its share of the nodes until it is through, and is delivered
    its latency, jitter and constant later."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._flows: dict[int, Flow] = {}
        self._pairs: dict[tuple[int, int], deque[Flow]] = {}  # the first of each moves, the others wait for it
        self._at: dict[Node, dict[int, Flow]] = {}
        self._dirty: dict[Node, None] = {}
        self._last_s: dict[tuple[int, int], float] = {}  # last delivery, for pairs with jitter

    def launch(self, now_s: float, key: int, src: int, dst: int, nbytes: int) -> list[Event]:
        """Starts message `key`. Returns the events to schedule."""
        if src == dst:
            return [(now_s, key, DELIVER)]
        flow = Flow(key, src, dst, nbytes, self._paths.route(src, dst))
        lane = self._pairs.setdefault((src, dst), deque())
        lane.append(flow)
        return self._start(now_s, flow) if len(lane) == 1 else []

    def finish(self, when_s: float, key: int, version: int) -> tuple[bool, list[Event]]:
        """An event has come: DELIVER, SETTLE, CHANGE of a trace, or the flow of that version is through."""
        if version == DELIVER:
            return True, []
        if version == SETTLE:
            return False, self._settle(when_s)
        flow = self._flows.get(key)
        if flow is None or version not in (flow.version, CHANGE):
            return False, []
        if version == CHANGE:
            return False, self._mark(when_s, flow)
        return False, self._through(when_s, flow)

    def snapshot(self, node: int) -> list[float]:
        """(dst, count, last delivery) for each pair with jitter."""
        counts = self._paths.counts[node]
        return [v for dst in sorted(counts) for v in (float(dst), float(counts[dst]), self._last_s.get((node, dst), 0.0))]

    def restore(self, node: int, values: Sequence[float]) -> None:
        """Takes back what `snapshot` gave."""
        for k in range(0, len(values), 3):
            dst = int(values[k])
            self._paths.counts[node][dst] = int(values[k + 1])
            self._last_s[node, dst] = values[k + 2]

    def _mark(self, now_s: float, flow: Flow) -> list[Event]:
        first = not self._dirty
        self._dirty.update(dict.fromkeys(flow.nodes))
        return [(now_s, flow.key, SETTLE)] if first else []

    def _start(self, now_s: float, flow: Flow) -> list[Event]:
        flow.since_s = now_s
        self._flows[flow.key] = flow
        for node in flow.nodes:
            self._at.setdefault(node, {})[flow.key] = flow
        return self._mark(now_s, flow)

    def _through(self, now_s: float, flow: Flow) -> list[Event]:
        """The last byte has left: delivery follows, and the next message of the pair starts."""
        del self._flows[flow.key]
        for node in flow.nodes:
            del self._at[node][flow.key]
            if not self._at[node]:
                del self._at[node]
        events = self._mark(now_s, flow)
        pair = (flow.src, flow.dst)
        arrival_s = now_s + flow.route.delay_s
        if flow.route.jitter_s:
            arrival_s = max(arrival_s + self._paths.jitter_s(*pair, flow.route.jitter_s), self._last_s.get(pair, 0.0))
            self._last_s[pair] = arrival_s
        events.append((arrival_s, flow.key, DELIVER))
        lane = self._pairs[pair]
        lane.popleft()
        if lane:
            events += self._start(now_s, lane[0])
        else:
            del self._pairs[pair]
        return events

    def _component(self, nodes: Iterable[Node]) -> list[Flow]:
        """All flows that share a node with `nodes`, directly or through others, in a fixed order."""
        seen, found, todo = set(nodes), {}, list(nodes)
        while todo:
            for key, flow in self._at.get(todo.pop(), {}).items():
                if key not in found:
                    found[key] = flow
                    for node in flow.nodes:
                        if node not in seen:
                            seen.add(node)
                            todo.append(node)
        return [found[key] for key in sorted(found)]

    def _settle(self, now_s: float) -> list[Event]:
        """New rates for all that share a node with what came or went."""
        events: list[Event] = []
        while True:
            flows = self._component(self._dirty)
            for flow in flows:
                flow.left -= flow.rate * (now_s - flow.since_s)
                flow.since_s = now_s
            through = [flow for flow in flows if flow.left <= _LEFT * flow.nbytes]
            if not through:
                break
            for flow in through:
                events += self._through(now_s, flow)
        self._dirty.clear()
        if flows:
            events += self._refill(now_s, flows)
        return events

    def _refill(self, now_s: float, flows: Sequence[Flow]) -> list[Event]:
        paths, events = self._paths, []
        per_byte = {node: (paths.down_s_per_byte if node % 2 else paths.up_s_per_byte)[node // 2] for f in flows for node in f.nodes}
        room = {node: self._rate(s, paths.traces[node // 2], now_s) for node, s in per_byte.items()}
        caps = [self._rate(flow.route.s_per_byte, flow.route.trace, now_s) for flow in flows]
        for flow, rate in zip(flows, fill(caps, [flow.nodes for flow in flows], room), strict=True):
            if rate != flow.rate:
                flow.rate = rate
                flow.version += 1
                if rate > 0:
                    events.append((now_s + flow.left / rate, flow.key, flow.version))
        if paths.traced:
            owners = [(t.next_change(now_s), f.key) for f in flows for t in (f.route.trace, paths.traces[f.src], paths.traces[f.dst]) if t]
            change_s, key = min(owners, default=(math.inf, 0))
            if change_s < math.inf:
                events.append((change_s, key, CHANGE))
        return events

    @staticmethod
    def _rate(s_per_byte: float, trace: Trace | None, at_s: float) -> float:
        rate = 1.0 / s_per_byte if s_per_byte else math.inf
        return rate if trace is None else rate * trace.factor(at_s)
