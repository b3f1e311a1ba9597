"""Checkpoints: atomic, resumable, verified.

    checkpoints/
      round-000012/
        worker-0.safetensors     one part a worker: tensors, and everything else as JSON in the file's own header
        worker-1.rank-0.safetensors     of a worker of several ranks, one part a rank: its rows of each tensor
        worker-1.rank-1.safetensors
        manifest.json            round, tokens, every part and its SHA-256; written last, so a round with a manifest is whole

A worker may go on with another number of ranks: the rows of its parts are put together and cut anew.

A part is written under another name, flushed to the disk and renamed, so that it is there whole or not at all. Only rounds with a manifest
count, and :func:`latest` hashes their parts before it believes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.errors import BadInput, RunFailed
from gossamer.train.packing import pack_state, unpack_state
from gossamer.train.recut import ALONE, Place, cut_anew
from gossamer.worker.state import State

FORMAT = 2
_CPU = torch.device("cpu")
MANIFEST = "manifest.json"
_ROUND = re.compile(r"round-(\d{6,})")
_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """What :func:`read_part` gives back."""

    state: State
    body: dict[str, Any]
    extra: dict[str, Any]


class Manifest(NamedTuple):
    """A closed checkpoint."""

    round: int
    tokens: int
    """Planned global tokens of the completed rounds."""
    parts: dict[int, tuple[str, ...]]
    """Worker -> SHA-256 of its part, of each rank where it has several."""
    extra: dict[str, Any]


def write_part(
    folder: Path,
    round: int,
    worker: int,
    state: State,
    body: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    place: Place = ALONE,
) -> str:
    """Writes one worker's part of round `round` and returns its SHA-256, for :func:`close`.

    Args:
        folder: the run's `checkpoints` folder.
        body: what the body's `state` gave: tensors, and values that JSON holds.
        extra: values that JSON holds.
        place: which rank this is, where the worker has several; the tensors are its rows then.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    about = {"format": FORMAT, "round": round, "worker": worker, "extra": dict(extra or {})}
    about["state"] = pack_state(state, tensors)
    about["body"] = {"order": list(body), "values": {k: v for k, v in body.items() if not isinstance(v, Tensor)}}
    tensors |= {f"body/{k}": v for k, v in body.items() if isinstance(v, Tensor)}
    path = part_path(folder, round, worker, place)
    with replacing(path) as scratch:
        save_file(apart(tensors), scratch, metadata={"gossamer": json.dumps(about)})
        sha = _sha256(scratch)
    return sha


def read_part(folder: Path, round: int, worker: int, device: torch.device = _CPU, place: Place = ALONE) -> Part:
    """One worker's part of a closed round, verified against the manifest. Bit for bit what was written.

    Args:
        device: where the trees of the state come to be: that of the worker's model. Packets, and what the body kept, are on the CPU.
        place: the rank that asks, of as many as the worker has now. They may have been more or fewer.

    Raises:
        RunFailed: no such round or worker, or a damaged part.
        BadInput: the rank count has changed while an exchange was in flight.
    """
    shas = parts_of(folder, read_manifest(folder, round), worker)
    if len(shas) == place.ranks:
        about, tensors = _read_file(part_path(folder, round, worker, place), round, shas[place.rank])
    else:
        paths = [part_path(folder, round, worker, Place(r, len(shas))) for r in range(len(shas))]
        about, tensors = cut_anew([_read_file(path, round, sha) for path, sha in zip(paths, shas, strict=True)], place)
    values = about["body"]["values"]
    body = {k: values[k] if k in values else tensors[f"body/{k}"] for k in about["body"]["order"]}
    return Part(unpack_state(about["state"], tensors, device), body, about["extra"])


def parts_of(folder: Path, manifest: Manifest, worker: int) -> tuple[str, ...]:
    """The SHA-256 of the parts of one worker's ranks.

    Raises:
        RunFailed: it has none.
    """
    if worker not in manifest.parts:
        raise RunFailed(
            f"the checkpoint of round {manifest.round} in {folder} has workers {sorted(manifest.parts)}, not worker {worker}: it is "
            f"another one's. Put its own back, or remove {round_folder(folder, manifest.round)} to go on from an earlier one"
        )
    return manifest.parts[worker]


def check_part(path: Path, round: int, sha: str) -> None:
    """That a file is what the manifest says.

    Raises:
        RunFailed: it is not, or cannot be read.
    """
    if (fault := _fault(path, sha)) is not None:
        raise RunFailed(f"the checkpoint of round {round} cannot be used: {fault}. Remove {path.parent} to go on from an earlier one")


def about_of(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """What the header of a part says beside its tensors.

    Raises:
        RunFailed: another release wrote it.
    """
    about: dict[str, Any] = json.loads(metadata["gossamer"])
    if about["format"] != FORMAT:
        raise RunFailed(
            f"{path} has checkpoint format {about['format']}, this release reads {FORMAT}: resume with the release that wrote it"
        )
    return about


def _read_file(path: Path, round: int, sha: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What one file says, and its tensors."""
    from safetensors import safe_open

    check_part(path, round, sha)
    with safe_open(path, framework="pt") as f:
        return about_of(f.metadata(), path), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)


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
        parts: worker -> SHA-256 as :func:`write_part` returned it, or those of its ranks.
        keep: whole rounds to keep, this one included; None keeps all.

    Raises:
        RunFailed: a part is missing, or the disk cannot be written.
        BadInput: keep < 1.
    """
    if keep is not None and keep < 1:
        raise BadInput(f"checkpoints to keep: {keep}; expected at least 1, or none to keep all")
    files: dict[str, Any] = {}
    for worker, found in sorted(parts.items()):
        shas = [found] if isinstance(found, str) else list(found)
        paths = [part_path(folder, round, worker, Place(r, len(shas))) for r in range(len(shas))]
        if lacking := [path for path in paths if not path.is_file()]:
            raise RunFailed(f"the checkpoint of round {round} lacks the part of worker {worker}: {lacking[0]}")
        several = [{"file": path.name, "sha256": sha} for path, sha in zip(paths, shas, strict=True)]
        files[str(worker)] = several[0] if len(several) == 1 else {"ranks": several}
    about = {"format": FORMAT, "round": round, "tokens": tokens, "parts": files, "extra": dict(extra or {})}
    with replacing(round_folder(folder, round) / MANIFEST) as scratch:
        scratch.write_text(json.dumps(about, indent=1))
    if keep is not None:
        _prune(folder, keep)


def read_manifest(folder: Path, round: int) -> Manifest:
    """The manifest of a closed round; its parts are not looked at.

    Raises:
        RunFailed: none there, or not readable.
    """
    path = round_folder(folder, round) / MANIFEST
    try:
        about = json.loads(path.read_text())
        parts = {int(w): tuple(str(each["sha256"]) for each in part.get("ranks", [part])) for w, part in about["parts"].items()}
        return Manifest(int(about["round"]), int(about["tokens"]), parts, about["extra"])
    except FileNotFoundError as error:
        raise RunFailed(f"there is no whole checkpoint of round {round} in {folder}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"{path} is damaged: {error!r}") from error


def latest(folder: Path) -> int | None:
    """The newest round whose manifest and parts are all sound; None where there is none. A damaged one is passed over, with a warning
    that names the damage."""
    for round in reversed(closed(folder)):
        try:
            manifest = read_manifest(folder, round)
        except RunFailed as error:
            _log.warning("The checkpoint of round %d is passed over: %s.", round, error)
            continue
        parts = [
            (part_path(folder, round, w, Place(r, len(shas))), sha) for w, shas in manifest.parts.items() for r, sha in enumerate(shas)
        ]
        faults = [_fault(path, sha) for path, sha in parts]
        fault = next((f for f in faults if f is not None), None)
        if fault is None:
            return round
        _log.warning("The checkpoint of round %d is passed over: %s.", round, fault)
    return None


def newest(folder: Path) -> int | None:
    """The newest round with a manifest; its parts are not looked at."""
    return max(closed(folder), default=None)


def round_folder(folder: Path, round: int) -> Path:
    """Where the checkpoint of `round` lies."""
    return Path(folder) / f"round-{round:06d}"


def part_path(folder: Path, round: int, worker: int, place: Place = ALONE) -> Path:
    """Where a part is, or is to be."""
    rank = "" if place.ranks == 1 else f".rank-{place.rank}"
    return round_folder(folder, round) / f"worker-{worker}{rank}.safetensors"


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file format takes contiguous tensors of separate memory, here on the CPU: where two share it (a tree kept twice), the second
    is copied."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, t in tensors.items():
        t = t.detach().cpu()
        place = t.untyped_storage().data_ptr()
        if place in seen or not t.is_contiguous() or t.untyped_storage().nbytes() != t.numel() * t.element_size():
            t = t.clone(memory_format=torch.contiguous_format)
        seen.add(place)
        out[name] = t
    return out


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch path that becomes `path` when the block ends well; otherwise nothing is left."""
    from safetensors import SafetensorError

    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        _flush(scratch)
        os.replace(scratch, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"the checkpoint {path} cannot be written ({error}): free some space or set another run folder") from error
    finally:
        with suppress(OSError):  # it is not there, nor can be
            scratch.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """What is in `path` (a file, or a folder's list of names) is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fault(path: Path, sha: str) -> str | None:
    """What is wrong with a part; None if nothing."""
    try:
        found = _sha256(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if found == sha else f"{path} is damaged (SHA-256 {found[:12]}..., expected {sha[:12]}...)"


def _rounds(folder: Path) -> list[int]:
    """Rounds with a folder, closed or not, oldest first."""
    names = (p.name for p in Path(folder).iterdir()) if Path(folder).is_dir() else ()
    return sorted(int(m[1]) for m in map(_ROUND.fullmatch, names) if m)


def closed(folder: Path) -> list[int]:
    """The rounds with a manifest, oldest first; their parts are not looked at."""
    return [r for r in _rounds(folder) if (round_folder(folder, r) / MANIFEST).is_file()]


def _prune(folder: Path, keep: int) -> None:
    """Deletes rounds before the oldest of the newest `keep` closed ones; younger open ones may still be being written."""
    whole = closed(folder)
    if len(whole) < keep:
        return
    oldest = whole[-keep]
    for round in _rounds(folder):
        if round < oldest:
            gone = round_folder(folder, round)
            # The manifest first: a round that is half deleted must not count.
            (gone / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(gone, ignore_errors=True)
