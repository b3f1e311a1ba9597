"""What a command does before it has all that it needs. torch and transformers take many seconds to load: that is said, and what cannot work
whatever they say is refused first. Nothing here, and nothing that this imports, loads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gossamer.app import corpora, fleets
from gossamer.app.config import load, override
from gossamer.app.folder import RunFolder, check_new, no_checkpoint
from gossamer.app.settings import Config
from gossamer.app.settings.options import check_named
from gossamer.app.tracking.sinks import check_loggers
from gossamer.core.errors import BadInput, RunFailed, Stopped

MAY_CHANGE = ("fleet.name", "fleet.workers", "checkpoint.resize")
"""Settings that may be given with --resume, for another number of workers."""


def is_worker() -> bool:
    """Whether this process is one worker of a run that somebody else starts (our launcher, or torchrun)."""
    return "RANK" in os.environ


@contextmanager
def loading(left: Callable[[], str] = lambda: "nothing was begun") -> Iterator[None]:
    """Says on stderr that there is nothing to see yet, where that is so; workers say nothing.

    Args:
        left: what a Ctrl-C in the block leaves behind, in words.

    Raises:
        Stopped: there was one.
    """
    if "torch" not in sys.modules and not is_worker():
        print("loading ...", file=sys.stderr, flush=True)
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"interrupted: {left()}") from None


def settings(configs: Sequence[Path], sets: Sequence[str]) -> Config:
    """The configuration, when the libraries are there that it names, and the text where that is named by its path.

    Raises:
        BadInput: something is not there, or as of `named_right` and `gossamer.app.config.load`.
    """
    config = named_right(load(configs, sets))
    check_loggers(config.log)
    corpora.check_there(config.data)
    return config


def named_right(config: Config) -> Config:
    """The configuration, when the options of its method are some.

    Raises:
        BadInput: as of `gossamer.app.settings.options.check_named`.
    """
    check_named(config.method.name, config.method.options)
    return config


def new_folder(config: Config, out: Path | None) -> Path | None:
    """The folder that a new run is given; None: its name is made of the time.

    Raises:
        BadInput: it holds something already.
    """
    path = out or (Path(config.run.out) if config.run.out else None)
    if path is not None:
        check_new(path)
    return path


def run_to_resume(run: Path, configs: Sequence[Path], command: str, world: str) -> RunFolder:
    """The folder of a run to go on with. Its configuration is the folder's own, and so is its world.

    Args:
        command: that was given.
        world: of the runs that it begins.

    Raises:
        BadInput: no folder of such a run, or one that has come to no checkpoint.
    """
    if configs:
        raise BadInput(f"--resume {run} goes on with the configuration in that folder: leave CONFIG out")
    folder = RunFolder.existing(run)
    began = folder.facts()["world"]
    if began != world:
        other = "simulate" if began == "sim" else "train"
        raise BadInput(f"the run in {run} was begun by gossamer {other}, whose clock it keeps: resume it with that, not with {command}")
    if world == "net" and not folder.finished and not (folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir())):
        raise no_checkpoint(run)
    return folder


def had_ended(run: RunFolder, round: int | None) -> str | None:
    """What to say of a run that was to go on, where it has come to its end and is not taken back to `round`: that nothing was trained."""
    if round is not None or not run.finished:
        return None
    return (
        f"the run in {run.path} has come to its end after round {run.summary().get('rounds')}: nothing was trained. For more rounds begin "
        f"a new run from its model: gossamer export {run.path} --to MODEL, then --set model.checkpoint=MODEL "
        "--set data.tokenizer=MODEL"
    )


def says_nothing_new(run: Path, config: Config, sets: Sequence[str]) -> bool:
    """Whether `sets` say what is so already: the command that has changed a run's workers is given again."""
    return all(key_of(text) in MAY_CHANGE for text in sets) and load([run / "config.toml"], sets) == config


def key_of(text: str) -> str:
    """Of `key=value`."""
    return text.partition("=")[0].strip()


def check_no_sets(run: Path, sets: Sequence[str]) -> None:
    """Raises:
    BadInput: a run that goes on is given settings.
    """
    if sets:
        raise BadInput(f"--resume {run} goes on with the configuration in that folder: leave --set out")


def check_round(resume: Path | None, round: int | None) -> None:
    """Raises:
    BadInput: a round to go back to, and no run.
    """
    if round is not None and resume is None:
        raise BadInput(f"--round {round} goes back in a run that is there: give it with --resume, or leave it out")


def workers_of(config: Config) -> int:
    """Of its fleet.

    Raises:
        BadInput: as of `gossamer.app.fleets.load`.
    """
    return fleets.load(config.fleet.name, config.fleet.workers).n


def fitted(config: Config, workers: int | None) -> Config:
    """The fleet "uniform" takes its size from --workers."""
    fits = config.fleet.name == "uniform" and config.fleet.workers is None and workers is not None
    return override(config, {"fleet.workers": workers}) if fits else config


def check_workers(config: Config, workers: int | None) -> None:
    """Whether so many local processes are the fleet of a real run.

    Raises:
        BadInput: they are more or fewer, or none were asked for.
    """
    fleet = fleets.load(config.fleet.name, config.fleet.workers)
    if workers is None and fleet.n > 1:
        raise BadInput(f"fleet {fleet.name} has {fleet.n} workers: start them here with --workers {fleet.n}, or one by one under torchrun")
    if workers is not None and workers != fleet.n:
        size = "" if config.fleet.workers is None else f" --set fleet.workers={workers}"
        raise BadInput(
            f"--workers {workers} does not fit fleet {fleet.name}, which has {fleet.n}: use --workers {fleet.n}; or, for {workers} alike, "
            f"add --set fleet.name=uniform{size}"
        )


def check_export(run: Path, to: Path) -> None:
    """Whether there is a run to export, and room for its model.

    Raises:
        BadInput: no run folder, or the other holds something already.
        RunFailed: it cannot be read.
    """
    RunFolder.existing(run)
    check_free(to)


def check_free(to: Path) -> None:
    """Whether a model's folder can be made.

    Raises:
        BadInput: it holds something already, or is a link.
        RunFailed: it cannot be read.
    """
    try:
        if to.is_symlink():
            there = "and a folder is not put in the place of one" if to.exists() else "where there is nothing"
            raise BadInput(f"{to} is a link to {to.readlink()}, {there}: remove the link, or choose another folder with --to")
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise BadInput(f"{to} exists{' and is not empty' if to.is_dir() else ', and is a file'}: choose another folder with --to")
    except OSError as error:
        raise unwritable(to, error) from error


def unwritable(to: Path, error: Exception) -> RunFailed:
    """In words."""
    said = getattr(error, "strerror", None) or error  # of a library that writes files itself, all that it says
    return RunFailed(f"{to} cannot be written ({said}): free some space, or choose another folder with --to")


def unknown_text(folder: Path) -> BadInput:
    """That the embedded suite has nothing to be made of."""
    return BadInput(
        f"the embedded suite is made of text, and {folder} does not say what it was trained on and what was held out: name a text with "
        "--text FOLDER, or --text stdlib for that of Python's own library"
    )


def check_model_folder(folder: Path, round: int | None) -> None:
    """Whether a folder holds what can be evaluated.

    Raises:
        BadInput: neither a run nor a model, or a round of what is no run.
    """
    if (folder / "config.toml").is_file():
        return
    if round is not None:
        raise BadInput(f"--round {round} is for run folders, and {folder} is none: leave it out")
    if not (folder / "config.json").is_file():
        there = "is no folder" if not folder.is_dir() else "has neither config.toml nor config.json"
        raise BadInput(f"{folder} {there}: give the folder of a run, or that of a model as gossamer export and Hugging Face write them")
