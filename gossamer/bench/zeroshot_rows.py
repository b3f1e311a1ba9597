"""What `gossamer bench zeroshot` trains and asks: the rows of GeoMesh's zero-shot table, with the settings that `bench geomesh` has tuned.

Fixed before any run: the rows, the seeds, the items.
"""

from __future__ import annotations

from typing import Any

from gossamer.bench import geomesh_rows
from gossamer.bench.search import Grid
from gossamer.bench.study import Row

BASE = geomesh_rows.BASE
GRID: Grid = {}
TRIALS = 0
TUNE_SEED = geomesh_rows.TUNE_SEED
SEEDS = geomesh_rows.SEEDS

ITEMS = 1000
"""Of a task at most."""
ITEMS_SEED = 0
"""Of the embedded suite."""

TUNED: dict[str, dict[str, Any]] = {
    "diloco": {"inner.lr": 4e-3, "method.outer_lr": 0.7, "method.outer_momentum": 0.6},
    "halos": {"inner.lr": 8e-3, "method.local_lr": 6.4, "method.report_every": 4},
    "geomesh": {"inner.lr": 4e-3, "method.outer_lr": 0.5, "method.outer_momentum": 0.4},
    "adamw": {"inner.lr": 4e-3, "method.outer_lr": 1.1, "method.outer_momentum": 0.6},
}
"""As in bench/results/geomesh.json."""
TITLES = {"geomesh": "GeoMesh (Lion inside, as published)"}

ROWS: tuple[Row, ...] = tuple(
    Row(row.key, TITLES.get(row.key, row.title), {**row.settings, **TUNED[row.key]}) for row in geomesh_rows.MAIN if row.key in TUNED
)
