"""`gossamer bench NAME`: says what it will spend, runs what is missing, and writes results, tables and figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown

from gossamer.app.folder import write_atomically
from gossamer.app.progress import count, duration
from gossamer.bench import (
    figures,
    gasloc,
    gasloc_figures,
    gasloc_rows,
    gasloc_tables,
    geomesh,
    geomesh_rows,
    tables,
    zeroshot,
    zeroshot_rows,
    zeroshot_tables,
)
from gossamer.bench.study import Study
from gossamer.bench.tables import Content
from gossamer.core.errors import BadInput


@dataclass(frozen=True)
class Bench:
    """One bench: what it runs, and what is made of the results."""

    study: Callable[..., Study]
    """Given cells, work, processes and console."""
    budget: Callable[[Study], tuple[int, int]]
    run: Callable[[Study], dict[str, Any]]
    tables: Mapping[str, Callable[[Content], str]]
    figures: Mapping[str, Callable[[Mapping[str, Any]], Figure]]
    shown: str
    """The table that is printed in the end."""
    page: str
    """Of the docs, without its ending."""
    takes: str
    """How long, when no run is cached."""
    evaluates: bool = False
    """Whether it asks its models questions, and so has a use for --data."""


def _study(name: str, rows: ModuleType) -> Callable[..., Study]:
    return partial(Study, name, rows.BASE, rows.GRID, rows.TRIALS, rows.TUNE_SEED, rows.SEEDS)


BENCHES: Mapping[str, Bench] = {
    "geomesh": Bench(
        _study("geomesh", geomesh_rows),
        geomesh.budget,
        geomesh.bench,
        tables.TABLES,
        figures.FIGURES,
        shown="main",
        page="geomesh",
        takes="two hours on two cores",
    ),
    "gasloc": Bench(
        _study("gasloc", gasloc_rows),
        gasloc.budget,
        gasloc.bench,
        gasloc_tables.TABLES,
        gasloc_figures.FIGURES,
        shown="gossip-many",
        page="gasloc",
        takes="four hours on two cores",
    ),
    "zeroshot": Bench(
        _study("zeroshot", zeroshot_rows),
        zeroshot.budget,
        zeroshot.bench,
        zeroshot_tables.TABLES,
        {},
        shown="zeroshot",
        page="evaluation",
        takes="ten minutes on two cores",
        evaluates=True,
    ),
}
NAMES = tuple(BENCHES)
CELLS, WORK = Path("bench/results/cells"), Path("runs/bench")


def run(name: str, *, jobs: int, cells: Path | None, results: Path, docs: Path, data: Path | None = None) -> None:
    """Runs the bench called `name`. What is cached is not run again, so a second call takes seconds and one that was stopped goes on.

    Args:
        jobs: runs at a time.
        cells: the folder of cached runs; None: CELLS.
        results: `<name>.json` is written here.
        docs: the tables of the bench's page in this folder, and of the README.md beside it, are filled in where they are marked; figures go
            to its `figures`.
        data: items of public tasks on disk, for a bench that evaluates models.

    Raises:
        BadInput: an unknown bench, or one that has no use for `data` or `cells`.
        Stopped: Ctrl-C; finished runs are kept.
        RunFailed: a row that the others are measured against failed.
    """
    if name not in NAMES:
        raise BadInput(f"there is no bench {name!r}: expected {', '.join(NAMES)}")
    bench, console = BENCHES[name], Console()
    if data and not bench.evaluates:
        raise BadInput(f"--data is for a bench that evaluates models, and {name} does not: leave it out")
    if cells and bench.evaluates:
        raise BadInput(f"--cells: {name} keeps its runs with their parameters, which cells have not, in {WORK / name}: leave it out")
    study = bench.study(cells=cells or CELLS, work=WORK, processes=jobs, console=console, data=data)
    begun_s = time.monotonic()
    runs, tokens = bench.budget(study)
    console.print(f"bench {name}: at most {runs} runs, {count(tokens)} tokens; {bench.takes} if none is cached", highlight=False)
    found = bench.run(study)
    write_result(results / f"{name}.json", found)
    pages = [page for page in (docs / f"{bench.page}.md", docs.parent / "README.md") if page.is_file()]
    for page in pages:
        write_atomically(page, tables.fill(page.read_text(encoding="utf-8"), found, bench.tables))
    drawn = figures.draw(found, docs / "figures", name, bench.figures)
    console.print(Markdown(bench.tables[bench.shown](found)))
    written = ", ".join(map(str, (results / f"{name}.json", *pages, *drawn)))
    console.print(f"written in {duration(time.monotonic() - begun_s)}: {written}", highlight=False)


def write_result(path: Path, found: Mapping[str, Any]) -> None:
    """The result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
