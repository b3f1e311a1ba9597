"""A run that goes on with another number of workers, from a checkpoint: what changes in its folder.

The run keeps its planned tokens: rounds follow from the work of the new fleet, and the schedule goes on where it was. No checkpoint is
rewritten: `checkpoint.resized` in config.toml says since when the workers are others, and each reads the old checkpoint by that
(gossamer.app.resized).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence

from gossamer.app.config import dump, override
from gossamer.app.config import load as read_config
from gossamer.app.folder import RunFolder, write_atomically
from gossamer.app.job import Job, resolve
from gossamer.app.lock import alone_in
from gossamer.app.rollback import copy_records, new_aside
from gossamer.app.settings import Config
from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import checkpoint

_UNIFORM = re.compile(r"uniform-\d+")
_MAY_CHANGE = ("fleet.name", "fleet.workers", "checkpoint.resize")


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
        raise BadInput(f"{run.path} has no whole checkpoint to go on from: start a new run with another --out")
    manifest = checkpoint.read_manifest(run.checkpoints, round)
    _check_at_rest(run, job, manifest)
    entry = [round, job.n, manifest.tokens, job.method.total_tokens]
    new = resolve(override(config, {"checkpoint.resized": [*job.config.checkpoint.resized, entry]}))
    if new.n != workers:
        raise BadInput(f"--workers {workers} does not fit fleet {new.fleet.name}, which has {new.n}: give --set fleet.name=ANOTHER")
    with alone_in(run.path):
        _record(run, new, entry)
    return new


def _changed(run: RunFolder, job: Job, workers: int, sets: Sequence[str]) -> Config:
    """The configuration with the new fleet."""
    for text in sets:
        if text.partition("=")[0].strip() not in _MAY_CHANGE:
            raise BadInput(
                f"--resume {run.path} goes on with the configuration in that folder: of --set, only {', '.join(_MAY_CHANGE)} may be given"
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


def _record(run: RunFolder, new: Job, entry: list[int]) -> None:
    """The folder as it was is put aside (but for checkpoints, which stay); configuration and facts are those of now."""
    to = new_aside(run.path)
    facts = run.facts()
    try:
        copy_records(run.path, to)
        for name in ("config.toml", "facts.json"):
            shutil.copyfile(run.path / name, to / name)
    except OSError as error:
        raise RunFailed(f"{to} cannot be written ({error.strerror}): free some space, and resume again") from error
    write_atomically(to / "from.json", json.dumps({"round": entry[0], "workers": entry[1]}) + "\n")
    plan = new.method.plan
    facts |= {"run_id": f"{new.run_id:016x}", "steps": list(plan.steps), "batch": list(plan.batch)}
    write_atomically(run.path / "config.toml", dump(new.config))
    write_atomically(run.path / "facts.json", json.dumps(facts, indent=2) + "\n")
