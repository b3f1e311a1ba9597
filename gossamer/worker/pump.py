"""Turning a program's effects into calls: the one core of the real trainer and of a user's own training loop."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from gossamer.worker.effects import Compute, Effect, Program, Reply
from gossamer.worker.state import State


class Final(NamedTuple):
    """The program has ended."""

    state: State


class World(Protocol):
    """Answers every effect but Compute."""

    def answer(self, effect: Effect) -> Reply:
        """The reply to `effect`; it may block."""


W = TypeVar("W", bound=World)


class Pump(Generic[W]):
    """Runs a program up to its next Compute, and leaves the computing to whoever holds the pump.

    >>> from gossamer.worker.effects import Done, Note, Work
    >>> def program():
    ...     done = yield Compute(Work(1, 1, 0.0, 1.0))
    ...     yield Note({"tokens": done.tokens})
    ...     return State(x={})
    >>> class Printer:
    ...     def answer(self, effect):
    ...         print(type(effect).__name__, effect.record)
    >>> pump = Pump(program(), Printer())
    >>> type(pump.advance(None)).__name__
    'Compute'
    >>> type(pump.advance(Done(None, 128, 0.0))).__name__
    Note {'tokens': 128}
    'Final'
    """

    def __init__(self, program: Program, world: W) -> None:
        self.program = program
        self.world = world

    def advance(self, reply: Reply) -> Compute | Final:
        """Sends `reply` (None at first, then the Done of each Compute) and goes on to the next Compute or the end."""
        while True:
            try:
                effect = self.program.send(reply)
            except StopIteration as end:
                return Final(end.value)
            if isinstance(effect, Compute):
                return effect
            reply = self.world.answer(effect)
