"""Documents of files with names, links and content that one would rather not have: each is read as it is, once, or refused by its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import local_files
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
        with pytest.raises(BadInput, match=r"and 5 more files of the data set .* would not be read: other names .* \(train\)"):
            texts(tmp_path)
        about = tmp_path / "README.md"
        about.write_text(f"---\nconfigs:\n- config_name: default\n  data_files: bx.{kind}\n---\n")
        assert texts(tmp_path) == ["bx"]
        about.unlink()
        (tmp_path / f"{NAMES[-1]}.{kind}").unlink()
    assert sorted(texts(tmp_path)) == sorted(NAMES if kind == "txt" else NAMES[:-1])
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


def parquet(path: Path, **columns: list[object]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: pa.array(v, pa.string() if name == "text" else None) for name, v in columns.items()}), path)


def test_what_a_footer_says_is_said_before_training(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=["x"], n=[1])
    second = tmp_path / "b.parquet"
    parquet(second, text=["y"])
    assert texts(tmp_path) == ["x", "y"]
    for columns, words in (
        ({"text": []}, "has no rows: leave the file out"),
        ({"n": [1]}, "has no column 'text', but: n"),
        ({"text": ["y"], "more": [1], "n": [1]}, "has columns that the first file of the data set has not: more. "),
    ):
        parquet(second, **columns)
        with pytest.raises(BadInput, match=f"{second} {words}"):
            open_documents(Source(str(tmp_path)))
    second.write_bytes(b"")
    for at in (tmp_path, second):
        with pytest.raises(BadInput, match=f"{second} is no whole parquet file"):
            open_documents(Source(str(at)))


BAD = b'{"text": "caf\xe9"}\n'


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (line("y") * 300 + b"\n" + BAD, r"b\.jsonl of .* cannot be read: line 302: no Unicode text"),
        (line("y") + b'{"text": "y", "more": 1}\n', r"b\.jsonl of .* line 2: fields that .* have not \(more\)"),
        (line("y") + b'{"text": broken}\n', r"b\.jsonl of .* line 2: no JSON \(Expecting value at column 10\)"),
        (line("y") + b'{"text": ' + b"[" * 99_999 + b"\n", r"b\.jsonl of .* line 2: no JSON"),
        (line("y") + b'{"text": "\\ud800"}\n', r"b\.jsonl of .* line 2: no Unicode text .*surrogates"),
    ],
    ids=["utf-8", "field", "broken", "deep", "surrogate"],
)
def test_what_comes_up_in_the_middle_is_said_with_its_line(second: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line("x"))
    (tmp_path / "b.jsonl").write_bytes(second)
    assert open_documents(Source(str(tmp_path))).files == 2
    with pytest.raises(BadInput, match=words):
        texts(tmp_path)


def test_what_a_first_line_says_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line("x"))
    for first, words in ((BAD, "line 1: no Unicode text"), (b'{"content": "y"}\n', r"line 1: fields that .* have not \(content\)")):
        (tmp_path / "b.jsonl").write_bytes(first + line("y"))
        with pytest.raises(BadInput, match=rf"b\.jsonl, {words}"):
            open_documents(Source(str(tmp_path)))
    (tmp_path / "b.jsonl").write_bytes(b"")
    assert texts(tmp_path) == ["x"]
    with pytest.raises(BadInput, match=r"is empty: .*b\.jsonl holds no row"):
        open_documents(Source(str(tmp_path / "b.jsonl")))
    (tmp_path / "c.jsonl").write_bytes(b'{"text": broken}\n')
    with pytest.raises(BadInput, match=r"c\.jsonl of .* line 1: no JSON"):
        open_documents(Source(str(tmp_path / "c.jsonl")))


def test_objects_of_several_lines_and_arrays_are_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":\n "x"}\n{\n"text": "y"}\n')
    assert texts(tmp_path / "a.jsonl") == ["x", "y"]
    (tmp_path / "b.json").write_text('[{"text": "x"},\n{"text": "y"}]')
    assert texts(tmp_path / "b.json") == ["x", "y"] and local_files.fault_of_lines(tmp_path / "b.json") is None


def test_what_cannot_be_come_to_is_no_fault_of_the_files(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=["x"] * 9)
    documents = open_documents(Source(str(tmp_path)))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(RunFailed, match=r"at row 4 of .*a\.parquet .*resume from the last checkpoint"):
        list(documents.rows(0, 4))
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"a\.parquet of .* cannot be read: row 1 or after: "):
        list(documents.rows(0))
