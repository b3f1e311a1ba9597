"""An item: what a model is asked, and what is right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One question. A model answers with the choice to which it gives the highest log-likelihood.

    Choice i is `choices[i]` after the one context; where there is a context for each, it is the one of `choices` after `contexts[i]`. One
    context and one choice: is that choice what the model would say, every token its likeliest?
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int

    @property
    def ways(self) -> int:
        """How many answers there are to choose from."""
        return max(len(self.contexts), len(self.choices))

    @property
    def kind(self) -> str:
        """Which of the three it is: the items of a task are all of one kind."""
        return "open" if self.ways == 1 else "choices" if len(self.choices) > 1 else "contexts"

    @property
    def chance(self) -> float:
        """The accuracy of a guess; 0 where there is nothing to choose from."""
        return 1.0 / self.ways if self.ways > 1 else 0.0


def fault(item: Item) -> str | None:
    """What is wrong with an item; None if nothing.

    >>> fault(Item(("a",), ("b", "c"), 2))
    'the right answer is number 2, and there are 2, counted from 0'
    """
    if min(len(item.contexts), len(item.choices)) != 1:
        return f"{len(item.contexts)} contexts and {len(item.choices)} choices: expected one of either"
    if not all(isinstance(text, str) for text in (*item.contexts, *item.choices)):
        return "a context or a choice is no text"
    if not all(text.strip() for text in item.choices):
        return "a choice is empty"
    if not 0 <= item.gold < item.ways:
        return f"the right answer is number {item.gold}, and there are {item.ways}, counted from 0"
    return None


def digest(items: Sequence[Item]) -> str:
    """SHA-256 over the items in their order: accuracies on items of equal digests can be compared item by item."""
    h = hashlib.sha256()
    for item in items:
        h.update(json.dumps([item.contexts, item.choices, item.gold], ensure_ascii=True).encode())
    return h.hexdigest()
