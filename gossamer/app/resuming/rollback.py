"""Going back to an earlier round of a run: what came after it is put aside, whole, and the run goes on from there.

RUN/aside/1/       what was there when a run was taken back for the first time
  from.json        {"round": the round that it was taken back to}
  checkpoints/     those of later rounds
  metrics.jsonl, trace.jsonl, workers/<i>/...      as they were, later rounds included
  summary.json, model.safetensors, consensus.json, report.html      of a run that had come to its end
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from gossamer.app.folder import RunFolder, write_atomically
from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import checkpoint, weights

ASIDE = "aside"
"""Of a run folder: what it was before it was taken back, or went on with other workers."""
_OF_THE_END = ("summary.json", weights.FILE, "consensus.json", "report.html")
_RECORDS = ("metrics.jsonl", "trace.jsonl")


def roll_back(run: RunFolder, round: int, since: int = 0) -> Path | None:
    """Makes `round` the last one of a run. Where the rest is put; None: it is that already.

    The round is read through before anything moves. The summary goes first, then checkpoints, the newest first: killed in between, the run
    is one that can be resumed, from a round that is later than it should be.

    Args:
        since: the round from which the run has its configuration of now.

    Raises:
        BadInput: no whole checkpoint of that round, a damaged one, or one of before `since`.
        RunFailed: nothing can be written there.
    """
    folder = run.checkpoints
    there = checkpoint.closed(folder)
    if round not in there:
        kept = f"the rounds that are kept are {', '.join(map(str, there))}" if there else "there is none"
        raise BadInput(f"{run.path} has no whole checkpoint of round {round} to go back to: {kept} (checkpoint.every and checkpoint.keep)")
    if round < since:
        raise BadInput(
            f"the run in {run.path} has gone on with other workers since round {since}, and round {round} is of before: go back to "
            f"{since} at most; its configuration of before is in {run.path / ASIDE}"
        )
    if (fault := checkpoint.fault(folder, round)) is not None:
        sound = ", ".join(str(r) for r in there if r != round and r >= since and checkpoint.fault(folder, r) is None)
        raise BadInput(
            f"the checkpoint of round {round} in {run.path} is no good to go back to: {fault}. Nothing has been moved; "
            + (f"those of these rounds are sound: {sound}" if sound else "no other is sound either")
        )
    later = [r for r in checkpoint.rounds(folder) if r > round]
    if not later and not run.finished:
        return None
    to = new_aside(run.path)
    write_atomically(to / "from.json", json.dumps({"round": round}) + "\n")
    try:
        for name in _OF_THE_END:
            if (run.path / name).exists():
                os.replace(run.path / name, to / name)
        copy_records(run.path, to)
        (to / folder.name).mkdir()
        for r in reversed(later):
            gone = checkpoint.round_folder(folder, r)
            os.replace(gone, to / folder.name / gone.name)
    except OSError as error:
        raise RunFailed(f"{to} cannot be written ({error.strerror}): free some space, and go back again") from error
    return to


def copy_records(run: Path, to: Path) -> None:
    """Copies the records of a run and of its workers, as far as there are any.

    Raises:
        OSError: they cannot be.
    """
    for name in _RECORDS:
        for file in [run / name, *sorted(run.glob(f"workers/*/{name}"))]:
            if file.exists():
                copy = to / file.relative_to(run)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def ended_until(run: Path) -> int:
    """The last of the rounds that had taken place in a run when it last came to its end, and that it has not been taken back from since; 0:
    none."""
    until = 0
    for path in sorted((p for p in (run / ASIDE).glob("*") if p.name.isdecimal()), key=lambda p: int(p.name)):
        try:
            round = int(json.loads((path / "from.json").read_text(encoding="utf-8"))["round"])
        except (OSError, ValueError, KeyError, TypeError):  # broken off before anything was moved
            continue
        until = round if (path / _OF_THE_END[0]).is_file() else min(until, round)
    return until


def new_aside(run: Path) -> Path:
    """A new folder in `aside`.

    Raises:
        RunFailed: it cannot be made.
    """
    numbers = [int(p.name) for p in (run / ASIDE).glob("*") if p.name.isdecimal()]
    path = run / ASIDE / str(max(numbers, default=0) + 1)
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise RunFailed(f"{path} cannot be made ({error.strerror}): free some space, or make the folder writable") from error
    return path
