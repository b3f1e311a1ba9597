"""Items of the public tasks: from a folder of .jsonl files, or from the Hugging Face hub where there is a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gossamer.app.zeroshot.items import Item, fault
from gossamer.app.zeroshot.tasks import PUBLIC, Record, Records, Task
from gossamer.core.errors import BadInput, said

SUFFIX = ".jsonl"


def found_in(folder: Path) -> dict[str, Path]:
    """The tasks of which `folder` has a file, `<task>.jsonl` each, and the files: openbook_qa.jsonl and OpenBookQA.jsonl are the same.

    Raises:
        BadInput: it is no folder, or has none.
    """
    if not folder.is_dir():
        raise BadInput(f"--data {folder} is no folder: give one that holds files such as arc_easy{SUFFIX}")
    by_stem = {_plain(name): name for name in PUBLIC}
    files = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    found = {by_stem[_plain(path.stem)]: path for path in files if _plain(path.stem) in by_stem}
    if not found:
        raise BadInput(f"--data {folder} has none of {', '.join(f'{name}{SUFFIX}' for name in PUBLIC)}: put at least one there")
    return {name: found[name] for name in PUBLIC if name in found}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def read_file(task: Task, path: Path, limit: int | None = None) -> list[Item]:
    """The items of a file, one JSON object a line.

    Raises:
        BadInput: it cannot be read, or a line is not a record of the task; the message names file and line.
    """
    assert task.records is not None
    return _items(task.records, _lines(path), limit, f"{path}, line", "Correct or remove the line")


def _lines(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except (ValueError, RecursionError):
                        raise BadInput(f"{path}, line {number}, is no JSON: {line[:60]!r}. Correct or remove the line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({error}): expected a text file with one JSON object a line") from error


def from_hub(task: Task, limit: int | None = None) -> list[Item]:
    """The items of a data set on the hub, or of what an earlier call has left in the cache of `datasets`.

    Raises:
        BadInput: it cannot be had, for want of a network for example.
    """
    import datasets

    records = task.records
    assert records is not None
    try:
        rows: Iterable[Record] = datasets.load_dataset(records.hub, records.configuration, split=records.split)
    except Exception as error:  # the library raises errors of many kinds
        raise BadInput(
            f"the items of {task.name} are on the Hugging Face hub ({records.hub}), which cannot be reached or read "
            f"({said(error, kind=True, most=200)}). Without a network, have them on disk: --data DIR with a file {task.name}{SUFFIX} in it"
        ) from error
    return _items(records, enumerate(rows, 1), limit, f"{records.hub}, row", "This release expects other fields")


def _items(records: Records, numbered: Iterable[tuple[int, Record]], limit: int | None, where: str, remedy: str) -> list[Item]:
    items: list[Item] = []
    for number, record in islice(numbered, limit):
        try:
            item = records.item(record)
            wrong = fault(item)
        except KeyError as error:
            item, wrong = None, f"it has no {error}"
        except (TypeError, ValueError, AttributeError) as error:
            item, wrong = None, str(error)
        if item and items and item.kind != items[0].kind:
            wrong = "it is of another kind than the first"
        if item is None or wrong is not None:
            raise BadInput(f"{where} {number}, is no record of this task: {wrong} (it begins {str(record)[:80]!r}). {remedy}")
        items.append(item)
    if not items:
        raise BadInput(f"{where.rpartition(',')[0]} has no items: put some there, or leave the task out")
    return items
