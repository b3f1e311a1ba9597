"""How long messages take: a fluid model of uplinks, links and downlinks. Every call is O(1) in the number of workers (queue mode).

A message of b bytes from i to j passes i's uplink (up_mbps), the link of the ordered pair (i, j) and j's downlink (down_mbps). Alone it
takes b / min(up, link, down) + latency (+ jitter) + the fleet's constant per message.

- `sharing="queue"`: each of the three is a queue, first come, first served, and a message flows on while it is still coming in
  (cut-through). Time in a queue is service alone, so a trickle from a slow link does not keep a fast downlink busy.
- `sharing="fair"`: all messages under way share up- and downlinks max-min fairly (`gossamer.sim.fair`).

In both, messages of one ordered pair follow each other like those of a TCP connection; a single one is limited by window and loss as
`gossamer.core.fleet.Link.flow_mbps` says. Randomness (jitter) is a pure function of (seed, from, to, number of the message in its
pair), so a run is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.sim.fair import Fair
from gossamer.sim.paths import Event, Paths

Sharing: TypeAlias = Literal["queue", "fair"]


class Queues:
    """First come, first served at each uplink, pair and downlink; cut-through.

    With b the bytes, at launch (now) and when the head reaches the downlink (head):

        s1 = max(now, up_free)      e1 = s1 + b / up                up_free = e1
        s2 = max(s1, link_free)     e2 = max(e1, s2 + b / link)     link_free = s2 + b / link
        head = s2 + delay           tail = e2 + delay
        s3 = max(head, down_free)   end = max(tail, s3 + b / down)  down_free = s3 + b / down

    The downlink is taken in the order in which heads arrive there, not in the order of launch.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._up_free = [0.0] * paths.n
        self._down_free = [0.0] * paths.n
        self._link_free: list[dict[int, float]] = [{} for _ in range(paths.n)]
        self._purge_at = [256] * paths.n
        self._last: list[dict[int, tuple[float, float]]] = [{} for _ in range(paths.n)]  # head and tail, for pairs with jitter
        self._flying: dict[int, tuple[int, int, float]] = {}  # key -> to, bytes, when its tail reaches the downlink

    def launch(self, now_s: float, key: int, src: int, dst: int, nbytes: int) -> list[Event]:
        """Starts message `key`. Returns the events to schedule."""
        if src == dst:
            return [(now_s, key, 1)]
        paths = self._paths
        slow, delay_s, jitter_s, trace = paths.route(src, dst)
        fast, own_trace = paths.up_s_per_byte[src], paths.traces[src]
        begin_s = self._up_free[src]
        if begin_s < now_s:
            begin_s = now_s
        end_s = begin_s + nbytes * fast if own_trace is None else own_trace.finish(begin_s, nbytes * fast)
        self._up_free[src] = end_s
        if slow > fast or trace is not None or own_trace is not None:  # else a link is free whenever its uplink is
            links = self._link_free[src]
            begin_s = max(begin_s, links.get(dst, 0.0))
            free_s = begin_s + nbytes * slow if trace is None else trace.finish(begin_s, nbytes * slow)
            if len(links) >= self._purge_at[src]:
                self._purge(src)
                links = self._link_free[src]
            links[dst] = free_s
            end_s = max(end_s, free_s)
        head_s, tail_s = begin_s + delay_s, end_s + delay_s
        if jitter_s:
            extra_s = paths.jitter_s(src, dst, jitter_s)
            last = self._last[src].get(dst, (0.0, 0.0))
            head_s, tail_s = max(head_s + extra_s, last[0]), max(tail_s + extra_s, last[1])
            self._last[src][dst] = (head_s, tail_s)
        self._flying[key] = (dst, nbytes, tail_s)
        return [(head_s, key, 0)]

    def finish(self, when_s: float, key: int, version: int) -> tuple[bool, list[Event]]:
        """Version 0: the head is at the downlink. Version 1: the message is there."""
        if version == 1:
            return True, []
        dst, nbytes, tail_s = self._flying.pop(key)
        free_s = self._down_free[dst]
        if free_s < when_s:
            free_s = when_s
        work_s, trace = nbytes * self._paths.down_s_per_byte[dst], self._paths.traces[dst]
        free_s = free_s + work_s if trace is None else trace.finish(free_s, work_s)
        self._down_free[dst] = free_s
        return False, [(free_s if free_s > tail_s else tail_s, key, 1)]

    def _purge(self, src: int) -> None:
        """Forgets links that are free before the uplink: they cannot delay anything any more."""
        free_s = self._up_free[src]
        self._link_free[src] = kept = {dst: t for dst, t in self._link_free[src].items() if t > free_s}
        self._purge_at[src] = 2 * len(kept) + 256

    def snapshot(self, node: int) -> list[float]:
        """[up_free, down_free, then (dst, link_free, count, last head, last tail) for each pair that still matters]."""
        self._purge(node)
        links, counts, last = self._link_free[node], self._paths.counts[node], self._last[node]
        values = [self._up_free[node], self._down_free[node]]
        for dst in sorted(links.keys() | counts.keys()):
            values += [float(dst), links.get(dst, 0.0), float(counts.get(dst, 0)), *last.get(dst, (0.0, 0.0))]
        return values

    def restore(self, node: int, values: Sequence[float]) -> None:
        """Takes back what `snapshot` gave."""
        self._up_free[node], self._down_free[node] = values[:2]
        for k in range(2, len(values), 5):
            dst, free_s, count, head_s, tail_s = int(values[k]), *values[k + 1 : k + 5]
            if free_s:
                self._link_free[node][dst] = free_s
            if count:
                self._paths.counts[node][dst] = int(count)
                self._last[node][dst] = (head_s, tail_s)


class Network:
    """The network of a fleet, for an event queue that calls `launch` for each message and `finish` for each event in the order of time.

    Args:
        seed: of the jitter.
        sharing: "queue" (fast, to thousands of workers) or "fair" (max-min; work grows with the messages that share).
        hosts: the worker at whose site each node stands, for nodes other than the workers.

    Raises:
        BadInput: another `sharing`.
    """

    launch: Callable[[float, int, int, int, int], list[Event]]
    """launch(now_s, key, src, dst, nbytes): starts message `key` (a number used once) and returns events to schedule."""
    finish: Callable[[float, int, int], tuple[bool, list[Event]]]
    """finish(when_s, key, version): an event has come. Returns whether the message is now delivered, and more events to schedule. False
    is an event on the way, or one that newer events have replaced."""

    def __init__(self, fleet: Fleet, seed: int = 0, sharing: Sharing = "queue", hosts: Sequence[int] | None = None) -> None:
        modes: dict[str, type[Queues] | type[Fair]] = {"queue": Queues, "fair": Fair}
        if sharing not in modes:
            raise BadInput(f"sharing is {sharing!r}: expected 'queue' (fast) or 'fair' (max-min between all messages)")
        self._mode = modes[sharing](Paths(fleet, seed, hosts))
        self.launch = self._mode.launch
        self.finish = self._mode.finish

    def snapshot(self, node: int) -> list[float]:
        """What `node` must remember to go on at a round boundary: when its queues are free, and how many messages it has sent.

        Messages under way are not part of it: their senders launch them again. (In queue mode what a faster peer's next message has
        already taken of the downlink is counted, so the times after such a resume may differ by its service time.)
        """
        return self._mode.snapshot(node)

    def restore(self, node: int, values: Sequence[float]) -> None:
        """Takes back what `snapshot` gave, in a network of the same fleet and mode."""
        self._mode.restore(node, values)
