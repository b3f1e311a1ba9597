"""Runs that are not made."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gossamer.app.config import Config
from gossamer.app.grids.cell import Cell


def pretend(configs: Sequence[Config], **_: object) -> list[Cell]:
    """Cells as `run_cells` would return them, of runs whose loss is best at inner.lr 2e-3 and outer_momentum 0.4; a rate of 64e-3 or more
    fails."""
    cells = []
    for c in configs:
        lr, momentum = c.inner.lr or 1e-3, float(c.method.options.get("outer_momentum", 0.4))
        end = 3.0 + abs(math.log2(lr / 2e-3)) * 0.1 + (momentum - 0.4) ** 2 + c.seed * 0.01
        curve = [(1000.0 * k, 10.0 * k, 8.0 - (8.0 - end) * k / 10) for k in range(1, 11)]
        summary = {
            "final_loss": end, "wall_s": 100.0, "utilisation": {"mean": 0.5, "workers": [0.5] * 4},
            "workers": 4, "rounds": 45, "exact_zeros": 0.0,
            "straggler_idle": {"mean": 0.1, "workers": [0.1] * 4}, "network_idle": {"mean": 0.4, "workers": [0.4] * 4},
            "bytes_sent": [1000] * 4, "bytes_charge": 10.0,
        }  # fmt: skip
        failed = lr >= 64e-3
        cells.append(Cell(c, f"{len(cells):016x}", failed="it diverged") if failed else Cell(c, f"{len(cells):016x}", summary, curve))
    return cells
