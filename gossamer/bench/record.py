"""What a result file keeps of rows, runs and searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gossamer.app.grids.cell import Cell
from gossamer.bench.search import Found, Value
from gossamer.bench.study import Row


def row_record(row: Row, tuned: Mapping[str, Value], cells: Sequence[Cell], of: Callable[[Cell], Mapping[str, Any]]) -> dict[str, Any]:
    """What a row came to: one entry per seed, `of` a run that ended, the reason for one that did not."""
    return {
        "title": row.title,
        "settings": dict(row.settings),
        "tuned": dict(tuned),
        "like": row.like or None,
        "cells": [cell.hash for cell in cells],
        "seeds": [
            {"seed": cell.config.seed} | ({"failed": cell.failed or "not run"} if cell.summary is None else dict(of(cell)))
            for cell in cells
        ],
    }


def found_record(found: Found) -> dict[str, Any]:
    """What a search ended with."""
    return {"best": found.best, "loss": found.loss, "trials": found.trials, "edges": list(found.edges), "open": list(found.open)}
