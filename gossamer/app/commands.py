"""One function per command of the command line. Each checks everything before it creates anything, and whatever needs neither torch nor
transformers before these are loaded: so none of what loads them is imported at the top."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gossamer.app import early
from gossamer.app.config import Config, load
from gossamer.app.early import loading
from gossamer.app.folder import check_new, default_path
from gossamer.app.progress import still
from gossamer.core.errors import BadInput


def _console() -> Console:
    """Wide enough for a table where there is no terminal to ask."""
    found = Console(emoji=False, highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(emoji=False, highlight=False, soft_wrap=True, width=200)


def simulate(
    configs: Sequence[Path], sets: Sequence[str], *, resume: Path | None, round: int | None, out: Path | None, timing_only: bool
) -> None:
    """`gossamer simulate`."""
    early.check_round(resume, round)
    if timing_only:
        if resume or out:
            raise BadInput("--timing-only trains nothing and keeps no run folder: leave --out and --resume out")
        _time_only(early.named_right(load(configs, sets)))
        return
    ended = None
    if resume:
        run = early.run_to_resume(resume, configs, "simulate", "sim")
        early.check_no_sets(resume, sets)
        ended = early.had_ended(run, round)
        with loading():
            from gossamer.app.job import resolve
            from gossamer.app.simulate import simulate as world

            job = resolve(load([resume / "config.toml"]))
        folder = world(job, resume=run, back_to=round)
    else:
        config = early.settings(configs, sets)
        path = early.new_folder(config, out)
        with loading():
            from gossamer.app.job import resolve
            from gossamer.app.simulate import simulate as world

            job = resolve(config)
        folder = world(job, path or default_path(job.title))
    _end(folder.path, ended)


def _time_only(config: Config) -> None:
    """Clock and bytes without training."""
    with loading():
        from gossamer.app.job import resolve
        from gossamer.app.planning.forecast import simulated
        from gossamer.app.planning.plan import show

        job = resolve(config)
    if job.kills:
        raise BadInput("--timing-only has workers that live: leave clock.kill and clock.back out, or train")
    show(job, _console(), simulated(job))


def report(runs: Sequence[Path], *, out: Path | None) -> None:
    """`gossamer report`."""
    from gossamer.report import page

    if out is None and len(runs) > 1:
        raise BadInput(f"a page of {len(runs)} runs belongs to none of their folders: say where to write it, with --out FILE")
    path = page.write_page(runs, out or runs[0] / "report.html")
    _console().print(f"report: {path}")


def export(run: Path, *, to: Path, round: int | None, adapter: bool) -> None:
    """`gossamer export`."""
    early.check_export(run, to)
    with loading(lambda: "nothing was written"):
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
    config = early.named_right(load(configs, sets))
    with still("loading") as now:
        with loading():
            from gossamer.app.job import resolve
            from gossamer.app.planning import graphs
            from gossamer.app.planning.plan import plan as print_plan

            job = resolve(config)
        if topologies:
            graphs.show(job, topologies, _console())
        else:
            print_plan(job, _console(), now)


def compare(configs: Sequence[Path], sets: Sequence[str], *, base: Path | None, jobs: int, out: Path) -> None:
    """`gossamer compare`."""
    shared = [base] if base else []
    read = [early.named_right(load([*shared, config], sets)) for config in configs]
    with loading():
        from gossamer.app.grids import compare as app
        from gossamer.app.job import resolve
        from gossamer.report import page

        planned = [resolve(config) for config in read]
    folders = app.compare(planned, out, processes=jobs, console=_console())
    path = page.write_page(folders, out / "report.html")
    _show_table(folders)
    if app.one_seed(read):
        _console().print(f"{app.ONE_SEED} The same with --seeds 3 tells which are more than that.")
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
    if not grid and seeds is None:
        asked = (("--shard", shard), ("--cells", cells), ("--keep", keep), ("--engine", engine), ("--engine-option", engine_options))
        given = next(name for name, value in asked if value)
        raise BadInput(f"{given} is for grids: give --grid or --seeds too, or leave it out")
    if engine_options and engine is None:
        raise BadInput(f"--engine-option {engine_options[0]} is for an engine: give --engine too, or leave it out")
    for config in configs:
        load([base, config] if base else [config], sets)
    with loading():
        from gossamer.app.grids import engines
        from gossamer.app.grids import grid as app
    axes = [app.axis(text) for text in grid]
    part = app.shard_of(shard) if shard else (0, 1)
    rows = app.rows_of(configs, sets, axes, seeds or 1, base)
    on = engines.engine_named(engine, engine_options, jobs or None, out / "jobs") if engine else None
    app.run_grid(rows, axes, out, cells=cells, shard=part, jobs=jobs or 1, keep=keep, console=_console(), engine=on)


def _show_table(folders: Sequence[Path]) -> None:
    from gossamer.report import read, table

    console = _console()
    console.print(table.as_text([read.Run.load(f) for f in folders], console.width), markup=False)


def _end(folder: Path, ended: str | None = None) -> None:
    """The report of a run, and its line of a table. `ended`: of `early.had_ended`."""
    if ended:
        _console().print(ended, markup=False)
    _finish(folder)
    _show_table([folder])


def _finish(folder: Path) -> None:
    """The report of one run, and where it is."""
    with still("the report is made"):
        from gossamer.report import page

        path = page.write_page([folder], folder / "report.html")
    _console().print(f"report: {path}")


def train(
    configs: Sequence[Path], sets: Sequence[str], *, workers: int | None, resume: Path | None, round: int | None, out: Path | None
) -> None:
    """`gossamer train`."""
    early.check_round(resume, round)
    if early.is_worker():
        if workers is not None:
            raise BadInput(f"--workers {workers} starts processes of its own, and this is one of a started run already: leave it out")
        _one_worker(configs, sets, resume, round, out)
    elif resume:
        _go_on(resume, configs, sets, workers, round)
    else:
        config = early.fitted(early.settings(configs, sets), workers)
        early.check_workers(config, workers)
        path = early.new_folder(config, out)
        with loading(lambda: _left(path)):
            from gossamer.app.job import resolve
            from gossamer.app.train import launch_local

            job = resolve(config)
            path = path or default_path(job.title)
            folder = launch_local(job, path)
        _end(folder)


def _go_on(resume: Path, configs: Sequence[Path], sets: Sequence[str], workers: int | None, round: int | None) -> None:
    """A run with local workers, as many as before or others."""
    run = early.run_to_resume(resume, configs, "train", "net")
    config = load([resume / "config.toml"])
    before, ended = early.workers_of(config), early.had_ended(run, round)
    others = workers is not None and workers != before
    if others and round is not None:
        raise BadInput(f"--round {round} goes back with the {before} workers of the run: do that first, then go on with {workers}")
    if not others:
        if not early.says_nothing_new(resume, config, sets):
            early.check_no_sets(resume, sets)
        early.check_workers(config, workers)
    with loading(lambda: f"nothing was trained; what {resume} holds is kept"):
        from gossamer.app.job import resolve
        from gossamer.app.resuming.resize import resize
        from gossamer.app.train import launch_local

        job = resolve(config)
        if others and workers is not None:
            job = resize(run, job, workers, sets)
        folder = launch_local(job, resume, resume=True, back_to=round)
    _end(folder, ended)


def _left(path: Path | None) -> str:
    """What there is of a new run before its workers train."""
    if path is None or not (path / "config.toml").is_file():
        return "nothing was begun"
    return f"nothing was trained; {path} can be removed"


def _one_worker(configs: Sequence[Path], sets: Sequence[str], resume: Path | None, round: int | None, out: Path | None) -> None:
    """This process is one worker of a run that our launcher (which writes the report) or torchrun has started."""
    ended = None
    if resume:
        ended = early.had_ended(early.run_to_resume(resume, configs, "train", "net"), round)
        early.check_no_sets(resume, sets)
        config, path = load([resume / "config.toml"]), resume
    else:
        config = load(configs, sets)
        given = out or (Path(config.run.out) if config.run.out else None)
        if given is None:
            raise BadInput("under torchrun all workers need one run folder: give --out FOLDER, on storage that all machines share")
        path = given
    from gossamer.app.job import resolve
    from gossamer.app.train import work

    _report_of_worker_0(work(resolve(config), path, resume=resume is not None, back_to=round), ended)


def _report_of_worker_0(folder: Path, ended: str | None) -> None:
    from gossamer.net.start import STORE_ENV

    if os.environ.get("RANK") == "0" and STORE_ENV not in os.environ and (folder / "summary.json").is_file():
        if ended:
            _console().print(ended, markup=False)
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
    if early.is_worker() and workers is not None:
        raise BadInput(f"--workers {workers} starts processes of its own, and this is one of a started run already: leave it out")
    early.named_right(load(configs, sets))
    with loading(lambda: "nothing was written"):
        from gossamer.app.planning import profile as app
    ask = app.request(configs, sets, workers or 1, batches=batches, steps=steps, memory_limit_gb=memory_limit_gb, out=out)
    if workers is None:
        app.work(ask, _console())
    else:
        app.launch_local(ask, workers)


def demo(*, out: Path | None) -> None:
    """`gossamer demo`."""
    if out is not None:
        check_new(out)
    with loading():
        from gossamer.app.demo import demo as run
    run(out, _console())


def evaluate(
    folder: Path,
    *,
    tasks: str | None,
    data: Path | None,
    text: str | None,
    column: str | None,
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
    ask = evaluation.Request(names, data, text, limit, seed, batch or BATCH, column)
    evaluation.run(folder, ask, out, _console(), round=round, length=length)
