"""The table of a grid: what takes its place, and its page."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.app.config import load
from gossamer.app.grids import grid
from gossamer.app.grids.cell import Cell
from gossamer.app.grids.grid import Row, axis


def test_the_table_of_another_grid_is_not_replaced_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {rounds: f"{rounds:016}" for rounds in (1, 2, 3)}
    monkeypatch.setattr(grid, "run_cells", lambda configs, **_: [Cell(c, marks[c.run.rounds]) for c in configs])

    def said(*rounds: int) -> bool:
        out = io.StringIO()
        rows = [Row("a", (str(n),), (load([], [f"run.rounds={n}"]),)) for n in rounds]
        axes, console = [axis("run.rounds=1,2,3")], Console(file=out, width=200)
        grid.run_grid(rows, axes, tmp_path / "out", cells=None, shard=(0, 1), jobs=1, keep=False, console=console)
        return f"the table of another grid that was in {tmp_path / 'out'} is replaced; its cells are kept in" in " ".join(
            out.getvalue().split()
        )

    assert not said(1, 2), "there was none"
    assert not said(1, 2), "it is the same"
    assert not said(1, 2, 3), "its rows are in the new one"
    assert said(1, 3) and not said(1, 3)
    (tmp_path / "out" / "grid.json").write_text("no table")
    assert not said(1)
