"""Several configurations on the same data and fleet: one table, one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossamer.app.config import load
from gossamer.app.folder import check_new
from gossamer.app.job import Job
from gossamer.app.simulate import simulate
from gossamer.core.errors import BadInput


def compare(jobs: Sequence[Job], out: Path, *, quiet: bool = False) -> list[Path]:
    """Simulates each job into a folder of its own under `out`. A run that is there and finished is kept, so that an interrupted
    comparison goes on where it was.

    Raises:
        BadInput: jobs that cannot be compared, or folders in the way.
    """
    check_comparable(jobs)
    names = folder_names(jobs)
    folders = [out / name for name in names]
    for job, folder in zip(jobs, folders, strict=True):
        if not _finished(job, folder):
            check_new(folder)
    for job, folder in zip(jobs, folders, strict=True):
        if not _finished(job, folder):
            simulate(job, folder, quiet=quiet)
    return folders


def check_comparable(jobs: Sequence[Job]) -> None:
    """A comparison holds the data, the model, the fleet and the tokens equal.

    Raises:
        BadInput: naming what differs.
    """
    first = jobs[0]
    for job in jobs[1:]:
        for what, a, b in (
            ("fleet.name", first.fleet.name, job.fleet.name),
            ("data", first.config.data, job.config.data),
            ("model", first.config.model, job.config.model),
            ("eval", first.config.eval, job.config.eval),
            ("clock.charge_as", first.charged_as, job.charged_as),
        ):
            if a != b:
                raise BadInput(
                    f"{first.title} and {job.title} differ in {what} ({a} against {b}), so a table of both would not compare methods"
                )
        ours, theirs = first.method.total_tokens, job.method.total_tokens
        if abs(ours - theirs) > 0.02 * ours:
            raise BadInput(f"{first.title} trains on {ours:,} tokens and {job.title} on {theirs:,}: give both the same plan and rounds")


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
