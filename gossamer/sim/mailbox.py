"""Where messages lie between their arrival and their Gather.

A *slot* is an integer that names (tag, sender) at one receiver, a *lane* one that names (tag, sender, receiver). Nearly every slot holds
one message and nearly every lane carries one at a time, so that the common case costs one dictionary entry and no queue.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from gossamer.worker.effects import Addr
from gossamer.worker.packet import Packet

T = TypeVar("T")


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
