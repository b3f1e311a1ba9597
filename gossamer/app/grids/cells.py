"""Results as cells: one small JSON file for each configuration that has been run, named by a hash of it. A cell is run once, whoever asks
for it, and kept.

    cells = run_cells([config_a, config_b], cells=Path("bench/results/cells"), work=Path("runs/work"), processes=2)
    losses = [cell.number("final_loss") for cell in cells]
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from gossamer.app.config import Config
from gossamer.app.grids.cell import Cell, cell_hash, cell_path, read_cell
from gossamer.app.grids.engines import Engine, outcomes_on
from gossamer.app.grids.pool import Attempt, Outcome, outcomes
from gossamer.app.job import Job, resolve
from gossamer.app.progress import count, duration
from gossamer.core.errors import BadInput, Stopped


def run_cells(
    configs: Sequence[Config],
    *,
    cells: Path,
    work: Path,
    processes: int = 1,
    console: Console | None = None,
    shard: tuple[int, int] = (0, 1),
    keep: bool = False,
    engine: Engine | None = None,
) -> list[Cell]:
    """The cells of `configs`, in their order. What is not there yet is simulated first; equal configurations are run once.

    Several processes may fill one folder at the same time: each cell is run by one of them. An interrupted cell goes on from the last
    checkpoint in its run folder, if it has one.

    Args:
        cells: the folder of the cells, `<hash>.json` each; made when it is missing.
        work: for the run folders, `<hash>` each. They are deleted once their cell is stored.
        processes: runs at a time, each in a process of its own; 1: in this one, one after another.
        console: where the budget and the progress are told; None: nowhere.
        shard: (k, n) with 0 <= k < n: runs only every n-th of the missing cells, so that n machines can share the work.
        keep: keep the run folders, traces and all.
        engine: runs them instead, on other machines; `cells` and `work` are on storage that those share.

    Raises:
        BadInput: a configuration that cannot work, a damaged cell.
        Stopped: Ctrl-C; finished cells are kept.
    """
    if not 0 <= shard[0] < shard[1]:
        raise BadInput(f"shard is {shard}: expected (k, n) with 0 <= k < n")
    jobs = [resolve(config) for config in configs]
    texts: dict[str, str] = {}
    marks = [cell_hash(job, texts) for job in jobs]
    by_mark: dict[str, Job] = {}
    for mark, job in zip(marks, jobs, strict=True):
        by_mark.setdefault(mark, job)
    mine = set(sorted(by_mark)[shard[0] :: shard[1]])
    there = {mark: cell for mark, job in by_mark.items() if (cell := read_cell(cells, mark, job.config)) is not None}
    todo = {mark: job for mark, job in by_mark.items() if mark in mine and mark not in there}
    if console:
        console.print(budget(by_mark, there, todo, cells, processes) + (f", on {engine.name}" if engine else ""), markup=False)
    unkept: dict[str, str] = {}
    if todo:
        _prepare(list(todo.values()), cells, work)
        unkept = _run(todo, cells, work, processes, console, keep, engine)
    elif engine:
        engine.close()
    found = {mark: read_cell(cells, mark, job.config) for mark, job in by_mark.items()}
    return [
        _named(found[mark] or Cell(job.config, mark, failed=unkept.get(mark)), job.config) for mark, job in zip(marks, jobs, strict=True)
    ]


def _prepare(jobs: Sequence[Job], cells: Path, work: Path) -> None:
    """Folders, and the tokens, made once before all processes ask for them."""
    for folder in (cells, work):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"the folder {folder} cannot be made ({error.strerror}): choose another, where you may write") from error
    for job in {(job.config.data, job.config.plan.sequence): job for job in jobs}.values():
        job.corpus()


def _run(
    todo: Mapping[str, Job], cells: Path, work: Path, processes: int, console: Console | None, keep: bool, engine: Engine | None
) -> dict[str, str]:
    """Runs `todo`. Returns what went wrong where no cell says it."""
    begun_s, done, tokens = time.monotonic(), 0, 0
    total = sum(map(_tokens, todo.values()))
    unkept: dict[str, str] = {}
    watch = console is not None and console.is_terminal and processes == 1 and engine is None
    attempts = [Attempt(mark, job.config, cells, work, keep) for mark, job in todo.items()]
    try:
        with closing(outcomes_on(engine, attempts) if engine else outcomes(attempts, processes, quiet=not watch)) as ended:
            for attempt, outcome in ended:
                job = todo[attempt.mark]
                done, tokens = done + 1, tokens + _tokens(job)
                if outcome.kind == "error":
                    unkept[attempt.mark] = outcome.message
                if console:
                    spent_s = time.monotonic() - begun_s
                    rate = f"{count(tokens / spent_s)} tokens/s" if spent_s > 0 else ""
                    left = f", {duration(spent_s / tokens * (total - tokens))} left" if done < len(todo) else ""
                    console.print(f"{done} of {len(todo)}: {_title(job)}, {_said(cells, attempt, outcome)}; {rate}{left}", markup=False)
    except (KeyboardInterrupt, Stopped):
        kept = sum(cell_path(cells, mark).is_file() for mark in todo)
        raise Stopped(
            f"interrupted: {kept} of the {len(todo)} cells that were missing are done and kept in {cells}; "
            "the same command goes on with the rest"
        ) from None
    return unkept


def _said(cells: Path, attempt: Attempt, outcome: Outcome) -> str:
    """How a cell came out, in a few words."""
    cell = read_cell(cells, attempt.mark, attempt.config)
    if outcome.kind == "error" or cell is None or cell.failed:
        return f"failed: {outcome.message or (cell.failed if cell else '')}"
    loss = cell.number("final_loss")
    return ("no finite loss" if loss is None else f"loss {loss:.4f}") + f" in {duration(cell.seconds or 0.0)}"


def _title(job: Job) -> str:
    return f"{job.title}, seed {job.config.seed}"


def _tokens(job: Job) -> int:
    return job.method.total_tokens


def budget(by_mark: Mapping[str, Job], there: Mapping[str, Cell], todo: Mapping[str, Job], cells: Path, processes: int) -> str:
    """What is about to be spent, in a line: cells, tokens, and the time by that of cells of the same model and sequence length."""
    said = f"{len(by_mark)} cell{'s' * (len(by_mark) != 1)} ({len(there)} cached)"
    other = len(by_mark) - len(there) - len(todo)
    if other:
        said += f", {other} of other shards"
    if not todo:
        return f"{said}: nothing to run"
    total = sum(map(_tokens, todo.values()))
    each = {_tokens(job) for job in todo.values()}
    size = f"{count(total)} tokens in all" if len(each) > 1 else f"{count(each.pop())} tokens"
    said += f": {len(todo)} run{'s' * (len(todo) != 1)} x {size}" if " in all" not in size else f": {len(todo)} runs, {size}"
    rates = _rates([*there.values(), *_others(cells, there)])
    if any(_kind(job.config) not in rates for job in todo.values()):
        return f"{said}; how long that takes is not known before one of the kind is done"
    total_s = sum(_tokens(job) * rates[_kind(job.config)] for job in todo.values())
    return f"{said}, about {duration(total_s / min(processes, len(todo)))}" + (f" with {processes} at a time" if processes > 1 else "")


def _kind(config: Config) -> tuple[str, int]:
    """What the time of a token depends on most."""
    return json.dumps(config.model.model_dump(), sort_keys=True), config.plan.sequence


def _others(cells: Path, known: Mapping[str, Cell]) -> list[Cell]:
    """Cells of other grids in the folder; what cannot be read is left out."""
    found = []
    for file in sorted(cells.glob("*.json")) if cells.is_dir() else ():
        if file.stem not in known:
            try:
                data = json.loads(file.read_text(encoding="utf-8"))
                cell = read_cell(cells, file.stem, Config.model_validate(data["config"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if cell is not None:
                found.append(cell)
    return found


def _rates(cells: Sequence[Cell]) -> dict[tuple[str, int], float]:
    """Seconds per token by kind."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for cell in cells:
        tokens = cell.number("tokens")
        if tokens and cell.seconds:
            seconds, so_far = sums.get(_kind(cell.config), (0.0, 0.0))
            sums[_kind(cell.config)] = (seconds + cell.seconds, so_far + tokens)
    return {kind: seconds / tokens for kind, (seconds, tokens) in sums.items()}


def _named(cell: Cell, config: Config) -> Cell:
    """Under the name that a configuration gives it: names are no part of the hash."""
    summary = cell.summary and {**cell.summary, "name": config.name or cell.summary["method"]}
    return dataclasses.replace(cell, config=config, summary=summary)
