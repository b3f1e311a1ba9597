"""Documents to pack: local parquet, JSON, CSV, Arrow and text files, or a data set of the Hugging Face hub by name.

All are read by the `datasets` library as they come: nothing is downloaded whole, and nothing is converted.

    documents = open_documents(Source("HuggingFaceFW/fineweb", subset="sample-10BT"))
    documents = open_documents(Source("my/parquet", text="content"))
    for row, texts in documents.rows(file=0): ...
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput, RunFailed, said
from gossamer.train import corpus, local_files

ROWS = 256
"""Rows that are looked at together."""
KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
    ".py": "text",
}
"""Ending of a file -> who reads it."""
_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")  # ./text is a path
_WHOLE_BYTES, _BLOCKS, _BLOCK_BYTES = 1 << 22, 64, 1 << 16


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    at: str
    """"stdlib", a file, a folder, or owner/name on the hub."""
    subset: str = ""
    split: str = "train"
    text: str = "text"
    """The column that holds the text."""
    revision: str = ""
    """Of a hub data set: a commit or tag; empty: the newest."""
    valid: str = ""
    """What is held out: a split, or a path; empty: the first documents."""
    weight: float = 1.0
    """Share of the tokens, among several sources."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one split: files in a fixed order, and in each a fixed order of rows."""

    name: str
    text: str
    fingerprint: str
    """SHA-256 of what they are: of local files their names, sizes and content, of hub files their names and commit."""
    stream: Any
    """A `datasets.IterableDataset`."""
    paths: tuple[str, ...] = ()
    """The files' names, where each is a shard of the stream."""
    columns: tuple[str, ...] = ()
    """Those that every file has to keep to; none where the library does not hold on to any."""

    @cached_property
    def files(self) -> int:
        """Files, each of which is read from its start."""
        return int(self.stream.num_shards)

    def rows(self, file: int, skip: int = 0) -> Iterator[tuple[int, list[str | None]]]:
        """(number of the first row, texts of some rows) of a file, from row `skip` on.

        Raises:
            BadInput: what the file holds cannot be read.
            RunFailed: it can no longer be read.
        """
        at, name = 0, self.paths[file] if len(self.paths) == self.files else f"file {file}"
        try:
            one = self.stream.shard(num_shards=self.files, index=file).select_columns([self.text]).with_format("arrow")
            for table in one.iter(ROWS):
                lo, count = max(0, skip - at), table.num_rows
                if lo < count:
                    yield at + lo, table.column(self.text)[lo:].to_pylist()
                at += count
        except Exception as error:  # of files, networks and formats, whatever the library meets
            if local_files.of_content(error, name):
                raise BadInput(
                    f"{name} of the data set {self.name} cannot be read: {local_files.where(name, self.columns, at, error)}. Correct it, "
                    "or leave the file out, and begin anew"
                ) from error
            raise RunFailed(
                f"the data set {self.name} cannot be read further, at row {max(at, skip):,} of {name} ({said(error)}): "
                "see that it is there, and resume from the last checkpoint"
            ) from error


def exists(at: str) -> bool:
    """Whether a source is on this machine."""
    try:
        return at == corpus.STDLIB or Path(at).expanduser().exists()
    except (OSError, RuntimeError):
        return False


def by_name(at: str) -> bool:
    """Whether a source can only be a name on the hub."""
    return not exists(at) and _HUB.fullmatch(at) is not None


def kind_of(name: str) -> str | None:
    """Who reads a file of this name; None: nobody.

    >>> kind_of("c4-train.00000.json.gz"), kind_of("a.parquet"), kind_of("a.png")
    ('json', 'parquet', None)
    """
    lower = name.lower()
    for ending in local_files.PACKED:
        lower = lower.removesuffix(ending)
    return KINDS.get(Path(lower).suffix)


def files_of(folder: Path) -> list[Path]:
    """The files below `folder` that somebody reads, but for those of installed packages, tests and caches."""
    found: list[Path] = []
    for at, below, names in os.walk(folder):
        below[:] = sorted(d for d in below if d not in corpus.SKIPPED and not d.startswith("."))
        found += [Path(at, n) for n in sorted(names) if kind_of(n) and not n.startswith(".")]
    return found


def open_documents(source: Source) -> Documents:
    """Finds the documents of `source`, and looks at the first ones.

    Raises:
        BadInput: there are none, a name needs the network and it is not there, no such subset or split, or no such column of text.
    """
    datasets = _library()
    builder, name, root = _local(datasets, source) if exists(source.at) else _of_hub(datasets, source)
    splits = builder.config.data_files or {}
    split = next((key for key in splits if str(key) == source.split), None)
    if split is None:
        there = ", ".join(sorted(map(str, splits))) or "none"
        raise BadInput(f"the data set {name} has no split {source.split!r}, but: {there}. Set data.split to one of them")
    if root is not None and source.at != corpus.STDLIB:
        splits[split] = local_files.once(splits[split], name)
    try:
        stream = builder.as_streaming_dataset(split=str(split))
        columns = _columns(stream)
    except StopIteration as error:
        raise BadInput(f"the data set {name} is empty: {splits[split][0]} holds no row. Point data.source at another") from error
    except Exception as error:
        raise _unreadable(name, [str(file) for files in splits.values() for file in files], error) from error
    _check_column(columns, name, source.text)
    kept = tuple(columns) if stream.features is not None else ()
    if root is not None:
        local_files.check_content(splits[split], kept, source.text)
    marks = [_mark(str(file), root) for file in splits[split]]
    fingerprint = hashlib.sha256("\n".join([source.text, *marks]).encode("utf-8", "surrogateescape")).hexdigest()
    return Documents(name, source.text, fingerprint, stream, tuple(map(str, splits[split])), kept)


def _unreadable(name: str, files: list[str], error: Exception) -> BadInput:
    """Of a data set that the library cannot open: which of its files, as far as that can be told. It looks at the first with something in
    it."""
    local_files.check_footers(files)
    first = next((file for file in files if Path(file).is_file() and Path(file).stat().st_size), None)
    if first is None or not local_files.of_content(error, first):
        return BadInput(f"the data set {name} cannot be read ({said(error)}): correct data.source, or its files")
    return BadInput(f"{first} of the data set {name} cannot be read: {local_files.where(first, (), 0, error)}. Correct it, or leave it out")


def open_valid(source: Source) -> Documents | None:
    """What is held out of `source`, where that is said: another path, or another split.

    Raises:
        BadInput: as `open_documents`.
    """
    if not source.valid:
        return None
    if exists(source.valid):
        return open_documents(replace(source, at=source.valid, subset="", revision="", split="train"))
    return open_documents(replace(source, split=source.valid))


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise BadInput("documents are read by the datasets library, which is not here: pip install 'gossamer[data]'") from error
    return datasets


def _local(datasets: Any, source: Source) -> tuple[Any, str, Path]:
    """(builder, name, folder) of files here."""
    builtin = source.at == corpus.STDLIB
    path = corpus.stdlib_folder() if builtin else Path(source.at).expanduser()
    files = corpus.stdlib_files() if builtin else files_of(path) if path.is_dir() else [path]
    kinds = {kind_of(file.name) for file in files} - {None}
    if not kinds:
        raise BadInput(f"{source.at!r} has no file to read documents from: expected {', '.join(KINDS)}. Point data.source at some")
    data = kinds - {"text"}
    if len(data) > 1 or (data and any(file.suffix == ".txt" for file in files)):
        raise BadInput(
            f"the folder {source.at!r} holds files of several kinds ({', '.join(sorted(map(str, kinds)))}): point data.source at those of "
            "one kind, or name each in data.mix"
        )
    root = path if path.is_dir() else path.parent
    name = source.at if builtin else path.resolve().name
    try:
        if not data:
            # One file is one document: in an order that mixes the folders, of which the first are held out.
            files.sort(key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest())
            files = files if builtin else [Path(file) for file in local_files.once(map(str, files), name)]
            named = {"train": local_files.as_they_are([file.resolve() for file in files])}
            return datasets.load_dataset_builder("text", data_files=named, sample_by="document", encoding_errors="replace"), name, root
        if path.is_dir():
            local_files.check_folder(path.resolve())
            builder = datasets.load_dataset_builder(str(path.resolve()), name=source.subset or None)
            there = [file.resolve() for file in files if kind_of(file.name) in data]
            local_files.check_none_left(there, builder.config.data_files or {}, name, path)
            return builder, name, root.resolve()
        named = {source.split: local_files.as_they_are([path.resolve()])}
        return datasets.load_dataset_builder(data.pop(), data_files=named), name, root.resolve()
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"the data set {source.at!r} cannot be opened ({said(error)}): correct data.source or data.subset") from error


def _of_hub(datasets: Any, source: Source) -> tuple[Any, str, None]:
    """(builder, name, nothing) of a data set on the hub, at one commit of it."""
    at = source.at
    if not _HUB.fullmatch(at):
        raise BadInput(f"the data set {at!r} does not exist; expected {corpus.STDLIB!r}, a folder, a file, or owner/name on the hub")
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    try:
        builder = datasets.load_dataset_builder(at, name=source.subset or None, revision=source.revision or None)
    except DatasetNotFoundError as error:
        raise BadInput(f"{at!r} is nothing on this machine and no data set that the hub shows ({said(error)}): correct it") from error
    except DataFilesNotFoundError as error:
        raise BadInput(f"the data set {at!r} has no files that the datasets library reads ({said(error)}): choose another") from error
    except ValueError as error:  # of subsets, which it lists
        raise BadInput(f"the data set {at!r} cannot be opened: {said(error)} Set data.subset") from error
    except Exception as error:  # what the libraries of the network raise
        raise BadInput(
            f"{at!r} is nothing on this machine, and as the name of a data set it needs the Hugging Face hub, which cannot be reached "
            f"({said(error)}): connect, or download it where there is a network and set data.source to the folder"
        ) from error
    commit = next((m[1] for files in (builder.config.data_files or {}).values() for f in files if (m := _COMMIT.search(str(f)))), "")
    about = f"{at}/{source.subset}" if source.subset else at
    return builder, f"{about}@{commit[:12]}" if commit else about, None


_COMMIT = re.compile(r"@([0-9a-f]{40})/")


def _columns(stream: Any) -> dict[str, str]:
    """Column -> type, of the first rows where nothing else says it."""
    features = stream.features
    if features is None:
        table = next(stream.with_format("arrow").iter(ROWS), None)
        return {} if table is None else {field.name: str(field.type) for field in table.schema}
    return {key: str(getattr(feature, "dtype", "several values")) for key, feature in features.items()}


def _check_column(columns: dict[str, str], name: str, text: str) -> None:
    texts = [key for key, kind in columns.items() if kind in ("string", "large_string", "string_view")]
    if text in texts:
        return
    those = f"those of text are: {', '.join(texts)}" if texts else "none of them is text"
    if text in columns:
        raise BadInput(f"the column {text!r} of the data set {name} holds {columns[text]}, not text. Set data.text; {those}")
    raise BadInput(
        f"the data set {name} has no column {text!r}, but: {', '.join(columns) or 'none'}. Set data.text to the one to train on; {those}"
    )


def _mark(file: str, root: Path | None) -> str:
    """Of a local file its name, size and content, of another its name."""
    path = Path(file)
    if root is None or not path.is_file():
        return file
    size = path.stat().st_size
    try:
        relative = path.relative_to(root.resolve()).as_posix()
    except ValueError:
        relative = path.name
    return f"{relative}\0{size}\0{content_mark(path, size)}"


def content_mark(path: Path, size: int) -> str:
    """SHA-256 of a file's bytes; of one above 4 MiB, of 64 blocks of 64 KiB, the first, the last, and evenly between."""
    h = hashlib.sha256()
    with path.open("rb") as f:
        if size <= _WHOLE_BYTES:
            h.update(f.read())
        else:
            for k in range(_BLOCKS):
                f.seek((size - _BLOCK_BYTES) * k // (_BLOCKS - 1))
                h.update(f.read(_BLOCK_BYTES))
    return h.hexdigest()
