"""One file of a checkpoint: what a worker, or a rank of it, has at a boundary. Tensors, and everything else as JSON in the file's header.

It is made in two steps. `stage` copies what the worker will go on to change; `put` writes it, at any later time, in any thread.

The files of one worker, in a folder of their own, are a checkpoint of torch.distributed.checkpoint:

    state = {"x/lm_head.weight": torch.empty(...)}          # plain tensors, or DTensors on any mesh
    torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader("checkpoints/round-000012/worker-0"))

For that, the header of a rank's file says at which row each of its tensors begins, as that reader expects it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.ranges import rows_of
from gossamer.train.packing import pack_state
from gossamer.train.recut import Place, is_cut
from gossamer.worker.state import State

FORMAT = 3
READS = (2, 3)
"""2 had the same files, all of a round in one folder."""
_OURS, _OFFSETS = "gossamer", "DCP_SHARDING_INFO"
_UNCHANGING = ("body/", "own/", "mean/", "handed/")
"""Tensors that nobody changes: what a body's `state` gives is a copy, and packets are sealed."""


class Staged(NamedTuple):
    """A part that waits to be written. Nothing in it changes any more."""

    path: Path
    tensors: dict[str, Tensor]
    """On the CPU, contiguous, of separate memory."""
    header: dict[str, str]


def stage(
    path: Path, round: int, worker: int, state: State, body: Mapping[str, Any], extra: Mapping[str, Any], place: Place, *, copy: bool
) -> Staged:
    """What is to be written of a worker at a boundary.

    Args:
        body: what the body's `state` gave: tensors, and values that JSON holds.
        extra: values that JSON holds.
        place: which rank this is, where the worker has several; the tensors are its rows then.
        copy: the state may change before it is written.
    """
    tensors: dict[str, Tensor] = {}
    about = {"format": FORMAT, "round": round, "worker": worker, "extra": dict(extra)}
    about["state"] = pack_state(state, tensors)
    about["body"] = {"order": list(body), "values": {k: v for k, v in body.items() if not isinstance(v, Tensor)}}
    tensors |= {f"body/{k}": v for k, v in body.items() if isinstance(v, Tensor)}
    header = {_OURS: json.dumps(about)}
    if place.ranks > 1 and place.rows:
        header[_OFFSETS] = json.dumps({name: {"saved_offsets": _offsets(name, t, place)} for name, t in tensors.items()})
    return Staged(path, apart(tensors, copy), header)


def put(part: Staged) -> str:
    """Writes it: under another name, flushed to the disk and renamed. Its SHA-256.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    from safetensors.torch import save_file

    with replacing(part.path) as scratch:
        save_file(part.tensors, scratch, metadata=part.header)
        return sha256_of(scratch)


def check_part(path: Path, round: int, sha: str) -> None:
    """That a file is what the manifest says.

    Raises:
        RunFailed: it is not, or cannot be read.
    """
    if (found := fault(path, sha)) is not None:
        folder = next((p for p in path.parents if p.name.startswith("round-")), path.parent)
        raise RunFailed(f"the checkpoint of round {round} cannot be used: {found}. Remove {folder} to go on from an earlier one")


def about_of(header: Mapping[str, str], path: Path, round: int, worker: int) -> dict[str, Any]:
    """What the header of a part says beside its tensors.

    Raises:
        BadInput: another release wrote it.
        RunFailed: it is another one's.
    """
    about: dict[str, Any] = json.loads(header[_OURS])
    if about["format"] not in READS:
        raise foreign(path, about["format"])
    if (about["round"], about["worker"]) != (round, worker):
        raise RunFailed(
            f"{path} is the part of worker {about['worker']} at round {about['round']}, and stands for that of worker {worker} at round "
            f"{round}: put each where it was, or remove the folder of the round to go on from an earlier one"
        )
    return about


def foreign(path: Path, format: object) -> BadInput:
    """Of a file in a format that is not known here."""
    reads = " and ".join(map(str, READS))
    return BadInput(f"{path} has checkpoint format {format!r}, this release reads {reads}: resume with the release that wrote it")


def read(path: Path, round: int, worker: int, sha: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What one file says, and its tensors.

    Raises:
        RunFailed: it is damaged, or another one's.
        BadInput: it is of another release.
    """
    from safetensors import safe_open

    check_part(path, round, sha)
    with safe_open(path, framework="pt") as f:
        return about_of(f.metadata(), path, round, worker), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)


def apart(tensors: Mapping[str, Tensor], copy: bool = False) -> dict[str, Tensor]:
    """The file format takes contiguous tensors of separate memory, here on the CPU: where two share it (a tree kept twice), the second
    is copied.

    Args:
        copy: those that may change are copied, too.
    """
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, live in tensors.items():
        t = live.detach().cpu()
        place = t.untyped_storage().data_ptr()
        partly = not t.is_contiguous() or t.untyped_storage().nbytes() != t.numel() * t.element_size()
        if place in seen or partly or (copy and live.is_cpu and not name.startswith(_UNCHANGING)):
            t = t.clone(memory_format=torch.contiguous_format)
        seen.add(place)
        out[name] = t
    return out


def _offsets(name: str, tensor: Tensor, place: Place) -> list[int]:
    """Where in the whole tensor this rank's begins."""
    kind, _, rest = name.partition("/")
    parameter = rest.partition("/")[2] if kind in ("outer", "body") else rest
    rows = (place.rows or {}).get(parameter)
    if rows is None or not is_cut(name, tensor):
        return [0] * tensor.ndim
    return [rows_of(rows, place.ranks, place.rank)[0], *[0] * (tensor.ndim - 1)]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch path that becomes `path` when the block ends well; otherwise nothing is left.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    from safetensors import SafetensorError

    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        scratch.touch()
        mode = scratch.stat().st_mode
        yield scratch
        scratch.chmod(mode)  # safetensors makes files that nobody else may read
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


def sha256_of(path: Path) -> str:
    """Of a file, as hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fault(path: Path, sha: str) -> str | None:
    """What is wrong with a part; None if nothing."""
    try:
        found = sha256_of(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if found == sha else f"{path} is damaged (SHA-256 {found[:12]}..., expected {sha[:12]}...)"
