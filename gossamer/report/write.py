"""Files written all at once."""

from __future__ import annotations

import os
from pathlib import Path

from gossamer.core.errors import BadInput


def write_whole(path: Path, text: str) -> Path:
    """Writes a text file atomically and returns its path: a reader sees the old file or the new one, never half of it.

    BadInput when the place cannot be written.
    """
    if path.is_dir():
        raise BadInput(f"{str(path)!r} is a folder; expected the name of a file to write, for example {str(path / 'report.html')!r}")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {str(path)!r} ({error.strerror or error}); choose another place") from error
    return path
