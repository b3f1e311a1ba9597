"""Documents packed as they come: shards, order, mixing, and places to go on from; read from files that the tests write."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import documents as D
from gossamer.train import prepared
from gossamer.train.data import Corpus
from gossamer.train.packed import Lane, Packed, Packing, share
from gossamer.train.tokenizer import Bytes


class Files(D.Documents):
    """Documents in memory, in place of files."""

    def __init__(self, files: list[list[str | None]]) -> None:
        super().__init__("memory", "text", "", files)

    @property
    def files(self) -> int:  # type: ignore[override]
        return len(self.stream)

    def rows(self, file, skip=0):
        for at in range(skip, len(self.stream[file]), 7):
            yield at, self.stream[file][at : at + 7]


def packing(*files, first=0, head=0, shuffle=4, weights=None) -> Packing:
    lanes = tuple(Lane(Files(f), first, head, w) for f, w in zip(files, weights or [1.0] * len(files), strict=True))
    return Packing(lanes, Bytes(), shuffle, "these")


def text_of(ids) -> str:
    """Of a document and its end mark."""
    assert ids[-1] == 256
    return bytes(ids[:-1].astype(np.uint8)).decode()


def words(batch: torch.Tensor) -> str:
    """The stream of a worker's tokens, end marks as line ends."""
    ids = torch.cat([batch[:, :-1].flatten(), batch[-1:, -1]]).tolist()
    return "".join("\n" if i == 256 else chr(i) for i in ids)


FILES = st.lists(st.lists(st.sampled_from(["", None, "x", "doc"]), min_size=1, max_size=9), min_size=1, max_size=6)


@given(files=FILES, workers=st.integers(1, 7), held=st.integers(0, 3), shuffle=st.sampled_from([0, 1, 3, 1024]), seed=st.integers(0, 3))
def test_no_document_is_of_two_workers_and_an_epoch_has_each_once(files, workers, held, shuffle, seed) -> None:
    named = [[text and f"{text}{f}-{r}" for r, text in enumerate(file)] for f, file in enumerate(files)]
    first, head = next(((f, held) for f, file in enumerate(named) if held < len(file)), (0, 0))
    expected = {text for f, file in enumerate(named) for r, text in enumerate(file) if text and (f, r) >= (first, head)}
    seen: list[str] = []
    for worker in range(workers):
        packed = Packed(packing(named, first=first, head=head, shuffle=shuffle), 5, seed, worker, workers)
        with suppress(BadInput):  # a worker without a document
            for place, ids in packed._readers[0]._pieces:
                if place.epoch:
                    break
                seen.append(text_of(ids))
    assert Counter(seen) == Counter(expected)


@given(files=st.integers(1, 40), workers=st.integers(1, 40))
def test_shares_are_disjoint_and_everything(files: int, workers: int) -> None:
    shares = [share(files, w, workers) for w in range(workers)]
    rows = Counter((f, r) for s in shares for f in s.files for r in range(60) if r % s.parts == s.part)
    assert set(rows.values()) == {1} and len(rows) == 60 * files


TEXTS = [[f"file {f} document {r} " + "ab" * ((f * 7 + r * r) % 40) for r in range(30)] for f in range(3)]


@settings(max_examples=30)
@given(
    cursor=st.integers(0, 60), at=st.integers(0, 40), counts=st.lists(st.integers(1, 5), min_size=1, max_size=6), worker=st.integers(0, 4)
)
def test_a_sequence_is_a_function_of_its_number_and_a_place_is_gone_on_from(cursor, at, counts, worker) -> None:
    of = packing(TEXTS, [["x" * 300, "y" * 7, "z"] * 3], weights=[0.7, 0.3])
    whole = Packed(of, 12, 1, worker, 5).batch(0, 100)
    assert whole.shape == (100, 13) and whole.dtype == torch.int64
    one = Packed(of, 12, 1, worker, 5)
    one.batch(at, 3)
    for count in counts:  # back, on, and over a gap
        assert torch.equal(one.batch(cursor, count), whole[cursor : cursor + count])
        cursor += count
    fresh = Packed(of, 12, 1, worker, 5)
    fresh.load_state(one.state())
    assert fresh.state() == one.state()
    assert torch.equal(fresh.batch(cursor, 3), whole[cursor : cursor + 3])
    assert torch.equal(fresh.batch(1, 2), whole[1:3])
    for other in (Packed(of, 12, 1, (worker + 1) % 5, 5), Packed(of, 12, 1, worker, 6), Packed(of, 12, 2, worker, 5)):
        want = replace(other).batch(0, 2)
        other.load_state(one.state())
        assert torch.equal(other.batch(0, 2), want)


def test_a_place_is_gone_on_from_without_reading_what_came_before() -> None:
    of = packing(TEXTS, shuffle=4)
    one = Packed(of, 12, 0, 0, 1)
    one.batch(0, 150)
    want, state = one.batch(150, 2), json.loads(one.state())
    read: list[tuple[int, int]] = []
    lane = of.lanes[0]
    rows = lane.documents.rows
    object.__setattr__(lane.documents, "rows", lambda file, skip=0: read.append((file, skip)) or rows(file, skip))
    again = Packed(of, 12, 0, 0, 1)
    again.load_state(json.dumps(state))
    again.batch(152, 1)
    assert len(read) == 1 and read[0][1] == state["places"][0][2] > 0
    assert torch.equal(one.batch(150, 2), want)


BENT = {
    "cursor": lambda said: said.update(cursor=151),
    "cursor below": lambda said: said.update(cursor=-1),
    "no number": lambda said: said["places"][0].__setitem__(2, "7"),
    "fewer": lambda said: said["places"].pop(),
    "short": lambda said: said["places"][0].pop(),
    "long": lambda said: said["places"][0].append(1),
    "epoch": lambda said: said["places"][0].__setitem__(0, -1),
    "far epoch": lambda said: said["places"][0].__setitem__(0, 10**30),
    "file": lambda said: said["places"][0].__setitem__(1, 99),
    "row": lambda said: said["places"][0].__setitem__(2, -1),
    "never drawn": lambda said: said["places"][1].__setitem__(4, 1),
    "deep": lambda said: said.update(deep="DEEP"),
}
ELSEWHERE = {  # within bounds, but no document, or token, is there
    "row": lambda said: said["places"][0].__setitem__(2, 10**9),
    "document": lambda said: said["places"][0].__setitem__(3, 1000),
    "token": lambda said: said["places"][0].__setitem__(4, 1000),
}


@pytest.mark.parametrize("name", [*BENT, *(f"elsewhere {name}" for name in ELSEWHERE)])
def test_a_place_that_is_none_is_said(name: str) -> None:
    of = packing(TEXTS, [["x" * 300]], weights=[1.0, 0.0])
    one = Packed(of, 12, 0, 0, 1)
    one.batch(0, 150)
    said = json.loads(one.state())
    again = Packed(of, 12, 0, 0, 1)
    if name in BENT:
        BENT[name](said)
        with pytest.raises(BadInput, match=r"is damaged .* resume from another one"):
            again.load_state(json.dumps(said).replace('"DEEP"', "[" * 100_000))
        return
    ELSEWHERE[name.removeprefix("elsewhere ")](said)
    again.load_state(json.dumps(said))
    with pytest.raises(BadInput, match=r"is not there: Place\(.* in memory for worker 0 of 1"):
        again.batch(150, 1)


def test_nothing_is_lost_between_sequences_and_documents_come_as_they_are() -> None:
    flat = [text for file in TEXTS for text in file]
    text = words(Packed(packing(TEXTS, shuffle=0), 16, 0, 0, 1).batch(0, 150))
    assert ("\n".join(flat) + "\n").startswith(text[:2000])
    mixed = [words(Packed(packing(TEXTS), 16, seed, 0, 1).batch(0, 600)).split("\n") for seed in (0, 1)]
    assert sorted(mixed[0][:90]) == sorted(flat) == sorted(mixed[1][:90])
    assert mixed[0][:90] != flat and mixed[0][:90] != mixed[1][:90] and mixed[0][:60] != mixed[0][90:150]


def test_a_worker_without_a_document_is_told() -> None:
    with pytest.raises(BadInput, match="worker 2 of 3 in memory holds no document"):
        Packed(packing([["a", "b"]]), 4, 0, 2, 3).batch(0, 1)


def test_weights_are_shares_of_sequences() -> None:
    of = packing([["a" * 50]], [["b" * 50]], [["c" * 50]], weights=[3, 1, 1])
    batch = Packed(of, 8, 0, 0, 1).batch(0, 4000)
    marks = [set(row.tolist()) - {256} for row in batch]
    assert all(len(m) == 1 for m in marks)  # a sequence is of one source
    shares = Counter(chr(m.pop()) for m in marks)
    assert abs(shares["a"] / 4000 - 0.6) < 0.04 and abs(shares["b"] / 4000 - 0.2) < 0.04  # 5 standard errors


@pytest.fixture(scope="module")
def files(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet of two splits, JSON lines, CSV and texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("data")
    (root / "parquet").mkdir()
    for name, texts in (("train-0", TEXTS[0] * 9), ("train-1", TEXTS[1] * 9), ("validation-0", TEXTS[2])):
        table = pa.table({"number": list(range(len(texts))), "content": texts, "also": texts})
        pq.write_table(table, root / "parquet" / f"{name}.parquet", row_group_size=50)
    (root / "parquet" / "README.md").write_text("what this is")
    (root / "lines").mkdir()
    (root / "lines" / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS[0] * 2))
    (root / "texts").mkdir()
    for k, text in enumerate(TEXTS[1]):
        (root / "texts" / f"{k}.txt").write_text(text, encoding="utf-8")
    (root / "texts" / "bad.md").write_bytes(b"caf\xe9 " * 20)
    return root


def load(*sources: D.Source, **more: object) -> Corpus:
    return prepared.load(sources, **({"sequence": 16, "tokenizer": "bytes", "valid_documents": 5} | more))  # type: ignore[arg-type]


def test_the_first_documents_are_held_out_of_every_kind_of_file(files: Path) -> None:
    for source, total in (
        (D.Source(str(files / "parquet"), text="content"), 540),
        (D.Source(str(files / "lines" / "a.jsonl")), 60),
        (D.Source(str(files / "texts")), 31),
    ):
        corpus = load(source, shuffle=0)
        held = "".join("\n" if i == 256 else chr(i) for i in corpus.valid).split("\n")[:-1]
        assert len(held) == min(5, total // 12) and corpus.reading is not None and len(corpus.train) == 0
        seen: Counter[str] = Counter()
        for worker in range(2):
            for place, ids in Packed(corpus.reading, 16, 0, worker, 2)._readers[0]._pieces:  # type: ignore[arg-type]
                if place.epoch:
                    break
                seen[text_of(ids)] += 1
        assert seen.total() == total - len(held)
        assert total > 100 or not set(held) & set(seen) or source.at.endswith("jsonl")


def test_what_is_held_out_can_be_named(files: Path) -> None:
    source = D.Source(str(files / "parquet"), text="content")
    by_split = load(replace(source, valid="validation"), valid_documents=100)
    assert len(by_split.valid) == sum(len(text) + 1 for text in TEXTS[2])
    by_path = load(replace(source, valid=str(files / "parquet" / "validation-0.parquet")), valid_documents=100)
    assert np.array_equal(by_path.valid, by_split.valid)
    with pytest.raises(BadInput, match="no split 'test', but: train, validation"):
        load(replace(source, valid="test"))


def test_the_mark_is_of_the_content(files: Path, tmp_path: Path) -> None:
    lines = (files / "lines" / "a.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "b.jsonl"
    path.write_text("".join(lines))
    source = D.Source(str(path))
    first, mark = load(source).content_hash, prepared.mark([source])
    assert load(source).content_hash == first and load(replace(source, split="train")).content_hash == first
    assert load(source, tokenizer="bpe", vocab_size=300).content_hash != first != load(source, valid_documents=4).content_hash
    path.write_text("".join([*lines[:-1], lines[-1].replace("document", "Document")]))
    assert load(source).content_hash != first and prepared.mark([source]) != mark


def test_a_tokenizer_is_trained_on_what_is_trained_on(files: Path) -> None:
    corpus = load(D.Source(str(files / "texts")), tokenizer="bpe", vocab_size=300, sequence=8)
    assert corpus.tokenizer is not None and 257 < corpus.vocab_size <= 300
    batch = corpus.batches(8, 0, 0, 1).batch(0, 3)
    assert batch.shape == (3, 9) and int(batch.max()) < corpus.vocab_size


def test_columns_splits_and_names_that_are_not_there(files: Path, tmp_path: Path) -> None:
    parquet = D.Source(str(files / "parquet"))
    with pytest.raises(BadInput, match=r"no column 'text', but: number, content, also\. Set data\.text .* content, also"):
        load(parquet)
    with pytest.raises(BadInput, match=r"'number' .* holds int64, not text"):
        load(replace(parquet, text="number"))
    with pytest.raises(BadInput, match=r"data\.subset"):
        load(replace(parquet, text="content", subset="sample-10BT"))
    with pytest.raises(BadInput, match=r"'HuggingFaceFW/fineweb' is nothing on this machine, and .* needs the Hugging Face hub"):
        load(D.Source("HuggingFaceFW/fineweb", subset="sample-10BT"))
    with pytest.raises(BadInput, match="does not exist; expected 'stdlib'"):
        load(D.Source("no/such/folder"))
    with pytest.raises(BadInput, match="no file to read documents from"):
        load(D.Source(str(tmp_path)))
    (tmp_path / "a.csv").write_text("text\none\n")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    with pytest.raises(BadInput, match="several kinds"):
        load(D.Source(str(tmp_path)))
    with pytest.raises(BadInput, match=r"held out of a\.jsonl, too few .*data\.valid_documents"):
        load(D.Source(str(files / "lines" / "a.jsonl")), sequence=10_000)
    with pytest.raises(BadInput, match="1 documents, too few"):
        load(D.Source(str(tmp_path / "a.csv")))


def test_a_file_that_goes_away_ends_the_run_with_the_remedy(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text((files / "lines" / "a.jsonl").read_text())
    batches = load(D.Source(str(path))).batches(16, 0, 0, 1)
    path.unlink()
    with pytest.raises(RunFailed, match=r"b\.jsonl cannot be read further, at row 5 .*resume"):
        batches.batch(0, 1)
