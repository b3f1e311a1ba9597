"""Text to train on: the Python standard library that is already on this machine, or any folder of .txt, .md, .py and .jsonl files.

Files are split into training and validation *by file*, by a hash of their relative path, so that adding a file moves no other.

    text = find("stdlib")                    # the embedded corpus: no download
    text = find("my/notes")                  # a folder of yours
    text = find("stdlib", limit_bytes=10**6) # a fair sample for a quick run
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gossamer.core.errors import BadInput

STDLIB = "stdlib"
"""The name of the embedded corpus. Its content depends on the Python release: compare content hashes across machines."""
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__", ".git", ".venv"}
)
"""Folders that are left out: installed packages, tests and caches."""
VALIDATION_PERCENT = 8


@dataclass(frozen=True)
class File:
    """A byte range of one file."""

    path: Path
    relative: str
    """Path from the corpus root, with forward slashes."""
    lo: int
    hi: int

    def read(self) -> bytes:
        """The bytes of the range.

        Raises:
            BadInput: the file cannot be read.
        """
        try:
            with self.path.open("rb") as f:
                f.seek(self.lo)
                return f.read(self.hi - self.lo)
        except OSError as error:
            raise BadInput(f"the corpus file {self.path} cannot be read ({error.strerror}): make it readable or remove it") from error


@dataclass(frozen=True)
class Text:
    """A corpus before tokenisation."""

    name: str
    train: tuple[File, ...]
    valid: tuple[File, ...]
    content_hash: str
    """SHA-256 over relative paths, ranges, split and bytes."""

    @property
    def train_bytes(self) -> int:
        """Bytes of the training files."""
        return sum(f.hi - f.lo for f in self.train)


def find(source: str | Path = STDLIB, limit_bytes: int | None = None) -> Text:
    """Finds, samples, splits and hashes a corpus.

    Args:
        source: "stdlib", a folder (searched recursively), or one file. A single file gives its last 8 % to validation.
        limit_bytes: at most so many bytes, for quick runs: whole files in the order of a hash of their paths (so a fair sample, and a
            larger limit contains a smaller one), the last one cut.

    Raises:
        BadInput: nothing there, nothing readable, or too little to split.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise BadInput(f"limit_bytes is {limit_bytes}; expected a positive number of bytes, or none for the whole corpus")
    builtin = str(source) == STDLIB
    try:
        root = stdlib_folder() if builtin else Path(source).expanduser()
        files = _list(root, builtin)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of nobody
        raise BadInput(f"the corpus {str(source)!r} cannot be read ({error}): correct data.source, or make it readable") from error
    if limit_bytes is not None:
        files = _sample(files, limit_bytes)
    train, valid = _split(files)
    if not train or not valid:
        raise BadInput(f"the corpus {str(source)!r} has too little text to split into training and validation: give it more text")
    h = hashlib.sha256()
    for split, part in (("train", train), ("valid", valid)):
        for file in part:
            h.update(f"{split}\0{file.relative}\0{file.lo}\0{file.hi}\0".encode(errors="surrogateescape"))
            h.update(file.read())
    return Text(STDLIB if builtin else root.name, train, valid, h.hexdigest())


def stdlib_folder() -> Path:
    """Where the embedded corpus is."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """The files of the embedded corpus."""
    return [file.path for file in _list(stdlib_folder(), builtin=True)]


def documents(files: tuple[File, ...]) -> Iterator[str]:
    """The documents of `files`: a file is one; of a .jsonl file each line's "text" field is one. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        BadInput: a .jsonl line that is not a JSON object with a "text" string; the message names file and line.
    """
    for file in files:
        raw = file.read()
        if not file.relative.endswith(".jsonl"):
            text = raw.decode("utf-8", errors="replace")
            if text.strip():
                yield text
            continue
        for number, line in enumerate(raw.splitlines(), 1):
            if line.strip():
                yield _field(file, number, line)


def _field(file: File, number: int, line: bytes) -> str:
    item: object = None
    try:
        item = json.loads(line)
        text = item["text"]  # type: ignore[index]
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        where = f"line {number}" if file.lo == 0 else f"line {number} after byte {file.lo}"
        remedy = "correct or remove the line"
        if isinstance(item, dict) and (texts := [key for key, value in item.items() if isinstance(value, str)]):
            remedy += f", or set data.text to the field that holds the text: {', '.join(texts)[:200]}"
        raise BadInput(f'{file.path}, {where}: expected a JSON object with a string field "text", got {line[:60]!r}: {remedy}') from None
    return text


def missing(source: str, named_by: str = "data.source") -> BadInput:
    """That there is no such text."""
    return BadInput(f"the corpus {source!r} does not exist; expected {STDLIB!r}, a folder or a file: correct {named_by}")


def _list(root: Path, builtin: bool) -> list[File]:
    wanted = (".py",) if builtin else SUFFIXES
    if not root.exists():
        raise missing(str(root))
    if root.is_file():
        paths = [root] if root.suffix.lower() in wanted else []
        base = root.parent
    else:
        base = root
        paths = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(d for d in subfolders if d not in SKIPPED)
            paths += [Path(folder, n) for n in names if Path(n).suffix.lower() in wanted]
    # Sorted by the path's text, which is the same on every system; an os.walk order is not.
    found = sorted((p.relative_to(base).as_posix(), p) for p in paths if p.is_file())
    files = [File(p, relative, 0, p.stat().st_size) for relative, p in found]
    files = [f for f in files if f.hi > 0]
    if not files:
        kinds = ", ".join(wanted)
        raise BadInput(f"the corpus {str(root)!r} has no text: no non-empty {kinds} file was found in it. Point data.source at some")
    return files


def _key(relative: str) -> bytes:
    return hashlib.sha256(relative.encode("utf-8", errors="surrogateescape")).digest()


def _sample(files: list[File], limit_bytes: int) -> list[File]:
    taken: list[File] = []
    left = limit_bytes
    for f in sorted(files, key=lambda f: _key(f.relative)):
        if left <= 0:
            break
        take = f if f.hi <= left else File(f.path, f.relative, 0, _line_end(f, left))
        if take.hi > 0:
            taken.append(take)
        left -= f.hi
    if not taken:
        raise BadInput(f"{limit_bytes} bytes are less than the first line of the corpus: raise data.limit_mb")
    return sorted(taken, key=lambda f: f.relative)


def _split(files: list[File]) -> tuple[tuple[File, ...], tuple[File, ...]]:
    if len(files) == 1:
        (f,) = files
        cut = _line_end(f, f.hi - max(1, f.hi * VALIDATION_PERCENT // 100))
        halves = File(f.path, f.relative, 0, cut), File(f.path, f.relative, cut, f.hi)
        return (halves[0],) if cut else (), (halves[1],) if cut < f.hi else ()
    # Bytes 8.. of the hash, so that the choice is independent of the order in which limit_bytes samples.
    marks = {f.relative: int.from_bytes(_key(f.relative)[8:12], "big") % 100 for f in files}
    valid = [f for f in files if marks[f.relative] < VALIDATION_PERCENT]
    if not valid or len(valid) == len(files):
        lowest = min(files, key=lambda f: (marks[f.relative], f.relative))
        valid = [lowest]
    chosen = {f.relative for f in valid}
    return tuple(f for f in files if f.relative not in chosen), tuple(valid)


def _line_end(file: File, at: int) -> int:
    """The end of the last whole line within the first `at` bytes; if there is none, of the last whole UTF-8 character."""
    head = File(file.path, file.relative, 0, at).read()
    end = head.rfind(b"\n") + 1
    if end == 0 and not file.relative.endswith(".jsonl"):
        end = len(head)
        while end > 0 and len(head) - end < 4 and end < file.hi and (_byte(file, end) & 0xC0) == 0x80:
            end -= 1
    return end


def _byte(file: File, at: int) -> int:
    return File(file.path, file.relative, at, at + 1).read()[0]
