"""Folders that are made once and kept: made aside and renamed whole, so that processes which start together cannot spoil each other's
work."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from gossamer.core.errors import BadInput

CACHE_VARIABLE = "GOSSAMER_CACHE"


def cache_dir() -> Path:
    """Where tokenizers and tokens are kept: $GOSSAMER_CACHE, else the user's cache folder. Deleting it costs seconds."""
    import platformdirs

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("gossamer"))


def make(folder: Path, fill: Callable[[Path], None], sound: Callable[[], bool]) -> None:
    """Makes `folder`.

    Args:
        fill: writes its files into the folder that it is given.
        sound: whether `folder` is there and whole; another process may have been faster.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise BadInput(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}): set {CACHE_VARIABLE} to one that can"
        ) from error
    try:
        fill(scratch)
        if sound():
            return  # another process was faster
        if folder.exists():  # damaged
            os.rename(folder, f"{scratch}-old")
            shutil.rmtree(f"{scratch}-old", ignore_errors=True)
        os.rename(scratch, folder)
    except OSError as error:
        if not folder.exists():  # else another process was faster by a hair
            raise BadInput(f"the corpus cannot be cached in {folder} ({error}): set {CACHE_VARIABLE} to a folder with room") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def unreadable(folder: Path) -> BadInput:
    """The refusal of a folder that was just made and is not sound."""
    return BadInput(f"the cache {folder} cannot be read back after writing: free some space, or set {CACHE_VARIABLE} to another folder")
