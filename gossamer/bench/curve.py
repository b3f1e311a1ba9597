"""Loss against tokens and time, and what is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.app.grids.cell import Cell
from gossamer.core.errors import RunFailed


class Curve(NamedTuple):
    """The evaluations of one run, in order."""

    tokens: tuple[float, ...]
    time_s: tuple[float, ...]
    loss: tuple[float, ...]

    @classmethod
    def of(cls, cell: Cell) -> Curve:
        """From a cell.

        Raises:
            RunFailed: the cell failed, or was never evaluated.
        """
        if not cell.curve:
            raise RunFailed(f"{cell.config.name} (cell {cell.hash}) has no evaluations: see its message, or set eval.every")
        tokens, times, losses = zip(*((float(a), float(b), float(c)) for a, b, c in cell.curve), strict=True)
        return cls(tokens, times, losses)


def at(x: Sequence[float], y: Sequence[float], where: float) -> float:
    """y at `where`, on straight lines between the points; the nearest end outside.

    >>> at([1.0, 3.0], [10.0, 20.0], 2.0), at([1.0, 3.0], [10.0, 20.0], 9.0)
    (15.0, 20.0)
    """
    if where <= x[0]:
        return y[0]
    for a, b, c, d in zip(x, x[1:], y, y[1:], strict=False):
        if where <= b:
            return c + (d - c) * (where - a) / (b - a)
    return y[-1]


def _first(curve: Curve, target: float, x: Sequence[float]) -> float | None:
    """Where the loss first reaches `target`."""
    before: tuple[float, float] | None = None
    for loss, here in zip(curve.loss, x, strict=True):
        if loss <= target:
            return here if before is None else at((loss, before[0]), (here, before[1]), target)
        before = (loss, here)
    return None


def time_to(curve: Curve, target: float) -> float | None:
    """Seconds until the loss is `target` nats, on straight lines between evaluations; None if it never is.

    >>> time_to(Curve((1, 2, 3), (10.0, 20.0, 30.0), (5.0, 4.0, 3.0)), 3.5)
    25.0
    """
    return _first(curve, target, curve.time_s)


def tokens_to(curve: Curve, target: float) -> float | None:
    """Tokens until the loss is `target` nats, likewise."""
    return _first(curve, target, curve.tokens)
