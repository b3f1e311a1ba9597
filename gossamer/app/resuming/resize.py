"""A run that goes on with another number of workers, from a checkpoint: what changes in its folder.

The run keeps its planned tokens: rounds follow from the work of the new fleet, and the schedule goes on where it was. No checkpoint is
rewritten: `checkpoint.resized` in config.toml says since when the workers are others, and each reads the old checkpoint by that
(gossamer.app.resuming.resized).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.app.config import dump, override
from gossamer.app.config import load as read_config
from gossamer.app.early import MAY_CHANGE, key_of
from gossamer.app.folder import RunFolder, no_checkpoint, write_atomically
from gossamer.app.job import Job, resolve
from gossamer.app.lock import alone_in
from gossamer.app.resuming.rollback import copy_records, new_aside
from gossamer.app.settings import Config
from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import checkpoint

_UNIFORM = re.compile(r"uniform-\d+")
_OF_WORKERS = ("run_id", "steps", "batch")
"""Of facts.json, what changes with them."""
_BEFORE = "before"
"""In facts.json while the workers are being changed: what those were."""


def resize(run: RunFolder, job: Job, workers: int, sets: Sequence[str]) -> Job:
    """The job of a run that goes on with so many workers; its folder says so from now on.

    Args:
        sets: settings that change with it: the fleet, where it is not a uniform one, and `checkpoint.resize`.

    Raises:
        BadInput: it has come to its end, has no checkpoint, or is a run that cannot; or the policy is "refuse".
    """
    config = _changed(run, job, workers, sets)
    if config.checkpoint.resize == "refuse":
        raise BadInput(
            f"--workers {workers}, but the run in {run.path} has {job.n}: resume it with --workers {job.n}; or, to go on with {workers} "
            "from the mean of its workers, add --set checkpoint.resize=mean"
        )
    if run.finished:
        raise BadInput(f"the run in {run.path} has come to its end: there is nothing to go on with, with {workers} workers or any number")
    if job.servers:
        raise BadInput(f"{job.method.name} has servers, whose regions the workers are of: resume it with --workers {job.n}")
    round = checkpoint.latest(run.checkpoints)
    if round is None:
        raise no_checkpoint(run.path)
    manifest = checkpoint.read_manifest(run.checkpoints, round)
    _check_at_rest(run, job, manifest)
    before = job.config.checkpoint.resized
    if before and before[-1][0] == round:  # nothing has come of the last change: the checkpoint is still of the workers before it
        *before, entry = before
    else:
        entry = [round, job.n, manifest.tokens, job.method.total_tokens]
    new = resolve(override(config, {"checkpoint.resized": [*before, entry]}))
    if new.n != workers:
        raise BadInput(f"--workers {workers} does not fit fleet {new.fleet.name}, which has {new.n}: give --set fleet.name=ANOTHER")
    with alone_in(run.path):
        _record(run, job, new, round)
    return new


def _changed(run: RunFolder, job: Job, workers: int, sets: Sequence[str]) -> Config:
    """The configuration with the new fleet."""
    for text in sets:
        if key_of(text) not in MAY_CHANGE:
            raise BadInput(
                f"--resume {run.path} goes on with the configuration in that folder: of --set, only {', '.join(MAY_CHANGE)} may be given"
            )
    config = read_config([run.path / "config.toml"], sets)
    if config.fleet == job.config.fleet and _UNIFORM.fullmatch(config.fleet.name):
        config = override(config, {"fleet.name": f"uniform-{workers}"})
    if config.fleet.workers == job.config.fleet.workers is not None:
        config = override(config, {"fleet.workers": workers})
    return config


def _check_at_rest(run: RunFolder, job: Job, manifest: checkpoint.Manifest) -> None:
    first = min(manifest.parts)
    state = checkpoint.read_part(run.checkpoints, manifest.round, first).state
    if any(stream.pending for stream in state.streams):
        raise BadInput(
            f"the checkpoint of round {manifest.round} in {run.path} has an exchange in flight between its {job.n} workers, as overlap has "
            f"it: resume with --workers {job.n}"
        )


def _record(run: RunFolder, old: Job, new: Job, round: int) -> None:
    """The folder as it was is put aside (but for checkpoints, which stay); configuration and facts are those of now.

    It has happened once the configuration is written. The facts come first, and until then hold what they were, too: broken off at any
    point, the run goes on with the workers that it had, and the same command, or one with another number, does what it would have done.
    """
    to = new_aside(run.path)
    write_atomically(to / "from.json", json.dumps({"round": round, "workers": old.n}) + "\n")
    facts = settled(run, old)
    was = {key: facts.get(key) for key in _OF_WORKERS}
    try:
        copy_records(run.path, to)
        shutil.copyfile(run.path / "config.toml", to / "config.toml")
    except OSError as error:
        raise RunFailed(f"{to} cannot be written ({error.strerror}): free some space, and resume again") from error
    _write(to, facts)
    plan = new.method.plan
    facts |= dict(zip(_OF_WORKERS, (f"{new.run_id:016x}", list(plan.steps), list(plan.batch)), strict=True))
    _write(run.path, facts | {_BEFORE: was})
    write_atomically(run.path / "config.toml", dump(new.config))
    _write(run.path, facts)


def settled(run: RunFolder, job: Job) -> dict[str, Any]:
    """The facts of a run; where a change of its workers was broken off, those that go with the configuration that is there.

    Raises:
        BadInput: the file is missing or damaged.
    """
    facts = run.facts()
    was = facts.pop(_BEFORE, None)
    return facts | was if isinstance(was, dict) and was.get("run_id") == f"{job.run_id:016x}" else facts


def settle(run: RunFolder, job: Job) -> dict[str, Any]:
    """As `settled`, and the folder has them.

    Raises:
        BadInput: as there, or another process runs what is in the folder.
    """
    facts = settled(run, job)
    if facts != run.facts():
        with alone_in(run.path):
            _write(run.path, facts)
    return facts


def _write(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / "facts.json", json.dumps(facts, indent=2) + "\n")
