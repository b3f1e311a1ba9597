"""Small files that are whole or not there at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from gossamer.core.errors import BadInput


def write_atomically(path: Path, data: bytes, mode: int, *, replace: bool = False) -> None:
    """Writes a file that never existed in part, nor with other permissions.

    Raises:
        FileExistsError: there is one, and it is not to be replaced.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        _write(beside, data, mode)
        if replace:
            os.replace(beside, path)
        else:
            os.link(beside, path)  # unlike a rename, it fails where there is a file
        _sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def make_folder(path: Path, files: Mapping[str, tuple[bytes, int]], mode: int) -> None:
    """Makes a folder with these files (name -> content, permissions), all of it or nothing.

    Raises:
        BadInput: something is there already.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise BadInput(f"{path}: is there already, and nothing is overwritten: give another folder, or move this one away")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    beside.mkdir(mode=mode)
    try:
        for name, (data, permissions) in files.items():
            _write(beside / name, data, permissions)
        _sync(beside)
        os.rename(beside, path)  # onto nothing, or an empty folder
        _sync(path.parent)
    except BaseException:
        for left in beside.glob("*") if beside.is_dir() else ():
            left.unlink()
        if beside.is_dir():
            beside.rmdir()
        raise


def _write(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
