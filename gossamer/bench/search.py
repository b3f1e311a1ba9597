"""Tuning with few trials and no favourites: every row walks the same printed grid by the same rule, with the same number of trials.

The rule is coordinate descent on a lattice. Of the present best, both neighbours along one axis are tried; while one is better, the walk
goes on in that direction; then the next axis has its turn. It ends when every neighbour of the best has been tried, or the trials are
used up. A best value is bracketed when both its neighbours have been tried and are worse; a value at the end of its axis is an edge,
and is reported.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gossamer.core.errors import BadInput

Value: TypeAlias = float | int | str
Grid: TypeAlias = Mapping[str, tuple[Value, ...]]
"""Values to choose from, in order, by the dotted key of the configuration that takes them."""
Point: TypeAlias = tuple[int, ...]
"""One place of each axis."""
Asked: TypeAlias = list[dict[str, Value]]


@dataclass(frozen=True)
class Found:
    """What a search ended with."""

    best: dict[str, Value]
    loss: float
    trials: int
    edges: tuple[str, ...]
    """Axes whose best value is the first or last of the grid."""
    open: tuple[str, ...]
    """Axes on which a neighbour of the best value was not tried any more."""


def search(grid: Grid, start: Mapping[str, Value], trials: int) -> Generator[Asked, Sequence[float], Found]:
    """Coordinate descent from `start`. Yields lists of settings to try; is sent their losses (infinity where a run failed).

    >>> walk = search({"x": (0, 1, 2, 3, 4)}, {"x": 1}, trials=9)
    >>> asked = next(walk)
    >>> try:
    ...     while True:
    ...         asked = walk.send([(point["x"] - 3) ** 2 for point in asked])
    ... except StopIteration as end:
    ...     print(end.value.best, end.value.trials, end.value.edges)
    {'x': 3} 5 ()

    Raises:
        BadInput: a start that is not on the grid, or no trials.
    """
    keys = list(start)
    for key in keys:
        if key not in grid or start[key] not in grid[key]:
            raise BadInput(f"the search starts at {key} = {start[key]!r}, which is not on the grid {dict(grid).get(key)}")
    if trials < 1:
        raise BadInput(f"a search of {trials} trials finds nothing: expected 1 or more")
    best: Point = tuple(grid[key].index(start[key]) for key in keys)
    losses: dict[Point, float] = {}

    def settings(point: Point) -> dict[str, Value]:
        return {key: grid[key][k] for key, k in zip(keys, point, strict=True)}

    def neighbours(axis: int) -> list[Point]:
        """Of the best along one axis, on the grid."""
        return [(*best[:axis], k, *best[axis + 1 :]) for k in (best[axis] - 1, best[axis] + 1) if 0 <= k < len(grid[keys[axis]])]

    def untried(axis: int) -> list[Point]:
        return [point for point in neighbours(axis) if point not in losses][: trials - len(losses)]

    def take(points: list[Point], found: Sequence[float]) -> None:
        nonlocal best
        for point, loss in zip(points, found, strict=True):
            losses[point] = loss if math.isfinite(loss) else math.inf
        best = min(losses, key=lambda point: (losses[point], point != best))

    take([best], (yield [settings(best)]))
    while any(untried(axis) for axis in range(len(keys))):
        for axis in range(len(keys)):
            while points := untried(axis):
                take(points, (yield [settings(point) for point in points]))
    return Found(
        best=settings(best),
        loss=losses[best],
        trials=len(losses),
        edges=tuple(key for axis, key in enumerate(keys) if len(neighbours(axis)) < 2),
        open=tuple(key for axis, key in enumerate(keys) if any(point not in losses for point in neighbours(axis))),
    )
