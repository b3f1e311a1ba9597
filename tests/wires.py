"""Wires for tests: one of nothing but memory, which docs/extend.md shows, and faults for any wire: delays, cut lines, black holes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Condition
from typing import Literal

from torch import Tensor

from gossamer.real import Group, LinkDown, Wire, Work
from gossamer.worker.effects import Addr

# ---- docs/extend.md


class Room:
    """Where the wires of n workers meet."""

    def __init__(self, n):
        self.n, self.changed = n, Condition()
        self.waiting = {}  # (from, to, tag, is it a send) -> what has not met its other half yet
        self.left = set()


class MemoryWork:
    def __init__(self, room, tensor):
        self.room, self.tensor, self.done, self.fault = room, tensor, False, None

    def wait(self):
        with self.room.changed:
            self.room.changed.wait_for(lambda: self.done or self.fault)
        if self.fault:
            raise LinkDown(self.fault)


class MemoryWire:
    def __init__(self, room, me):
        self.room, self.me = room, me

    def rank(self):
        return self.me

    def size(self):
        return self.room.n

    def send(self, tensor, dst, tag):
        return self._meet(tensor, (self.me, dst, tag), True)

    def recv(self, tensor, src, tag):
        return self._meet(tensor, (src, self.me, tag), False)

    def _meet(self, tensor, line, sends):
        room, work = self.room, MemoryWork(self.room, tensor)
        with room.changed:
            if gone := room.left.intersection(line[:2]):
                raise LinkDown(f"worker {min(gone)} has closed its connections")
            halves = room.waiting.get((*line, not sends))
            if not halves:
                room.waiting.setdefault((*line, sends), deque()).append(work)
                return work
            other = halves.popleft()
            if not halves:
                del room.waiting[(*line, not sends)]
            here, there = (work, other) if sends else (other, work)
            if here.tensor.numel() != there.tensor.numel():
                work.fault = other.fault = f"{here.tensor.numel()} bytes came where {there.tensor.numel()} were expected"
            else:
                there.tensor.copy_(here.tensor)
                work.done = other.done = True
            room.changed.notify_all()
        return work

    def close(self):
        with self.room.changed:
            self.room.left.add(self.me)
            for line in [line for line in self.room.waiting if self.me in line[:2]]:
                for work in self.room.waiting.pop(line):
                    work.fault = f"worker {self.me} has closed its connections"
            self.room.changed.notify_all()


class MemoryStore:
    def __init__(self):
        self.texts = {}

    def set(self, key, value):
        self.texts[key] = value

    def get(self, key):
        return self.texts[key].encode()

    def check(self, keys):
        return all(key in self.texts for key in keys)


# ---- groups


Wrap = Callable[[Wire, Literal["data", "notes"]], Wire]


def over_memory(n: int, wrap: Wrap = lambda wire, channel: wire, *, survives: bool = False) -> Callable[[Addr], Group]:
    """Makes the groups of n workers in threads of this process; `wrap` is given each wire, to put faults around it."""
    store, rooms = MemoryStore(), {"data": Room(n), "notes": Room(n)}

    def group(me: Addr) -> Group:
        return Group(
            store, me, n, lambda channel: wrap(MemoryWire(rooms[channel], me), channel), start_timeout_s=30, survives=survives
        )  # fmt: skip

    return group


# ---- faults


class Cables:
    """The lines between workers, as a test treats them. One for all wires that it has to do with (of packets, of notes, or both)."""

    def __init__(self) -> None:
        self.changed = Condition()
        self._cut: set[frozenset[Addr]] = set()
        self._held: set[frozenset[Addr]] = set()

    def cut(self, a: Addr, b: Addr) -> None:
        """Ends the connection between two workers, for good: both notice at once."""
        with self.changed:
            self._cut.add(frozenset((a, b)))
            self.changed.notify_all()

    def isolate(self, worker: Addr, n: int) -> None:
        """Cuts all lines of one of n workers."""
        for j in range(n):
            if j != worker:
                self.cut(worker, j)

    def hold(self, a: Addr, b: Addr) -> None:
        """A black hole: from now on nothing passes between the two, and nobody is told."""
        with self.changed:
            self._held.add(frozenset((a, b)))

    def free(self, a: Addr, b: Addr) -> None:
        """What was held goes on its way, in order."""
        with self.changed:
            self._held.discard(frozenset((a, b)))
            self.changed.notify_all()

    def is_cut(self, a: Addr, b: Addr) -> bool:
        return frozenset((a, b)) in self._cut

    def is_held(self, a: Addr, b: Addr) -> bool:
        return frozenset((a, b)) in self._held


class FaultyWork:
    """Work on a line that may be cut under it."""

    def __init__(self, cables: Cables, me: Addr, other: Addr) -> None:
        self._cables, self._line = cables, (me, other)
        self._over = False
        self._error: LinkDown | None = None

    def begin(self, start: Callable[[], Work]) -> None:
        """Starts what is behind it, and watches that in a thread of its own: a cut ends the wait here, not there."""
        try:
            work = start()
        except LinkDown as error:
            self._end(error)
            return

        def watch() -> None:
            try:
                work.wait()
            except LinkDown as error:
                self._end(error)
            else:
                self._end(None)

        threading.Thread(target=watch, daemon=True).start()

    def _end(self, error: LinkDown | None) -> None:
        with self._cables.changed:
            self._over, self._error = True, error
            self._cables.changed.notify_all()

    def wait(self) -> None:
        with self._cables.changed:
            self._cables.changed.wait_for(lambda: self._over or self._cables.is_cut(*self._line))
            if not self._over:
                raise LinkDown(f"the line between workers {min(self._line)} and {max(self._line)} was cut")
            if self._error is not None:
                raise self._error


class Faulty:
    """A wire with faults. Messages to one worker stay in the order sent, whatever their delays.

    Args:
        cables: which lines are cut or held.
        delay_s: (receiver, tag) -> how long a message is under way beside what the wire takes. It may do something else first, such as
            cut a cable.
        spoil: (data, receiver, tag) -> what is sent in its place: the same bytes, or a changed copy.
    """

    def __init__(
        self,
        wire: Wire,
        cables: Cables,
        *,
        delay_s: Callable[[Addr, int], float] = lambda dst, tag: 0.0,
        spoil: Callable[[Tensor, Addr, int], Tensor] = lambda data, dst, tag: data,
    ) -> None:
        self._wire, self._cables, self._delay_s, self._spoil = wire, cables, delay_s, spoil
        self._closed = False
        self._lines: dict[Addr, SimpleQueue[tuple[float, FaultyWork, Callable[[], Work]] | None]] = {}
        for j in range(wire.size()):
            if j != wire.rank():
                self._lines[j] = SimpleQueue()
                threading.Thread(target=self._carry, args=(j,), daemon=True).start()

    def rank(self) -> Addr:
        return self._wire.rank()

    def size(self) -> int:
        return self._wire.size()

    def send(self, tensor: Tensor, dst: Addr, tag: int) -> FaultyWork:
        work, data = FaultyWork(self._cables, self.rank(), dst), self._spoil(tensor, dst, tag)
        if self._closed:
            raise LinkDown("closed")
        self._lines[dst].put((time.monotonic() + self._delay_s(dst, tag), work, lambda: self._wire.send(data, dst, tag)))
        return work

    def recv(self, tensor: Tensor, src: Addr, tag: int) -> FaultyWork:
        work = FaultyWork(self._cables, self.rank(), src)
        work.begin(lambda: self._wire.recv(tensor, src, tag))
        return work

    def _carry(self, dst: Addr) -> None:
        """One message after the other, each when it is due and the line lets it through."""
        me, cables = self.rank(), self._cables
        while (job := self._lines[dst].get()) is not None:
            due_s, work, start = job
            with cables.changed:
                while not self._closed and ((left_s := due_s - time.monotonic()) > 0 or cables.is_held(me, dst)):
                    cables.changed.wait(left_s if left_s > 0 else None)
            if not cables.is_cut(me, dst):
                work.begin(start)

    def close(self) -> None:
        with self._cables.changed:
            self._closed = True
            self._cables.changed.notify_all()
        self._wire.close()
        for line in self._lines.values():
            line.put(None)
