"""`gossamer bench NAME`: says what it will spend, runs what is missing, and writes results, tables and figures."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from gossamer.app.folder import write_atomically
from gossamer.app.progress import count, duration
from gossamer.bench import geomesh, geomesh_rows, tables
from gossamer.bench.figures import draw
from gossamer.bench.study import Study
from gossamer.core.errors import BadInput

NAMES = ("geomesh",)


def run(name: str, *, jobs: int, cells: Path, results: Path, docs: Path) -> None:
    """Runs the bench called `name`. What is cached is not run again, so a second call takes seconds and one that was stopped goes on.

    Args:
        jobs: runs at a time.
        cells: the folder of cached runs.
        results: `<name>.json` is written here.
        docs: the tables of `<name>.md` in this folder, and of the README.md beside it, are filled in where they are marked; figures go to
            its `figures`.

    Raises:
        BadInput: an unknown bench.
        Stopped: Ctrl-C; finished runs are kept.
        RunFailed: a row that the others are measured against failed.
    """
    if name not in NAMES:
        raise BadInput(f"there is no bench {name!r}: expected {', '.join(NAMES)}")
    console = Console()
    study = Study(
        name=name,
        base=geomesh_rows.BASE,
        grid=geomesh_rows.GRID,
        trials=geomesh_rows.TRIALS,
        tune_seed=geomesh_rows.TUNE_SEED,
        seeds=geomesh_rows.SEEDS,
        cells=cells,
        work=Path("runs") / "bench",
        processes=jobs,
        console=console,
    )
    begun_s = time.monotonic()
    runs, tokens = geomesh.budget(study)
    console.print(f"bench {name}: at most {runs} runs, {count(tokens)} tokens; two hours on two cores when none is cached", highlight=False)
    found = geomesh.bench(study)
    write_result(results / f"{name}.json", found)
    pages = [page for page in (docs / f"{name}.md", docs.parent / "README.md") if page.is_file()]
    for page in pages:
        write_atomically(page, tables.fill(page.read_text(encoding="utf-8"), found))
    figures = draw(found, docs / "figures", name)
    console.print(Markdown(tables.main_table(found)))
    written = ", ".join(map(str, (results / f"{name}.json", *pages, *figures)))
    console.print(f"written in {duration(time.monotonic() - begun_s)}: {written}", highlight=False)


def write_result(path: Path, found: Mapping[str, Any]) -> None:
    """The result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
