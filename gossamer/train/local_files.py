"""Files of documents on this machine, looked at before and after the `datasets` library: what it would take for a pattern, read twice, or
come to fail on in the middle, and where it has failed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput, said

PACKED = (".gz", ".zst", ".xz", ".bz2")
"""Endings of compressed files."""


def as_they_are(files: Sequence[Path]) -> Any:
    """The files as `data_files` of the library, which would take names for patterns: `[ ] * ?` in one are letters here.

    Raises:
        BadInput: a name that the library cannot read, whichever way it is given.
    """
    from datasets.data_files import DataFilesList

    for file in files:
        odd = "::" if "::" in str(file) else "[" if "[" in str(file) and file.name.lower().endswith(PACKED) else ""
        if odd:
            raise BadInput(f"{file} cannot be read, since {odd!r} in its name means another thing to the datasets library: rename it")
    return DataFilesList([str(file) for file in files], [])


def check_folder(folder: Path) -> None:
    """That the library takes the name of a folder, in which it looks for files itself, as it is.

    Raises:
        BadInput: it would be a pattern.
    """
    if has_magic(str(folder)):
        raise BadInput(f"the datasets library takes * ? [ in the name of the folder {folder} for a pattern: rename it")


def check_none_left(files: Iterable[Path], splits: Mapping[Any, Iterable[str]], name: str, folder: Path) -> None:
    """That each file of a folder is in a split, unless its README.md says which are. Where some have words such as train or test in their
    names, the library passes over those that have none.

    Raises:
        BadInput: one is in none.
    """
    found = {Path(file).resolve() for split in splits.values() for file in split}
    about = folder / "README.md"
    if about.is_file() and re.search(r"^configs:", about.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        return
    if found and (left := sorted(set(files) - found)):
        raise BadInput(
            f"{left[0]}{f' and {len(left) - 1} more files' if len(left) > 1 else ''} of the data set {name} would not be read: other names "
            f"in the folder say of which split they are ({', '.join(map(str, splits))}), and {left[0].name!r} says none. Name all or none "
            "of them so"
        )


def once(files: Iterable[str], name: str) -> Any:
    """The files as `data_files`, without those that the library has found by two of its patterns.

    Raises:
        BadInput: a file is there under two names, as by a link, and so its documents would be. An empty one may be.
    """
    from datasets.data_files import DataFilesList

    seen: dict[Path, str] = {}
    for file in files:
        if (other := seen.setdefault(Path(file).resolve(), file)) != file and Path(file).stat().st_size:
            raise BadInput(f"{file} and {other} of the data set {name} are one file, which would be read twice: remove the link")
    return DataFilesList(list(dict.fromkeys(seen.values())), [])


def check_content(files: Sequence[str], columns: Collection[str], text: str) -> None:
    """What can be known of files almost without reading them: of parquet the footer, of JSON lines the first line. The library would come
    to it in the middle of training.

    Args:
        columns: those of the data set, where the library holds on to them.
        text: the one that is read.

    Raises:
        BadInput: a parquet file is none, has no rows or no column `text`; columns that the data set has not; a line that is no text.
    """
    for path in map(Path, files):
        if path.suffix.lower() == ".parquet":
            named = _parquet(path)
            if text not in named:
                raise BadInput(f"{path} has no column {text!r}, but: {', '.join(named) or 'none'}. Leave the file out, or name it alike")
            if more := _beyond(named, columns):
                raise BadInput(
                    f"{path} has columns that the first file of the data set has not: {more}. Write it without them, or make it a source "
                    "of its own in data.mix"
                )
        elif path.suffix.lower() == ".jsonl" and (found := fault_of_lines(path, columns, first=True)):
            raise BadInput(f"{path}, {found}: correct it, or leave the file out")


def check_footers(files: Iterable[str]) -> None:
    """That those of parquet are whole, and have rows.

    Raises:
        BadInput: naming the first that is not.
    """
    for path in map(Path, files):
        if path.suffix.lower() == ".parquet" and path.is_file():
            _parquet(path)


def _parquet(path: Path) -> list[str]:
    """The columns of a file that has rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows, named = file.metadata.num_rows, list(file.schema_arrow.names)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path} is no whole parquet file ({said(error)}): write it again, or leave it out") from error
    if not rows:
        raise BadInput(f"{path} has no rows: leave the file out")
    return named


def _beyond(named: Iterable[str], columns: Collection[str]) -> str:
    return ", ".join(name for name in named if columns and name not in columns)


def fault_of_lines(
    path: Path, columns: Collection[str] = (), rows: int = 0, *, first: bool = False, error: BaseException | None = None
) -> str | None:
    """The first line of a file of JSON lines that cannot be read, and why; None where none is found.

    Args:
        columns: those that a line may have; none: any.
        rows: so many lines have been read already.
        first: look at one line only.
        error: what the library has said.
    """
    syntax = not first and not isinstance(error, UnicodeError) and not hasattr(error, "table_column_names")
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number <= rows or not (line := raw.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            if line.startswith(b"["):  # one array
                return None
            if (found := _fault_of_line(line, columns, syntax)) is not None:
                return f"line {number}: {found}"
            if first:
                return None
    return None


def _fault_of_line(line: bytes, columns: Collection[str], syntax: bool) -> str | None:
    """Args:
    syntax: say so where a line is no JSON. An object may have several lines.
    """
    try:
        row = json.loads(line.decode())
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeError as error:
        return f"no Unicode text ({said(error)})"
    except json.JSONDecodeError as error:
        return f"no JSON ({error.msg} at column {error.colno})" if syntax else None
    except (ValueError, RecursionError) as error:
        return f"no JSON ({said(error)})" if syntax else None
    if not isinstance(row, dict):
        return "no JSON object" if syntax else None
    more = _beyond(row, columns)
    return f"fields that the first lines of the data set have not ({more})" if more else None


def of_content(error: BaseException, file: str) -> bool:
    """Whether the library has failed on what a file holds, not on coming to it."""
    here = Path(file).is_file()
    if isinstance(error, OSError):  # pyarrow and gzip take it for what is damaged, without a number of the system's
        return here and error.errno is None
    return not isinstance(error, MemoryError) and (here or isinstance(error, ValueError | TypeError | LookupError | EOFError))


def where(file: str, columns: Collection[str], row: int, error: BaseException) -> str:
    """Where in a file the library has failed, at a row or soon after, and on what."""
    path = Path(file)
    if path.suffix.lower() in (".jsonl", ".json") and path.is_file():
        try:
            found = fault_of_lines(path, columns, row, error=error)
        except OSError:
            found = None
        if found is not None:
            return found
    if hasattr(error, "table_column_names") and (more := _beyond(error.table_column_names, columns)):
        return f"row {row + 1:,}: columns that the first rows of the data set have not ({more})"
    return f"row {row + 1:,} or after: {said(error).rstrip('.')}"
