"""Files of documents on this machine, before the `datasets` library reads them: what it would take for a pattern, or read twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput

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
