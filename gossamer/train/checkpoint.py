"""Checkpoints: atomic, resumable, verified.

    checkpoints/
      round-000012/
        worker-0/rank-0.safetensors      one part a rank of each worker; of several ranks, each its rows of each tensor
        worker-1/rank-0.safetensors
        worker-1/rank-1.safetensors
        manifest.json                    round, tokens, every part and its SHA-256; written last, so a round with a manifest is whole

A worker may go on with another number of ranks: the rows of its parts are put together and cut anew. The folder of a worker is a checkpoint
of torch.distributed.checkpoint (gossamer.train.parts).

A part is written under another name, flushed to the disk and renamed, so that it is there whole or not at all. Only rounds with a manifest
count, and `latest` hashes their parts before it believes them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import parts as files
from gossamer.train.packing import unpack_state
from gossamer.train.parts import FORMAT, Staged, put, replacing
from gossamer.train.recut import ALONE, Place, cut_anew
from gossamer.worker.state import State

_CPU = torch.device("cpu")
MANIFEST = "manifest.json"
_ROUND = re.compile(r"round-(\d{6,})")
_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """What `read_part` gives back."""

    state: State
    body: dict[str, Any]
    extra: dict[str, Any]


class File(NamedTuple):
    """One part of a closed checkpoint."""

    name: str
    """Its path in the folder of the round."""
    sha256: str


class Manifest(NamedTuple):
    """A closed checkpoint."""

    round: int
    tokens: int
    """Planned global tokens of the completed rounds."""
    parts: dict[int, tuple[File, ...]]
    """Worker -> its part, that of each rank where it has several."""
    extra: dict[str, Any]


def stage(
    folder: Path,
    round: int,
    worker: int,
    state: State,
    body: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    place: Place = ALONE,
    *,
    copy: bool = True,
) -> Staged:
    """One worker's part of round `round`, to be written by `gossamer.train.parts.put`; its SHA-256 is for `close`.

    Args:
        folder: the run's `checkpoints` folder.
        body: what the body's `state` gave: tensors, and values that JSON holds.
        extra: values that JSON holds.
        place: which rank this is, where the worker has several; the tensors are its rows then.
        copy: the state may change before it is written.
    """
    return files.stage(part_path(folder, round, worker, place), round, worker, state, body, extra or {}, place, copy=copy)


def write_part(
    folder: Path,
    round: int,
    worker: int,
    state: State,
    body: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    place: Place = ALONE,
) -> str:
    """`stage` and `put` in one: writes a part now, and returns its SHA-256.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    return put(stage(folder, round, worker, state, body, extra, place, copy=False))


def read_part(folder: Path, round: int, worker: int, device: torch.device = _CPU, place: Place = ALONE) -> Part:
    """One worker's part of a closed round, verified against the manifest. Bit for bit what was written.

    Args:
        device: where the trees of the state come to be: that of the worker's model. Packets, and what the body kept, are on the CPU.
        place: the rank that asks, of as many as the worker has now. They may have been more or fewer.

    Raises:
        RunFailed: no such round or worker, or a damaged part.
        BadInput: the rank count has changed while an exchange was in flight.
    """
    found = parts_of(folder, read_manifest(folder, round), worker)
    if len(found) == place.ranks:
        path, sha = found[place.rank]
        about, tensors = files.read(path, round, worker, sha)
    else:
        about, tensors = cut_anew([files.read(path, round, worker, sha) for path, sha in found], place)
    values = about["body"]["values"]
    body = {k: values[k] if k in values else tensors[f"body/{k}"] for k in about["body"]["order"]}
    return Part(unpack_state(about["state"], tensors, device), body, about["extra"])


def parts_of(folder: Path, manifest: Manifest, worker: int) -> list[tuple[Path, str]]:
    """The parts of one worker's ranks: where they are, and their SHA-256.

    Raises:
        RunFailed: it has none.
    """
    here = round_folder(folder, manifest.round)
    if worker not in manifest.parts:
        raise RunFailed(
            f"the checkpoint of round {manifest.round} in {folder} has workers {sorted(manifest.parts)}, not worker {worker}: it is "
            f"another one's. Put its own back, or remove {here} to go on from an earlier one"
        )
    return [(here / file.name, file.sha256) for file in manifest.parts[worker]]


def close(
    folder: Path,
    round: int,
    tokens: int,
    parts: Mapping[int, str | Sequence[str]],
    keep: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the manifest, once every part is there: from now on the round counts. Then deletes what is older than the newest `keep`.

    Args:
        parts: worker -> SHA-256 as `put` returned it, or those of its ranks.
        keep: whole rounds to keep, this one included; None keeps all.

    Raises:
        RunFailed: a part is missing, or the disk cannot be written.
        BadInput: keep < 1.
    """
    if keep is not None and keep < 1:
        raise BadInput(f"checkpoints to keep: {keep}; expected at least 1, or none to keep all")
    here = round_folder(folder, round)
    named: dict[str, Any] = {}
    for worker, found in sorted(parts.items()):
        shas = [found] if isinstance(found, str) else list(found)
        paths = [part_path(folder, round, worker, Place(r, len(shas))) for r in range(len(shas))]
        if lacking := [path for path in paths if not path.is_file()]:
            raise RunFailed(f"the checkpoint of round {round} lacks the part of worker {worker}: {lacking[0]}")
        for other in set(paths[0].parent.iterdir()) - set(paths):  # of an attempt that died, or had other ranks
            other.unlink(missing_ok=True)
        several = [{"file": path.relative_to(here).as_posix(), "sha256": sha} for path, sha in zip(paths, shas, strict=True)]
        named[str(worker)] = several[0] if len(several) == 1 else {"ranks": several}
    about = {"format": FORMAT, "round": round, "tokens": tokens, "parts": named, "extra": dict(extra or {})}
    with replacing(here / MANIFEST) as scratch:
        scratch.write_text(json.dumps(about, indent=1))
    if keep is not None:
        _prune(folder, keep)


def read_manifest(folder: Path, round: int) -> Manifest:
    """The manifest of a closed round; its parts are not looked at.

    Raises:
        RunFailed: none there, or a damaged one.
        BadInput: another release wrote it.
    """
    path = round_folder(folder, round) / MANIFEST
    try:
        about = json.loads(path.read_text())
        if not isinstance(about, dict):
            raise ValueError("it is no JSON object")
        if about["format"] not in files.READS:
            raise files.foreign(path, about["format"])
        return _manifest(about, round)
    except FileNotFoundError as error:
        raise RunFailed(f"there is no whole checkpoint of round {round} in {folder}") from error
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else error
        raise RunFailed(f"{path} is damaged: {said}. Put it back, or remove {path.parent} to go on from an earlier checkpoint") from error


def _manifest(about: dict[str, Any], round: int) -> Manifest:
    """
    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is none of this round.
    """
    parts: dict[int, tuple[File, ...]] = {}
    for worker, part in about["parts"].items():
        named = tuple(File(each["file"], each["sha256"]) for each in part.get("ranks", [part]))
        own = [part_path(Path(), 0, int(worker), Place(r, len(named))).relative_to(round_folder(Path(), 0)) for r in range(len(named))]
        if about["format"] == FORMAT and [file.name for file in named] != [path.as_posix() for path in own]:
            raise ValueError(f"the parts of worker {worker} are {', '.join(file.name for file in named)}, not {', '.join(map(str, own))}")
        if not named or not all(isinstance(value, str) for file in named for value in file):
            raise ValueError(f"worker {worker} has no parts")
        parts[int(worker)] = named
    if not parts:
        raise ValueError("it has no parts of workers")
    for key, kind in (("round", int), ("tokens", int), ("extra", dict)):
        if type(about[key]) is not kind:
            raise ValueError(f"its {key} is {about[key]!r}")
    if about["round"] != round or about["tokens"] < 0:
        raise ValueError(f"it is of round {about['round']} after {about['tokens']} tokens")
    return Manifest(round, about["tokens"], parts, about["extra"])


def latest(folder: Path) -> int | None:
    """The newest round whose manifest and parts are all sound; None where there is none. A damaged one is passed over, with a warning
    that names the damage.

    Raises:
        BadInput: one is of another release, which is no damage.
    """
    for round in reversed(closed(folder)):
        with suppress(RunFailed):
            read_manifest(folder, round)
        if (found := fault(folder, round)) is None:
            return round
        _log.warning("The checkpoint of round %d is passed over: %s.", round, found)
    return None


def fault(folder: Path, round: int) -> str | None:
    """What is wrong with a round, whose parts are all read; None if nothing."""
    try:
        manifest = read_manifest(folder, round)
    except (RunFailed, BadInput) as error:
        return str(error)
    faults = (files.fault(path, sha) for worker in manifest.parts for path, sha in parts_of(folder, manifest, worker))
    return next((f for f in faults if f is not None), None)


def newest(folder: Path) -> int | None:
    """The newest round with a manifest; its parts are not looked at."""
    return max(closed(folder), default=None)


def closed(folder: Path) -> list[int]:
    """The rounds with a manifest, oldest first; their parts are not looked at."""
    return [r for r in rounds(folder) if (round_folder(folder, r) / MANIFEST).is_file()]


def rounds(folder: Path) -> list[int]:
    """Rounds with a folder, closed or not, oldest first."""
    names = (p.name for p in Path(folder).iterdir()) if Path(folder).is_dir() else ()
    return sorted(int(m[1]) for m in map(_ROUND.fullmatch, names) if m)


def round_folder(folder: Path, round: int) -> Path:
    """Where the checkpoint of `round` lies."""
    return Path(folder) / f"round-{round:06d}"


def part_path(folder: Path, round: int, worker: int, place: Place = ALONE) -> Path:
    """Where a part is to be."""
    return round_folder(folder, round) / f"worker-{worker}" / f"rank-{place.rank}.safetensors"


def _prune(folder: Path, keep: int) -> None:
    """Deletes rounds before the oldest of the newest `keep` closed ones; younger open ones may still be being written."""
    whole = closed(folder)
    if len(whole) < keep:
        return
    oldest = whole[-keep]
    for round in rounds(folder):
        if round < oldest:
            gone = round_folder(folder, round)
            # The manifest first: a round that is half deleted must not count.
            (gone / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(gone, ignore_errors=True)
