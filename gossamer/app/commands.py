"""One function per command of the command line. Each checks everything before it creates anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gossamer.app.config import load
from gossamer.app.folder import RunFolder, check_new, default_path
from gossamer.app.job import Job, resolve
from gossamer.core.errors import BadInput
from gossamer.net.start import STORE_ENV


def _console() -> Console:
    """Wide enough for a table where there is no terminal to ask."""
    found = Console(emoji=False, highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(emoji=False, highlight=False, soft_wrap=True, width=200)


def _resumed(run: Path, configs: Sequence[Path], sets: Sequence[str], command: str, world: str) -> tuple[RunFolder, Job]:
    """A run folder and its job: the configuration is the folder's own, and so is the world."""
    if configs:
        raise BadInput(f"--resume {run} goes on with the configuration in that folder: leave CONFIG out")
    folder = RunFolder.existing(run)
    _without_sets(run, sets)
    began = folder.facts()["world"]
    if began != world:
        other = "simulate" if began == "sim" else "train"
        raise BadInput(f"the run in {run} was begun by gossamer {other}, whose clock it keeps: resume it with that, not with {command}")
    return folder, resolve(load([run / "config.toml"]))


def _without_sets(run: Path, sets: Sequence[str]) -> None:
    if sets:
        raise BadInput(f"--resume {run} goes on with the configuration in that folder: leave --set out")


def _check_round(resume: Path | None, round: int | None) -> None:
    if round is not None and resume is None:
        raise BadInput(f"--round {round} goes back in a run that is there: give it with --resume, or leave it out")


def _new(configs: Sequence[Path], sets: Sequence[str], out: Path | None) -> tuple[Path, Job]:
    """The folder of a new run, not yet made, and its job."""
    job = resolve(load(configs, sets))
    path = out or (Path(job.config.run.out) if job.config.run.out else default_path(job.title))
    check_new(path)
    return path, job


def simulate(
    configs: Sequence[Path], sets: Sequence[str], *, resume: Path | None, round: int | None, out: Path | None, timing_only: bool
) -> None:
    """`gossamer simulate`."""
    from gossamer.app import simulate as world
    from gossamer.app.forecast import simulated
    from gossamer.app.plan import show

    _check_round(resume, round)
    if timing_only:
        job = resolve(load(configs, sets))
        if resume or out:
            raise BadInput("--timing-only trains nothing and keeps no run folder: leave --out and --resume out")
        if job.kills:
            raise BadInput("--timing-only has workers that live: leave clock.kill and clock.back out, or train")
        show(job, _console(), simulated(job))
        return
    if resume:
        folder, job = _resumed(resume, configs, sets, "simulate", "sim")
        world.simulate(job, resume=folder, back_to=round)
    else:
        path, job = _new(configs, sets, out)
        folder = world.simulate(job, path)
    _finish(folder.path)
    _show_table([folder.path])


def report(runs: Sequence[Path], *, out: Path | None) -> None:
    """`gossamer report`."""
    from gossamer.report import page

    if out is None and len(runs) > 1:
        raise BadInput(f"a page of {len(runs)} runs belongs to none of their folders: say where to write it, with --out FILE")
    path = page.write_page(runs, out or runs[0] / "report.html")
    _console().print(f"report: {path}")


def export(run: Path, *, to: Path, round: int | None, adapter: bool) -> None:
    """`gossamer export`."""
    from gossamer.app.export import export as write

    path = write(run, to, round, adapter=adapter)
    said = f"adapter: {path} (peft loads" if adapter else f"model: {path} (transformers, and what builds on it, load"
    _console().print(f"{said} this folder)")


def watch(run: Path, *, port: int | None, once: bool) -> None:
    """`gossamer watch`."""
    from gossamer.report.watch import watch as show

    show(run, _console(), port=port, once=once)


def trace(run: Path, *, to: Path) -> None:
    """`gossamer trace`."""
    from gossamer.report import perfetto

    _console().print(f"trace: {perfetto.export(run, to)} (open it at ui.perfetto.dev)")


def plan(configs: Sequence[Path], sets: Sequence[str], topologies: Sequence[str] = ()) -> None:
    """`gossamer plan`; with `topologies`, the graphs of these names alone."""
    from gossamer.app import graphs
    from gossamer.app.plan import plan as print_plan

    job = resolve(load(configs, sets))
    if topologies:
        graphs.show(job, topologies, _console())
    else:
        print_plan(job, _console())


def compare(configs: Sequence[Path], sets: Sequence[str], *, base: Path | None, jobs: int, out: Path) -> None:
    """`gossamer compare`."""
    from gossamer.app.compare import compare as run
    from gossamer.report import page

    shared = [base] if base else []
    planned = [resolve(load([*shared, config], sets)) for config in configs]
    folders = run(planned, out, processes=jobs, console=_console())
    path = page.write_page(folders, out / "report.html")
    _show_table(folders)
    _console().print(f"report: {path}")


def compare_grid(
    configs: Sequence[Path],
    sets: Sequence[str],
    *,
    base: Path | None,
    jobs: int,
    out: Path,
    grid: Sequence[str],
    seeds: int | None,
    shard: str | None,
    cells: Path | None,
    keep: bool,
    engine: str | None = None,
    engine_options: Sequence[str] = (),
) -> None:
    """`gossamer compare` with --grid or --seeds. `jobs` 0: one at a time, or as many as the engine has room for."""
    from gossamer.app import engines
    from gossamer.app import grid as app

    if not grid and seeds is None:
        asked = (("--shard", shard), ("--cells", cells), ("--keep", keep), ("--engine", engine), ("--engine-option", engine_options))
        given = next(name for name, value in asked if value)
        raise BadInput(f"{given} is for grids: give --grid or --seeds too, or leave it out")
    axes = [app.axis(text) for text in grid]
    part = app.shard_of(shard) if shard else (0, 1)
    rows = app.rows_of(configs, sets, axes, seeds or 1, base)
    if engine_options and engine is None:
        raise BadInput(f"--engine-option {engine_options[0]} is for an engine: give --engine too, or leave it out")
    on = engines.engine_named(engine, engine_options, jobs or None, out / "jobs") if engine else None
    app.run_grid(rows, axes, out, cells=cells, shard=part, jobs=jobs or 1, keep=keep, console=_console(), engine=on)


def _show_table(folders: Sequence[Path]) -> None:
    from gossamer.report import read, table

    console = _console()
    console.print(table.as_text([read.Run.load(f) for f in folders], console.width), markup=False)


def _finish(folder: Path) -> None:
    """The report of one run, and where it is."""
    from gossamer.report import page

    path = page.write_page([folder], folder / "report.html")
    _console().print(f"report: {path}")


def train(
    configs: Sequence[Path], sets: Sequence[str], *, workers: int | None, resume: Path | None, round: int | None, out: Path | None
) -> None:
    """`gossamer train`."""
    from gossamer.app import train as world
    from gossamer.app.resize import resize, unchanged

    _check_round(resume, round)
    if world.is_worker():
        if workers is not None:
            raise BadInput(f"--workers {workers} starts processes of its own, and this is one of a started run already: leave it out")
        _one_worker(configs, sets, resume, round, out)
        return
    if resume:
        run, job = _resumed(resume, configs, (), "train", "net")
        path = resume
        if workers is not None and workers != job.n:
            if round is not None:
                raise BadInput(f"--round {round} goes back with the {job.n} workers of the run: do that first, then go on with {workers}")
            job = resize(run, job, workers, sets)
        elif not unchanged(run, job, sets):
            _without_sets(resume, sets)
    else:
        path, job = _new(configs, [*sets, *_fitted(workers, configs, sets)], out)
    if workers is None and job.n > 1:
        raise BadInput(f"fleet {job.fleet.name} has {job.n} workers: start them here with --workers {job.n}, or one by one under torchrun")
    if workers is not None and workers != job.n:
        raise BadInput(
            f"--workers {workers} does not fit fleet {job.fleet.name}, which has {job.n}: use --workers {job.n}, or another fleet"
        )
    folder = world.launch_local(job, path, resume=resume is not None, back_to=round)
    _finish(folder)
    _show_table([folder])


def _fitted(workers: int | None, configs: Sequence[Path], sets: Sequence[str]) -> list[str]:
    """The fleet "uniform" takes its size from --workers."""
    config = load(configs, sets)
    return [f"fleet.workers={workers}"] if config.fleet.name == "uniform" and config.fleet.workers is None and workers else []


def _one_worker(configs: Sequence[Path], sets: Sequence[str], resume: Path | None, round: int | None, out: Path | None) -> None:
    """This process is one worker of a run that our launcher (which writes the report) or torchrun has started."""
    from gossamer.app import train as world

    if resume:
        _, job = _resumed(resume, configs, sets, "train", "net")
        _report_of_worker_0(world.work(job, resume, resume=True, back_to=round))
        return
    job = resolve(load(configs, sets))
    path = out or (Path(job.config.run.out) if job.config.run.out else None)
    if path is None:
        raise BadInput("under torchrun all workers need one run folder: give --out FOLDER, on storage that all machines share")
    _report_of_worker_0(world.work(job, path))


def _report_of_worker_0(folder: Path) -> None:
    if os.environ.get("RANK") == "0" and STORE_ENV not in os.environ and (folder / "summary.json").is_file():
        _finish(folder)


def profile(
    configs: Sequence[Path],
    sets: Sequence[str],
    *,
    workers: int | None,
    batches: str | None,
    steps: int,
    memory_limit_gb: float | None,
    out: Path,
) -> None:
    """`gossamer profile`."""
    from gossamer.app import profile as app
    from gossamer.app.train import is_worker

    if is_worker() and workers is not None:
        raise BadInput(f"--workers {workers} starts processes of its own, and this is one of a started run already: leave it out")
    ask = app.request(configs, sets, workers or 1, batches=batches, steps=steps, memory_limit_gb=memory_limit_gb, out=out)
    if workers is None:
        app.work(ask, _console())
    else:
        app.launch_local(ask, workers)


def demo(*, out: Path | None) -> None:
    """`gossamer demo`."""
    from gossamer.app.demo import demo as run

    run(out, _console())


def evaluate(
    folder: Path,
    *,
    tasks: str | None,
    data: Path | None,
    text: str | None,
    limit: int | None,
    seed: int,
    out: Path | None,
    round: int | None,
    length: int | None,
    batch: int | None,
) -> None:
    """`gossamer eval`."""
    from gossamer.app.zeroshot import evaluation
    from gossamer.app.zeroshot.harness import BATCH

    names = tuple(name.strip() for name in tasks.split(",") if name.strip()) if tasks else ()
    ask = evaluation.Request(names, data, text, limit, seed, batch or BATCH)
    evaluation.run(folder, ask, out, _console(), round=round, length=length)
