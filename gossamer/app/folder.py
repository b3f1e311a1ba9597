"""The run folder: stable formats that tools and people read (design: run folder). Small files are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from gossamer.app.config import Config, dump
from gossamer.core.errors import BadInput


def write_atomically(path: Path, text: str) -> None:
    """The file has its old content or its new one, never half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def default_path(title: str) -> Path:
    """A folder name made of the title and the time."""
    word = "".join(c if c.isalnum() or c in "-_" else "-" for c in title.lower())
    return Path("runs") / f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_new(path: Path) -> None:
    """Refuses a folder that holds something.

    Raises:
        BadInput: it exists and is not empty, or is a file.
    """
    if path.is_dir() and any(path.iterdir()):
        raise BadInput(f"the run folder {path} exists and is not empty: choose another with --out, or go on with it by --resume {path}")
    if path.exists() and not path.is_dir():
        raise BadInput(f"the run folder {path} is a file: choose another with --out")


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Config, facts: dict[str, Any]) -> RunFolder:
        """Makes the folder with `config.toml`, and `facts` (corpus hash, parameter count, versions) in `facts.json`."""
        check_new(path)
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "config.toml", dump(config))
        write_atomically(path / "facts.json", json.dumps(facts, indent=2) + "\n")
        return cls(path)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """A folder to resume.

        Raises:
            BadInput: it is not a run folder.
        """
        if not (path / "config.toml").is_file():
            raise BadInput(f"{path} is not a run folder (it has no config.toml): give the folder of an earlier run")
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints live."""
        return self.path / "checkpoints"

    def facts(self) -> dict[str, Any]:
        """What `create` was given."""
        found: dict[str, Any] = json.loads((self.path / "facts.json").read_text())
        return found

    def cut(self, name: str, rounds: int) -> None:
        """Drops from a .jsonl file what lies after `rounds` completed rounds, for a run that resumes there; and a torn last line."""
        file = self.path / name
        if not file.exists():
            return
        kept = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["round"] <= rounds:
                kept.append(line)
        write_atomically(file, "".join(f"{line}\n" for line in kept))

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a .jsonl file; [] where there is none."""
        file = self.path / name
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json`."""
        write_atomically(self.path / "summary.json", json.dumps(clean(summary), indent=2) + "\n")


class JsonLines:
    """Appends records to a .jsonl file, a line each, in one write per flush."""

    def __init__(self, path: Path, every: int = 1) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._every = every
        self._waiting: list[str] = []

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record; it is on disk after `every` of them, or `flush`."""
        self._waiting.append(json.dumps(clean(record), separators=(",", ":")) + "\n")
        if len(self._waiting) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        if self._waiting:
            self._file.write("".join(self._waiting))
            self._file.flush()
            self._waiting.clear()

    def close(self) -> None:
        """Writes what waits and closes the file."""
        self.flush()
        self._file.close()


def clean(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value
