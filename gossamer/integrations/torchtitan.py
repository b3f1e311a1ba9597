"""Gossamer where a trainer steps an optimizer, or a container of optimizers, that it was given, as torchtitan's does:

outer = gossamer.join(model_parts[0], list(optimizers), "diloco", steps=30, batch=8, sequence=4096, rounds=200)
self.optimizers = OuterOptimizer(optimizers, outer)       # its step() also exchanges
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gossamer.library import Outer, Record


class OuterOptimizer:
    """Has the surface of what it wraps. `step` steps that, then takes the outer step: every H_i-th exchanges. `state_dict` is that of both.

    Args:
        optimizers: an optimizer or a container of some.
        outer: that joined with these optimizers, or with the first of them.
        tokens: asked at each step for the tokens since the last; None: those planned.
    """

    def __init__(self, optimizers: Any, outer: Outer, *, tokens: Callable[[], int] | None = None) -> None:
        self.optimizers_within, self.outer, self._tokens = optimizers, outer, tokens
        self.record: Record | None = None
        """Of the last step."""

    def step(self, *args: Any) -> Any:
        """An inner step, and the outer one after it."""
        found = self.optimizers_within.step(*args)
        self.record = self.outer.step(tokens=None if self._tokens is None else self._tokens())
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As within."""
        self.optimizers_within.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Of what is within, and of this side."""
        return {"inner": self.optimizers_within.state_dict(), "outer": self.outer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; before the first step."""
        self.optimizers_within.load_state_dict(state_dict["inner"])
        self.outer.load_state_dict(state_dict["outer"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizers_within, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers_within)

    def __len__(self) -> int:
        return len(self.optimizers_within)
