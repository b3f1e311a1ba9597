"""A study: rows that share data, model, fleet and tokens, tuned side by side and then run with paired seeds. Every run is a cached cell."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from gossamer.app.config import Config, override, parse
from gossamer.app.grids.cell import Cell
from gossamer.app.grids.cells import run_cells
from gossamer.bench.curve import Curve, time_to
from gossamer.bench.search import Asked, Found, Grid, Value, search


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    key: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys on top of the study's base."""
    start: Mapping[str, Value] = field(default_factory=dict)
    """The axes that are tuned, and where the search begins. Empty: not tuned."""
    like: str = ""
    """Takes the tuned values of this row, where it is not tuned itself."""
    by_time: bool = False
    """Tuned for the time to the target, not for the final loss."""


@dataclass(frozen=True)
class Study:
    """What all rows share, and how they are run.

    Args:
        base: the configuration, nested as in TOML.
        grid: values per dotted key; the same for all rows.
        trials: of each tuned row at most, on `tune_seed`.
        seeds: of the reported runs; paired over the rows, and none of them the one that was tuned on.
        data: items of public tasks on disk, for a bench that evaluates models.
    """

    name: str
    base: Mapping[str, Any]
    grid: Grid
    trials: int
    tune_seed: int
    seeds: tuple[int, ...]
    cells: Path
    work: Path
    processes: int = 1
    console: Console | None = None
    data: Path | None = None

    def facts(self) -> dict[str, Any]:
        """What was fixed before any run, for the result file."""
        return {
            "base": dict(self.base),
            "grid": {key: list(values) for key, values in self.grid.items()},
            "trials": self.trials,
            "tune_seed": self.tune_seed,
            "seeds": list(self.seeds),
        }

    def config(self, row: Row, tuned: Mapping[str, Value], seed: int) -> Config:
        """The run of a row."""
        values = {**row.settings, **tuned, "seed": seed, "name": row.title}
        return override(parse(self.base), values)

    def run(self, configs: Sequence[Config]) -> list[Cell]:
        """The cells of `configs`, from the cache or run now."""
        return run_cells(configs, cells=self.cells, work=self.work, processes=self.processes, console=self.console)

    def tune(self, rows: Sequence[Row], target: float | None = None) -> dict[str, Found]:
        """Searches for all rows at once, so that all cores have work. `target`: the loss for rows tuned by time."""
        walks: dict[str, Generator[Asked, Sequence[float], Found]] = {
            r.key: search(self.grid, r.start, self.trials) for r in rows if r.start
        }
        by_key = {r.key: r for r in rows}
        asked = {key: next(walk) for key, walk in walks.items()}
        found: dict[str, Found] = {}
        while asked:
            self._say(f"tuning: {sum(map(len, asked.values()))} runs of {len(asked)} rows")
            jobs = [(key, point) for key, points in asked.items() for point in points]
            cells = self.run([self.config(by_key[key], point, self.tune_seed) for key, point in jobs])
            scores: dict[str, list[float]] = {key: [] for key in asked}
            for (key, _), cell in zip(jobs, cells, strict=True):
                scores[key].append(self.score(by_key[key], cell, target))
            for key in list(asked):
                try:
                    asked[key] = walks[key].send(scores[key])
                except StopIteration as end:
                    found[key] = end.value
                    del asked[key]
        return found

    def score(self, row: Row, cell: Cell, target: float | None) -> float:
        """What is made small: the final loss in nats, or the seconds to the target; infinity for a run that failed or never got there."""
        if cell.summary is None:
            return float("inf")
        if row.by_time and target is not None:
            found = time_to(Curve.of(cell), target)
            return float("inf") if found is None else found
        loss = cell.summary["final_loss"]
        return float("inf") if loss is None else float(loss)

    def _say(self, text: str) -> None:
        if self.console:
            self.console.print(text, highlight=False)


def settings_of(row: Row, rows: Mapping[str, Row], found: Mapping[str, Found]) -> dict[str, Value]:
    """The tuned values that a row runs with: its own, or those of the row that it is like, as far as it has a use for them."""
    if row.key in found:
        return dict(found[row.key].best)
    return dict(settings_of(rows[row.like], rows, found)) if row.like else {}
