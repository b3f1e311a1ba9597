"""`gossamer bench zeroshot`: mean zero-shot accuracy of models that DiLoCo, HALoS and GeoMesh have trained on the same tokens, as in the
table of Shin et al. 2026.

The runs are cells like any other, but their folders are kept, since cells hold no parameters; each then has its `eval.json`. What comes out
is one result file with every answer, right or wrong, so that rows are compared item by item.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.app.grids.cell import Cell, cell_path
from gossamer.app.grids.cells import run_cells
from gossamer.app.job import resolve
from gossamer.app.zeroshot import evaluation, subject
from gossamer.app.zeroshot.tasks import TASKS
from gossamer.bench import zeroshot_rows as rows
from gossamer.bench.record import row_record
from gossamer.bench.study import Study

Answers = NDArray[np.float64]
"""[seeds, items]: 1 where the answer was right."""


def bench(study: Study) -> dict[str, Any]:
    """Runs and evaluates what is missing, and returns the content of the result file.

    Raises:
        BadInput: items cannot be had, or lm-eval is not installed.
    """
    ask = evaluation.Request(data=study.data, limit=rows.ITEMS, seed=rows.ITEMS_SEED)
    evaluation.check(ask)
    work = study.work / study.name
    configs = [study.config(row, {}, seed) for row in rows.ROWS for seed in study.seeds]
    _forget_lost(work)
    cells = run_cells(configs, cells=work / "cells", work=work, processes=study.processes, console=study.console, keep=True)
    found = {cell.hash: _evaluated(work / cell.hash, ask) for cell in cells if cell.summary is not None}
    each = {row.key: cells[k * len(study.seeds) : (k + 1) * len(study.seeds)] for k, row in enumerate(rows.ROWS)}
    asked = next(iter(found.values()))["tasks"] if found else {}
    first = resolve(configs[0])
    return {
        "study": {
            "title": f"{first.config.model.preset}, {first.method.total_tokens:,} tokens",
            "base": dict(study.base),
            "seeds": list(study.seeds),
            "items_seed": rows.ITEMS_SEED,
        },
        "tasks": {
            name: {"title": TASKS[name].title} | {key: t[key] for key in ("items", "chance", "metric", "source", "items_sha256")}
            for name, t in asked.items()
        },
        "rows": {row.key: row_record(row, {}, each[row.key], lambda cell: _seed(cell, found[cell.hash])) for row in rows.ROWS},
    }


def budget(study: Study) -> tuple[int, int]:
    """The most runs that the bench makes, and their tokens, said before the first."""
    runs = len(rows.ROWS) * len(study.seeds)
    return runs, runs * resolve(study.config(rows.ROWS[0], {}, 0)).method.total_tokens


def _forget_lost(work: Path) -> None:
    """Cells whose run folder is gone are run anew."""
    for file in (work / "cells").glob("*.json"):
        if not (work / file.stem).is_dir() and '"failed"' not in file.read_text(encoding="utf-8"):
            cell_path(work / "cells", file.stem).unlink()


def _evaluated(folder: Path, ask: evaluation.Request) -> dict[str, Any]:
    """The record of a run: what its `eval.json` has, or asked now."""
    about = subject.load(folder)
    return evaluation.kept(folder / evaluation.FILE, evaluation.evaluate(about, ask, known=folder / evaluation.FILE))


def _seed(cell: Cell, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "loss": (cell.summary or {})["final_loss"],
        "tasks": {name: {key: t[key] for key in ("accuracy", "standard_error", "correct")} for name, t in found["tasks"].items()},
    }


def answers(row: Mapping[str, Any], task: str) -> Answers:
    """Of the seeds that ended."""
    return np.array([[float(c) for c in s["tasks"][task]["correct"]] for s in row["seeds"] if "tasks" in s])


def spread(each: Sequence[Answers]) -> tuple[float, float]:
    """Mean over tasks, seeds and items, every task weighing the same, and its standard error.

    error^2 = (1 / k^2) sum_t s_t^2 / n_t + s^2 / m: s_t is the deviation, over the n_t items of task t, of their means over seeds; s that
    of the means of the m seeds. Too large rather than too small: the noise of single answers is in both terms. With one seed there is no
    second.

    >>> spread([np.array([[1.0, 0.0], [1.0, 0.0]])])
    (0.5, 0.5)
    """
    over_items = sum(float(a.mean(axis=0).var(ddof=1)) / a.shape[1] for a in each) / len(each) ** 2
    seeds = [float(m) for m in np.mean([a.mean(axis=1) for a in each], axis=0)]
    over_seeds = statistics.variance(seeds) / len(seeds) if len(seeds) > 1 else 0.0
    return statistics.mean(seeds), math.sqrt(over_items + over_seeds)


def gap(a: Mapping[str, Any], b: Mapping[str, Any], tasks: Sequence[str]) -> tuple[float, float] | None:
    """`spread` of the answers of `a` less those of `b`, paired by seed and item; None where they share no seed."""
    theirs = {s["seed"] for s in b["seeds"] if "tasks" in s}
    seeds = [s["seed"] for s in a["seeds"] if "tasks" in s and s["seed"] in theirs]
    if not seeds:
        return None
    one, other = ({"seeds": [s for s in row["seeds"] if s["seed"] in seeds]} for row in (a, b))
    return spread([answers(one, task) - answers(other, task) for task in tasks])
