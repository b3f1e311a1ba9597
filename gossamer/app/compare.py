"""Several configurations on the same data and fleet: one table, one report."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from gossamer.app.config import Config, load
from gossamer.app.folder import check_new
from gossamer.app.job import Job, resolve
from gossamer.app.simulate import simulate
from gossamer.core.errors import BadInput


def compare(jobs: Sequence[Job], out: Path, *, processes: int = 1, console: Console | None = None) -> list[Path]:
    """Simulates each job into a folder of its own under `out`. A run that is there and finished is kept, so that an interrupted
    comparison goes on where it was.

    Args:
        processes: runs at a time. With more than one they show no progress of their own.

    Raises:
        BadInput: jobs that cannot be compared, or folders in the way.
        RunFailed: a run could not go on.
    """
    check_comparable(jobs)
    folders = [out / name for name in folder_names(jobs)]
    todo = [(job, folder) for job, folder in zip(jobs, folders, strict=True) if not _finished(job, folder)]
    for _, folder in todo:
        check_new(folder)
    if processes == 1 or len(todo) < 2:
        for job, folder in todo:
            simulate(job, folder)
        return folders
    jobs[0].corpus()  # made once, before all processes ask for it
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_simulate, job.config, folder): job for job, folder in todo}
        for done in as_completed(running):
            done.result()
            if console:
                console.print(f"{running[done].title}: done")
    return folders


def _simulate(config: Config, folder: Path) -> None:
    """One run, in a process of its own."""
    simulate(resolve(config), folder, quiet=True)


def check_comparable(jobs: Sequence[Job]) -> None:
    """A comparison holds the data, the model, the fleet and the tokens equal.

    Raises:
        BadInput: naming what differs.
    """
    first = jobs[0]
    for job in jobs[1:]:
        for what, a, b in (
            ("fleet", first.fleet, job.fleet),
            ("data", first.config.data, job.config.data),
            ("model", first.config.model, job.config.model),
            ("eval.sequences", first.config.eval.sequences, job.config.eval.sequences),
            ("eval.target_perplexity", first.config.eval.target_perplexity, job.config.eval.target_perplexity),
            ("plan.sequence", first.config.plan.sequence, job.config.plan.sequence),
            ("clock", first.config.clock, job.config.clock),
        ):
            if a != b:
                raise BadInput(
                    f"{first.title} and {job.title} differ in {what} ({_short(a)} against {_short(b)}), and a table must compare methods"
                )
        ours, theirs = first.method.total_tokens, job.method.total_tokens
        if abs(ours - theirs) > 0.02 * ours:
            raise BadInput(f"{first.title} trains on {ours:,} tokens and {job.title} on {theirs:,}: give both the same plan and rounds")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def folder_names(jobs: Sequence[Job]) -> list[str]:
    """A folder name for each job: its title, numbered where titles repeat."""
    names: list[str] = []
    for job in jobs:
        base = "".join(c if c.isalnum() or c in "-_." else "-" for c in job.title.lower())
        name, k = base, 2
        while name in names:
            name, k = f"{base}-{k}", k + 1
        names.append(name)
    return names


def _finished(job: Job, folder: Path) -> bool:
    if not (folder / "summary.json").is_file():
        return False
    if load([folder / "config.toml"]) != job.config:
        raise BadInput(f"{folder} holds a run of another configuration: choose another --out")
    return True
