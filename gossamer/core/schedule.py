"""Learning-rate schedules: what multiplies the peak learning rate, as a pure function of planned *global* tokens.

Never a function of a local step count: workers take unequal numbers of steps, and a joiner or a resumed run must get the same value.
Three that you know: `Constant`, `Cosine` (warm-up, then half a cosine), `WSD` (warm-up, stable, decay).

>>> Cosine(warmup=0.1, start=0.01, floor=0.1).factor(tokens=100, total_tokens=1000)
1.0
>>> WSD(warmup=0.1, decay=0.5, start=0.0, floor=0.0).factor(tokens=750, total_tokens=1000)
0.5
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gossamer.core.errors import BadInput

T = TypeVar("T")


class Schedule(Protocol):
    """Multiplies the peak learning rate."""

    def factor(self, tokens: float, total_tokens: float) -> float:
        """The factor in [0, 1] after `tokens` of `total_tokens` planned global tokens; past the end it keeps its last value."""


@dataclass(frozen=True)
class Constant:
    """The peak learning rate throughout: factor = 1."""

    def factor(self, tokens: float, total_tokens: float) -> float:
        """1, always."""
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up from `start` to 1, then half a cosine down to `floor`.

    With p = tokens / total:  p < warmup:  start + (1 - start) p / warmup
                              else:        floor + (1 - floor) (1 + cos(pi (p - warmup) / (1 - warmup))) / 2
    """

    warmup: float = 0.1
    """Share of the total tokens, in [0, 1)."""
    start: float = 0.01
    """Factor at the first token."""
    floor: float = 0.1
    """Factor at the last token."""

    def __post_init__(self) -> None:
        _share("Cosine", "warmup", self.warmup, below_one=True)
        _share("Cosine", "start", self.start)
        _share("Cosine", "floor", self.floor)

    def factor(self, tokens: float, total_tokens: float) -> float:
        """See the formula of the class."""
        p = _progress(tokens, total_tokens)
        if p < self.warmup:
            return self.start + (1.0 - self.start) * (p / self.warmup)
        q = (p - self.warmup) / (1.0 - self.warmup)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * q))


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay: linear from `start` to 1, flat, and over the last `decay` share of the tokens linear to `floor`."""

    warmup: float = 0.05
    """Share of the total tokens, in [0, 1)."""
    decay: float = 0.2
    """Share of the total tokens at the end; warmup + decay <= 1."""
    start: float = 0.01
    """Factor at the first token."""
    floor: float = 0.0
    """Factor at the last token."""

    def __post_init__(self) -> None:
        _share("WSD", "warmup", self.warmup, below_one=True)
        _share("WSD", "decay", self.decay)
        _share("WSD", "start", self.start)
        _share("WSD", "floor", self.floor)
        if self.warmup + self.decay > 1.0:
            raise BadInput(
                f"WSD: warmup {self.warmup} + decay {self.decay} = {self.warmup + self.decay} is more than the whole run; "
                "expected at most 1: shorten one of them"
            )

    def factor(self, tokens: float, total_tokens: float) -> float:
        """See the class."""
        p = _progress(tokens, total_tokens)
        if p < self.warmup:
            return self.start + (1.0 - self.start) * (p / self.warmup)
        left = 1.0 - p
        if left < self.decay:
            return self.floor + (1.0 - self.floor) * (left / self.decay)
        return 1.0


SCHEDULES: Mapping[str, type[Constant] | type[Cosine] | type[WSD]] = {"constant": Constant, "cosine": Cosine, "wsd": WSD}
"""The built-in schedules by the name that a configuration uses."""


def schedule_named(name: str, options: Mapping[str, Any] | None = None) -> Schedule:
    """The schedule called `name` with fields `options`.

    >>> schedule_named("cosine", {"warmup": 0.05})
    Cosine(warmup=0.05, start=0.01, floor=0.1)

    Raises:
        BadInput: an unknown name or field, or a value out of range.
    """
    made: Schedule = named("schedule", SCHEDULES, name, options)
    return made


def named(what: str, table: Mapping[str, type[T]], name: str, options: Mapping[str, Any] | None = None) -> T:
    """Makes the dataclass that `table` lists as `name`; an unknown name or field is refused with the nearest known one.

    Raises:
        BadInput: unknown name, unknown or missing field.
    """
    if name not in table:
        raise BadInput(f"{what} {name!r} is not known; expected one of {', '.join(sorted(table))}{_nearest(name, table)}")
    cls = table[name]
    given = dict(options or {})
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in given:
        if key not in fields:
            raise BadInput(f"{what} {name!r} has no setting {key!r}; it has {', '.join(fields) or 'none'}{_nearest(key, fields)}")
    missing = [
        f.name
        for f in fields.values()
        if f.name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise BadInput(f"{what} {name!r} needs {', '.join(missing)}: add it to the configuration")
    return cls(**given)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _progress(tokens: float, total_tokens: float) -> float:
    if not (total_tokens > 0 and math.isfinite(total_tokens)):
        raise BadInput(f"total_tokens is {total_tokens}; expected a positive number: give the run a token budget or a number of rounds")
    return min(1.0, max(0.0, tokens / total_tokens))


def _share(owner: str, field: str, value: float, below_one: bool = False) -> None:
    ok = 0.0 <= value < 1.0 if below_one else 0.0 <= value <= 1.0
    if not ok:
        raise BadInput(f"{owner}: {field} is {value}; expected a share from 0 to 1{' (less than 1)' if below_one else ''}")
