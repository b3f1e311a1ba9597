"""Where messages lie between their arrival and their Gather, or RecvAny.

A *slot* is an integer that names (tag, sender) at one receiver, a *lane* one that names (tag, sender, receiver). Nearly every slot holds
one message and nearly every lane carries one at a time, so that the common case costs one dictionary entry and no queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from gossamer.core.errors import RunFailed
from gossamer.worker.account import MOST_LINKS, landed
from gossamer.worker.effects import Addr, Gather, Tag
from gossamer.worker.packet import Packet

T = TypeVar("T")

_TAG_NAMES = {value: name for name, value in vars(Tag).items() if isinstance(value, int)}


def in_words(tag: int) -> str:
    """A message tag in words."""
    return f"{_TAG_NAMES.get(tag % 8, f'kind {tag % 8}')} of round {tag // 8}"


class Slots(Generic[T]):
    """Values by slot, first in, first out.

    >>> slots = Slots[str]()
    >>> for text in ("first", "second"):
    ...     slots.put(5, text)
    >>> slots.take(5), slots.take(5), 5 in slots.held
    ('first', 'second', False)
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: dict[int, T | deque[T]] = {}
        """Every slot that holds something; an empty one is absent."""

    def put(self, slot: int, value: T) -> None:
        """Appends `value` (anything but a deque) to `slot`."""
        if slot not in self.held:
            self.held[slot] = value
            return
        held = self.held[slot]
        if isinstance(held, deque):
            held.append(value)
        else:
            self.held[slot] = deque((held, value))

    def take(self, slot: int) -> T:
        """Removes the oldest value of `slot`."""
        held = self.held.pop(slot)
        if not isinstance(held, deque):
            return held
        value: T = held.popleft()
        if held:
            self.held[slot] = held
        return value


class Message(NamedTuple):
    """A packet on its way."""

    src: Addr
    dst: Addr
    tag: int
    packet: Packet
    lane: int


class Flight:
    """Messages on their way, by key. Those of one lane come out in the order sent, even where the network lets one overtake another."""

    __slots__ = ("_behind", "_early", "_flying", "_head")

    def __init__(self) -> None:
        self._flying: dict[int, Message] = {}
        self._head: dict[int, int] = {}
        self._behind: dict[int, deque[int]] = {}
        self._early: set[int] = set()

    def __len__(self) -> int:
        return len(self._flying)

    def carries(self, lane: int) -> bool:
        """Whether a message of the lane is on its way."""
        return lane in self._head

    def start(self, key: int, message: Message) -> None:
        """`message` leaves."""
        self._flying[key] = message
        if self._head.setdefault(message.lane, key) != key:
            self._behind.setdefault(message.lane, deque()).append(key)

    def land(self, key: int) -> list[Message]:
        """The network has delivered `key`. Returns what may be read now: nothing while an older message of the lane is still flying."""
        lane = self._flying[key].lane
        if self._head[lane] != key:
            self._early.add(key)
            return []
        landed = [self._flying.pop(key)]
        behind = self._behind.get(lane)
        if behind is None:
            del self._head[lane]
            return landed
        while behind:
            key = self._head[lane] = behind.popleft()
            if key not in self._early:
                break
            self._early.remove(key)
            landed.append(self._flying.pop(key))
        else:
            del self._head[lane]
        if not behind:
            del self._behind[lane]
        return landed


class Mailbox:
    """The mail of one worker: what has come, what is expected, and what its wait lacks.

    Args:
        addr: the worker.
        senders: how many seats there are.
        serves: a server, which takes whatever comes first; others name whom they wait for.
    """

    __slots__ = ("_addr", "_arrived", "_count", "_expected", "_senders", "_waits_for", "lacks", "links", "queues")

    def __init__(self, addr: Addr, senders: int, serves: bool = False) -> None:
        self._addr, self._senders = addr, senders
        self._arrived = Slots[tuple[float, Packet]]()
        self._expected = Slots[int]()
        self.lacks: set[int] = set()
        """Slots that the wait still lacks."""
        self.queues: dict[int, list[tuple[float, Addr, int, Packet]]] | None = {} if serves else None
        """Of a server, by tag: a heap of (arrival, sender, number, packet)."""
        self.links: dict[Addr, list[float]] = {}
        """What came straight from its sender since the last round note: sender -> [bytes, seconds]."""
        self._count = 0
        self._waits_for = -1

    def expect(self, tag: int, sizes: Mapping[Addr, int]) -> None:
        """Messages of these sizes will come."""
        base, put = tag * self._senders, self._expected.put
        for j, nbytes in sizes.items():
            put(base + j, nbytes)

    def put(self, src: Addr, tag: int, now_s: float, packet: Packet) -> bool:
        """A message has arrived. Returns whether that ends a wait."""
        if self.queues is not None:
            self._count += 1
            heappush(self.queues.setdefault(tag, []), (now_s, src, self._count, packet))
            ends = tag == self._waits_for
            self._waits_for = -1 if ends else self._waits_for
            return ends
        slot = tag * self._senders + src
        self._arrived.put(slot, (now_s, packet))
        if slot not in self.lacks:
            return False
        self.lacks.remove(slot)
        return not self.lacks

    def holds(self, tag: int, src: Addr) -> bool:
        """Whether a message of `tag` from `src` is here."""
        return tag * self._senders + src in self._arrived.held

    def drop(self, tag: int, src: Addr) -> None:
        """Nothing is expected of `tag` from `src` any more, and what is here of it goes."""
        slot = tag * self._senders + src
        for slots in (self._arrived, self._expected):
            slots.held.pop(slot, None)
        self.lacks.discard(slot)

    def first(self, tag: int) -> tuple[Addr, Packet] | None:
        """Takes the message of `tag` that came first (at one moment: the lowest sender's); None: a wait for one begins.

        Raises:
            RunFailed: this is no server.
        """
        if self.queues is None:
            raise RunFailed(f"worker {self._addr} asks for any message of {in_words(tag)}: only servers may, workers name whom they hear")
        queue = self.queues.get(tag)
        if not queue:
            self._waits_for = tag
            return None
        _, src, _, packet = heappop(queue)
        return src, packet

    def present(self, gather: Gather, round: int) -> bool:
        """Whether all messages of a wait are here. If not, the wait begins.

        Raises:
            RunFailed: a message that was never expected. `round` is the worker's, for the message.
        """
        base, held, sizes = gather.tag * self._senders, self._arrived.held, self._expected.held
        lacks = self.lacks
        for j in gather.frm:
            slot = base + j
            if slot not in sizes:
                raise RunFailed(
                    f"worker {self._addr}, round {round}: gathers {in_words(gather.tag)} from worker {j} without an Expect for it: "
                    "real worlds post their receives from Expect and would never hear it"
                )
            if slot not in held:
                lacks.add(slot)
        return not lacks

    def take(
        self, gather: Gather, round: int, ready_s: Mapping[tuple[int, int], Mapping[Addr, float]]
    ) -> tuple[dict[Addr, Packet], Addr, float]:
        """Takes the messages of a wait out. Returns them, the last to arrive (a tie: the lowest address) and its time.

        Raises:
            RunFailed: a message of another size than expected. `round` is the worker's, for the message.
        """
        base, take_mail, take_size = gather.tag * self._senders, self._arrived.take, self._expected.take
        told = gather.carries is None and len(gather.frm) <= MOST_LINKS
        stamps = ready_s.get((gather.round, gather.fragment), {}) if told else {}
        heard: dict[Addr, Packet] = {}
        last, last_s = -1, float("-inf")
        for j in gather.frm:
            at_s, packet = take_mail(base + j)
            nbytes = take_size(base + j)
            if packet.nbytes != nbytes:
                raise RunFailed(
                    f"worker {self._addr}, round {round}: expects {nbytes} bytes of {in_words(gather.tag)} from worker {j}, which "
                    f"sent {packet.nbytes} bytes: both must compute one size from one configuration"
                )
            heard[j] = packet
            if j in stamps and packet.data is not None:
                landed(self.links, j, nbytes, at_s - stamps[j])
            if at_s > last_s or (at_s == last_s and j < last):
                last, last_s = j, at_s
        return heard, last, last_s
