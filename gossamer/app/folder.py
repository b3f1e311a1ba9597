"""The run folder: stable formats that tools and people read (design: run folder). Small files are written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gossamer.app.config import Config, dump
from gossamer.core.errors import BadInput, RunFailed

LOGS = "logs"
"""Of a run folder: what its processes print. It may be there first."""
STOPPED = "stopped.json"
"""Of a run folder: there while the run is stopped, after a signal."""
TOKENIZER = "tokenizer"
"""Of a run folder: the tokenizer, unless it is plain bytes. So the folder needs no data to tell what its model says."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_NAME_BYTES = 255
"""What file systems allow."""
_TITLE_LETTERS = 50
"""So much of a title goes into a folder's name; a letter may take four bytes."""
_COUNTED = ("worker", "wall_s", "bytes_sent", "bytes_received", "compute_s", "straggler_idle_s", "network_idle_s")
_NEEDED = {"round": ("tokens", *_COUNTED), "close": _COUNTED, "eval": ("time_s", "loss")}
"""What the summary reads of a record of metrics.jsonl, by kind, besides kind and round."""


def write_atomically(path: Path, text: str) -> None:
    """The file has its old content or its new one, never half of it. Who may read it is as for any file that this process makes.

    Raises:
        RunFailed: the disk is full, or cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with scratch.open("x", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(scratch, path)
    except BaseException as error:
        with suppress(OSError):  # it is not there, nor can be
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise


def _unwritable(path: Path, error: OSError) -> RunFailed:
    return RunFailed(f"{path} cannot be written ({error.strerror}): free some space, or choose a folder that can be written")


def default_path(title: str) -> Path:
    """A folder name made of the title and the time."""
    word = "".join(c if c.isalnum() or c in "-_" else "-" for c in title.lower()[:_TITLE_LETTERS])
    return Path("runs") / f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_new(path: Path, remedy: str = "") -> None:
    """Refuses a folder that holds something but logs.

    Args:
        remedy: what to do about that, where --resume is none.

    Raises:
        BadInput: it exists and is not empty, is a file, or cannot be there.
    """
    try:
        if any(len(os.fsencode(part)) > _NAME_BYTES for part in path.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if path.is_dir() and any(one.name != LOGS for one in path.iterdir()):
            words = remedy or f"choose another with --out, or go on with it by --resume {path}"
            raise BadInput(f"the run folder {path} exists and is not empty: {words}")
        if path.exists() and not path.is_dir():
            raise BadInput(f"the run folder {path} is a file: choose another with --out")
        above = next((p for p in path.parents if p.exists()), path)
        if not above.is_dir():
            raise BadInput(f"the run folder {path} cannot be made, since {above} is a file: choose another with --out")
    except OSError as error:
        raise _no_folder(path, error) from error


def _no_folder(path: Path, error: OSError | ValueError) -> BadInput:
    said = getattr(error, "strerror", None) or error
    return BadInput(f"the run folder {str(path)!r} cannot be made ({said}): choose another with --out, where you may write")


def no_checkpoint(path: Path) -> BadInput:
    """That a run cannot go on."""
    return BadInput(f"{path} has no whole checkpoint to go on from: start a new run with another --out")


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Config, facts: dict[str, Any], tokenizer: Path | None = None) -> RunFolder:
        """Makes the folder with `config.toml`, and `facts` (corpus hash, parameter count, versions) in `facts.json`.

        Args:
            tokenizer: a tokenizer.json, of which the folder keeps a copy; what belongs to it and lies beside it, too.

        Raises:
            BadInput: the folder holds something, or cannot be made.
            RunFailed: the files cannot be written.
        """
        check_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise _no_folder(path, error) from error
        write_atomically(path / "config.toml", dump(config))  # first: by it a run that died here is known, and can be begun again
        if tokenizer is not None:
            _keep(tokenizer, path / TOKENIZER)
        write_atomically(path / "facts.json", json.dumps(facts, indent=2) + "\n")
        return cls(path)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """A folder to resume.

        Raises:
            BadInput: it is not a run folder.
        """
        try:
            there = (path / "config.toml").is_file()
        except OSError as error:
            raise BadInput(f"the run folder {path} cannot be read ({error.strerror}): give the folder of an earlier run") from error
        if not there:
            why = "it has no config.toml" if path.is_dir() else "there is no such folder"
            raise BadInput(f"{path} is not a run folder ({why}): give the folder of an earlier run")
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints live."""
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end: the summary is written last."""
        return (self.path / "summary.json").is_file()

    def was_stopped(self, checkpoint: int | None, command: str) -> None:
        """Leaves word for those who look at the folder. A full disk costs that word alone.

        Args:
            checkpoint: the round of the last whole one.
            command: what goes on with it; the folder follows.
        """
        with suppress(RunFailed):
            write_atomically(self.path / STOPPED, json.dumps({"checkpoint": checkpoint, "command": command}) + "\n")

    def goes_on(self) -> None:
        """Takes that word back."""
        (self.path / STOPPED).unlink(missing_ok=True)

    def facts(self) -> dict[str, Any]:
        """What `create` was given.

        Raises:
            BadInput: the file is missing or damaged.
        """
        file = self.path / "facts.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"{file} cannot be read ({error.strerror}): put it back, or start a new run") from error
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{file} is damaged, it is not JSON ({error}): put it back, or start a new run") from error
        if not isinstance(found, dict) or found.get("world") not in ("sim", "net", "wan"):
            raise BadInput(f'{file} is damaged: expected an object whose "world" is "sim", "net" or "wan". Put it back, or start a new run')
        return found

    def summary(self) -> dict[str, Any]:
        """What `write_summary` was given, of a finished run.

        Raises:
            BadInput: the file is missing or damaged.
        """
        file = self.path / "summary.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"{file} cannot be read as JSON ({error}): put it back, or resume the run") from error
        if not isinstance(found, dict):
            raise BadInput(f"{file} is damaged: expected an object. Put it back, or resume the run")
        return found

    def cut(self, name: str, rounds: int, since: int = 0) -> None:
        """Drops from a .jsonl file what lies after `rounds` completed rounds, for a run that resumes there; and a torn last line.

        Args:
            since: where the run has other workers since that round: of before, evaluations alone are kept.

        Raises:
            BadInput: the file is damaged.
            RunFailed: the disk is full, and what is dropped lies in the middle.
        """
        file = self.path / name
        if file.exists():
            kept = (
                line
                for line, record in self._records(name)
                if record["round"] <= rounds
                and record["kind"] != "close"
                and (not since or record["round"] > since or record["kind"] == "eval")
            )
            text = "".join(f"{line}\n" for line in kept)
            if file.read_bytes().startswith(data := text.encode("utf-8")):  # which needs no room
                os.truncate(file, len(data))
            else:
                write_atomically(file, text)

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a .jsonl file; [] where there is none. A torn last line is left out.

        Raises:
            BadInput: the file is damaged.
        """
        return [record for _, record in self._records(name)] if (self.path / name).exists() else []

    def _records(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every line of a .jsonl file, and its record."""
        file = self.path / name
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise BadInput(f"{file} cannot be read ({error.strerror}): put it back, or start a new run") from error
        for number, raw in enumerate(lines, 1):
            try:
                line = raw.decode("utf-8")
                record = json.loads(line)
            except (ValueError, RecursionError):
                if number == len(lines) and (not raw or raw.startswith((b"{", b"\0"))):  # the end, or a write that a crash cut short
                    return
                record = None
            if not _sound(record):
                raise BadInput(
                    f"{file}, line {number}, is damaged: {raw[:60]!r} is no record of a run. Remove the line, or start a new run"
                )
            yield line, record

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json`."""
        write_atomically(self.path / "summary.json", json.dumps(clean(summary), indent=2) + "\n")


def _keep(tokenizer: Path, folder: Path) -> None:
    """A copy of a tokenizer's files."""
    named = {tokenizer: _TOKENIZER_FILES[0]}
    if tokenizer.name == _TOKENIZER_FILES[0]:
        named |= {file: name for name in _TOKENIZER_FILES[1:] if (file := tokenizer.with_name(name)).is_file()}
    try:
        folder.mkdir(exist_ok=True)
        for file, name in named.items():
            shutil.copyfile(file, folder / name)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _sound(record: Any) -> bool:
    """Whether it has what is read of a record."""
    if not isinstance(record, dict) or type(record.get("round")) is not int or not isinstance(record.get("kind"), str):
        return False
    return all(key in record for key in _NEEDED.get(record["kind"], ()))


class JsonLines:
    """Appends records to a .jsonl file, a line each, in one write per flush. What could not be written waits for the next flush.

    Raises:
        RunFailed: the disk is full, or cannot be written.
    """

    def __init__(self, path: Path, every: int = 1) -> None:
        self._path = path
        self._every = every
        self._waiting: list[str] = []
        self._left = b""
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record; it is on disk after `every` of them, or `flush`."""
        self._waiting.append(json.dumps(clean(record), separators=(",", ":")) + "\n")
        if len(self._waiting) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        left = memoryview(self._left + "".join(self._waiting).encode("utf-8"))
        self._waiting.clear()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _unwritable(self._path, error) from error
        finally:
            self._left = bytes(left)

    def let_go(self) -> list[dict[str, Any]]:
        """Closes the file, after one more try to write. The records that are not on disk."""
        with suppress(RunFailed):
            self.flush()
        self._file.close()
        torn = self._path.read_bytes().rpartition(b"\n")[2] if self._left else b""
        return [json.loads(line) for line in (torn + self._left).splitlines()]

    def close(self) -> None:
        """Writes what waits and closes the file. That an earlier write has failed is not said again."""
        told = bool(self._left)
        try:
            self.flush()
        except RunFailed:
            if not told:
                raise
        finally:
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
