"""Several configurations on the same data and fleet: one table, one report."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console

from gossamer.app.config import Config, dump, load, override
from gossamer.app.folder import RunFolder, check_new
from gossamer.app.job import Job, resolve
from gossamer.app.settings.base import Section
from gossamer.app.simulate import simulate
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.real.signals import end_with_parent
from gossamer.train import checkpoint

STOPPING = "stopping: each run in progress ends after its round or the next, with a checkpoint, from which the same command goes on"
"""Said at a Ctrl-C, where a round may take minutes."""
ONE_SEED = "One seed: differences may be chance."
"""Of a table whose rows have one run each."""


def compare(jobs: Sequence[Job], out: Path, *, processes: int = 1, console: Console | None = None) -> list[Path]:
    """Simulates each job into a folder of its own under `out`. A comparison that was interrupted goes on: a run that is there is kept if
    it has finished, resumed if it has a checkpoint, and else begun again.

    Args:
        processes: runs at a time. With more than one they show no progress of their own.

    Raises:
        BadInput: jobs that cannot be compared, or folders in the way.
        RunFailed: a run could not go on.
    """
    check_comparable(jobs)
    folders = [out / name for name in folder_names(jobs)]
    for job, folder in zip(jobs, folders, strict=True):
        _check_own(job, folder)
    todo = [(job, folder) for job, folder in zip(jobs, folders, strict=True) if not RunFolder(folder).finished]
    if processes == 1 or len(todo) < 2:
        for job, folder in todo:
            _simulate(job, folder, quiet=False)
        return folders
    jobs[0].corpus()  # made once, before all processes ask for it
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool:
        running = {pool.submit(_in_a_process, job.config, folder): job for job, folder in todo}
        try:
            for number, done in enumerate(as_completed(running), start=1):
                done.result()
                if console:
                    console.print(f"{number} of {len(running)} done: {running[done].title}")
        except KeyboardInterrupt:  # of a terminal, which the runs hear too
            print(STOPPING, file=sys.stderr, flush=True)
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return folders


def _in_a_process(config: Config, folder: Path) -> None:
    _simulate(resolve(config), folder, quiet=True)


def _simulate(job: Job, folder: Path, quiet: bool) -> None:
    """One run: from its last checkpoint, where an earlier attempt left one."""
    if (folder / "config.toml").is_file():
        begun = RunFolder.existing(folder)
        if checkpoint.latest(begun.checkpoints) is not None:
            simulate(job, resume=begun, quiet=quiet)
            return
        shutil.rmtree(folder)  # an attempt that came to no checkpoint
    simulate(job, folder, quiet=quiet)


def one_seed(configs: Sequence[Config]) -> bool:
    """Whether there are several rows, and none that differs from another in its seed alone.

    >>> a, b = load(), load(sets=["method.name=diloco"])
    >>> one_seed([a, b]), one_seed([a]), one_seed([a, b, load(sets=["seed=1"])])
    (True, False, False)
    """
    rows = {dump(override(config, {"seed": 0, "name": ""})) for config in configs}
    return len(rows) == len(configs) > 1


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
                    f"{first.title} and {job.title} differ in {_difference(what, a, b)}, and a table must compare methods: set it alike"
                )
        ours, theirs = first.method.total_tokens, job.method.total_tokens
        if abs(ours - theirs) > 0.02 * ours:
            blocks = next((j.title for j in (first, job) if j.method.tiers), None)
            remedy = (
                f"more rounds, since {blocks} takes whole blocks of its own (or a smaller method.block)"
                if blocks
                else "the same plan and rounds"
            )
            raise BadInput(f"{first.title} trains on {ours:,} tokens and {job.title} on {theirs:,}: give both {remedy}")


def _difference(what: str, a: Any, b: Any) -> str:
    """The first key that differs, with both values.

    >>> _difference("clock", {"noise": 0.0, "drift": 1}, {"noise": 0.0, "drift": 2})
    'clock.drift (1 against 2)'
    """
    if isinstance(a, Fleet):
        if a.name != b.name:
            return f"fleet.name ({a.name} against {b.name})"
        return f"the fleet {a.name}, whose files are not the same"
    if isinstance(a, Section):
        a, b = a.model_dump(), b.model_dump()
    if isinstance(a, dict) and isinstance(b, dict):
        key = next(k for k in [*a, *b] if k not in a or k not in b or a[k] != b[k])
        return _difference(f"{what}.{key}", a.get(key), b.get(key))
    return f"{what} ({_short(a)} against {_short(b)})"


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def folder_names(jobs: Sequence[Job]) -> list[str]:
    """A folder name for each job: its title, numbered where titles repeat, or where it is that of the comparison's report. 50 letters at
    most, since file systems allow 255 bytes."""
    names: list[str] = []
    for job in jobs:
        base = "".join(c if c.isalnum() or c in "-_." else "-" for c in job.title.lower()[:50]).strip(".") or "run"
        name, k = base, 2
        while name in (*names, "report.html"):
            name, k = f"{base}-{k}", k + 1
        names.append(name)
    return names


def _check_own(job: Job, folder: Path) -> None:
    """Refuses a folder with something else in it.

    Raises:
        BadInput: another run's, or no run's.
    """
    if not (folder / "config.toml").is_file():
        check_new(folder)
    elif load([folder / "config.toml"]) != job.config:
        raise BadInput(f"{folder} holds a run of another configuration: choose another --out")
