"""Documents of files with names, links and content that one would rather not have: each is read as it is, once, or refused by its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gossamer.core.errors import BadInput
from gossamer.train.documents import Source, open_documents

pytestmark = pytest.mark.usefixtures("cache")


def texts(at: Path) -> list[str]:
    """All documents, in their order."""
    documents = open_documents(Source(str(at)))
    return [text or "" for file in range(documents.files) for _, some in documents.rows(file) for text in some]


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


NAMES = ("a[1]", "a1", "b?", "bx", "c*", "cx", "train-train-1 é")


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_what_would_be_a_pattern_is_a_name(kind: str, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.{kind}").write_bytes(line(name) if kind == "jsonl" else name.encode())
    for name in NAMES:
        assert texts(tmp_path / f"{name}.{kind}") == [name]
    if kind == "jsonl":  # whose folders are read by the rules of the library, for which train-... is a split
        assert texts(tmp_path) == [NAMES[-1]]
        return
    assert sorted(texts(tmp_path)) == sorted(NAMES)
    tmp_path.joinpath("[v1]").mkdir()
    tmp_path.joinpath("[v1]", "x.txt").write_text("below")
    assert texts(tmp_path / "[v1]") == ["below"]


def test_names_that_the_library_cannot_take_are_said(tmp_path: Path) -> None:
    (tmp_path / "a::b.jsonl").write_bytes(line("x"))
    (tmp_path / "a[1].jsonl.gz").write_bytes(gzip.compress(line("x")))
    (tmp_path / "v*").mkdir()
    (tmp_path / "v*" / "a.jsonl").write_bytes(line("x"))
    for name, words in (("a::b.jsonl", "'::' in its name"), ("a[1].jsonl.gz", r"'\[' in its name"), ("v*", "the name of the folder")):
        with pytest.raises(BadInput, match=rf"{words}.*rename it"):
            open_documents(Source(str(tmp_path / name)))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_under_two_names_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{kind}").write_bytes(line("x"))
    (tmp_path / f"b.{kind}").symlink_to(f"a.{kind}")
    with pytest.raises(BadInput, match=rf"b\.{kind} and .*a\.{kind} .* are one file, which would be read twice: remove the link"):
        open_documents(Source(str(tmp_path)))
