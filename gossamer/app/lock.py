"""Files that only one process at a time may hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gossamer.core.errors import BadInput


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Holds the lock `file`, or gives False where another process holds it. A lock goes with its process, however that ends. Where the
    system has no locks, everybody holds it."""
    if sys.platform == "win32":
        yield True
        return
    import fcntl

    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            yield False
            return
        except OSError:
            break
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # its holder took it away between our two calls
    try:
        yield True
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While the block runs, no other process of this machine runs what is in this run folder.

    Raises:
        BadInput: one does.
    """
    with claimed(folder / ".lock") as ours:
        if not ours:
            raise BadInput(
                f"another process trains in the run folder {folder}: wait for its end, stop it, or choose another folder with --out"
            )
        yield
