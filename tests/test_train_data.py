"""Corpora, tokenizers, the cache and the order of the data."""

from __future__ import annotations

import dataclasses
import json
import os
import threading

import numpy as np
import pytest
import torch

from gossamer.core.errors import BadInput
from gossamer.train import corpus as C
from gossamer.train import tokenizer as T
from gossamer.train.data import Sampler, load


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GOSSAMER_CACHE", str(folder))
    return folder


def words_of(seed, n=300):
    g = np.random.Generator(np.random.Philox(seed))
    return "\n".join(" ".join(f"word{i}" for i in g.integers(0, 50, 8)) for _ in range(n))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "notes"
    for i in range(30):
        path = root / f"d{i % 3}" / f"f{i}.{('txt', 'md', 'py')[i % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words_of(i))
    (root / "tests").mkdir()
    (root / "tests" / "no.py").write_text("left out")
    (root / "picture.png").write_bytes(b"left out")
    return root


def names(files):
    return {f.relative for f in files}


def test_split_is_by_file_and_stable_when_files_come(folder):
    a = C.find(folder)
    assert len(a.train) + len(a.valid) == 30 and not names(a.train) & names(a.valid) and a.valid
    (folder / "zz.txt").write_text(words_of(99))
    b = C.find(folder)
    assert names(a.train) <= names(b.train) and names(a.valid) <= names(b.valid)
    assert a.content_hash != b.content_hash


def test_hash_sees_names_and_bytes_and_nothing_else(folder, tmp_path):
    first = C.find(folder).content_hash
    moved = folder.rename(tmp_path / "elsewhere")
    assert C.find(moved).content_hash == first
    file = moved / "d0" / "f0.txt"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + b"!")
    assert C.find(moved).content_hash != first
    file.write_bytes(raw)
    os.utime(file, (1, 1))
    assert C.find(moved).content_hash == first


def test_limit_takes_a_sample_within_the_limit_and_larger_contains_smaller(folder):
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    small, large = (C.find(folder, limit) for limit in (size // 5, size // 2))
    for text, limit in ((small, size // 5), (large, size // 2)):
        assert 0.8 * limit < sum(f.hi - f.lo for f in text.train + text.valid) <= limit
    assert names(small.train + small.valid) <= names(large.train + large.valid)


def test_embedded_corpus_has_no_tests_and_no_packages():
    text = C.find("stdlib", limit_bytes=3_000_000)
    parts = {part for f in text.train + text.valid for part in f.relative.split("/")}
    assert not parts & C.SKIPPED and all(f.relative.endswith(".py") for f in text.train)
    assert 0.01 < len(text.valid) / len(text.train + text.valid) < 0.2


@pytest.mark.parametrize("name,text", [("one.txt", "zeile äöü\n" * 500), ("one.txt", "ä" * 3001)])
def test_a_single_file_is_split_without_loss(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = C.find(tmp_path / name)
    halves = ["".join(C.documents(part)) for part in (found.train, found.valid)]
    assert "".join(halves) == text
    assert 0.05 < len(halves[1]) / len(text) < 0.12


def test_jsonl_gives_a_document_a_line_and_names_the_bad_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(100)))
    found = C.find(path)
    assert [*C.documents(found.train), *C.documents(found.valid)] == [f"document {i}" for i in range(100)]
    for bad in ('{"body": "x"}', "{", '"text"', '{"text": 3}'):
        path.write_text('{"text": "fine"}\n' + bad + "\n" + '{"text": "fine"}\n' * 40)
        with pytest.raises(BadInput, match=r"a\.jsonl, line 2" + (".*data.text .* holds the text: body" if "body" in bad else "")):
            list(C.documents(C.find(path).train))


def test_refuses_what_cannot_be_trained_on(tmp_path, folder):
    with pytest.raises(BadInput, match="does not exist"):
        C.find(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no text"):
        C.find(folder / "picture.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(BadInput, match=r"no non-empty .*\.txt"):
        C.find(tmp_path / "empty")
    (tmp_path / "empty" / "a.txt").write_text("x")
    with pytest.raises(BadInput, match="too little"):
        C.find(tmp_path / "empty")
    with pytest.raises(BadInput, match="limit_bytes"):
        C.find(folder, 0)
    with pytest.raises(BadInput, match="too few for one window"):
        load(folder, sequence=10**6, tokenizer="bytes")
    with pytest.raises(BadInput, match="at least 257"):
        load(folder, sequence=8, vocab_size=100)
    with pytest.raises(BadInput, match="neither 'bpe' nor 'bytes'"):
        load(folder, sequence=8, tokenizer="bpee")


def test_bytes_round_trip(folder):
    corpus = load(folder, sequence=16, tokenizer="bytes")
    text = C.find(folder)
    want = b"".join(d.encode() + b"\0" for d in C.documents(text.train))
    assert (corpus.vocab_size, corpus.eos, corpus.tokenizer) == (257, 256, None)
    assert len(corpus.train) == len(want)
    ids = np.asarray(corpus.train)
    assert bytes(ids[ids < 256].astype(np.uint8)) == want.replace(b"\0", b"") and (ids == 256).sum() == len(text.train)


def test_bpe_round_trips_all_text_and_trains_to_the_same_ids(folder, monkeypatch):
    corpus = load(folder, sequence=16, vocab_size=300)
    assert corpus.vocab_size == 300 and corpus.tokenizer is not None and corpus.train.dtype == np.uint16
    backend = T.read(corpus.tokenizer).inner
    assert backend.decode(corpus.train.tolist(), skip_special_tokens=True) == "".join(C.documents(C.find(folder).train))
    odd = "tab\t é 漢字 \x00 🦉"
    assert backend.decode(backend.encode(odd).ids) == odd
    monkeypatch.setenv("GOSSAMER_CACHE", str(folder.parent / "another"))
    again = load(folder, sequence=16, vocab_size=300)
    assert np.array_equal(corpus.train, again.train) and corpus.content_hash == again.content_hash
    # a tokenizer.json of one's own gives the same tokens
    own = load(folder, sequence=16, tokenizer=corpus.tokenizer)
    assert np.array_equal(own.train, corpus.train) and own.content_hash == corpus.content_hash


def test_merges_are_learned_from_training_text_only(folder):
    text = C.find(folder)
    for f in text.valid:
        f.path.write_text("qqqqzzzz " * 2000)
    vocab = T.read(load(folder, sequence=16, vocab_size=300).tokenizer).inner.get_vocab()
    assert not any("qq" in token or "zz" in token for token in vocab)


def test_bpe_learns_from_a_thinned_sample_of_every_document(monkeypatch):
    monkeypatch.setattr(T, "SAMPLE_BYTES", 1000)
    kept = list(T._thinned([words_of(i) for i in range(4)], 4 * len(words_of(0))))
    assert len(kept) == 4 and all(100 < len(k) < 400 and k.endswith("\n") for k in kept)


def test_cache_is_used_and_rebuilt_when_damaged(folder, cache, monkeypatch):
    first = load(folder, sequence=16, tokenizer="bytes")
    want = np.array(first.train)
    with monkeypatch.context() as m:
        m.setattr("gossamer.train.data._make", None)  # a second load makes nothing
        assert np.array_equal(load(folder, sequence=16, tokenizer="bytes").train, want)
    (file,) = cache.rglob("train.npy")
    for damage in (lambda: file.write_bytes(file.read_bytes()[:1000]), lambda: file.unlink(), lambda: np.save(file, want[:50])):
        damage()
        assert np.array_equal(load(folder, sequence=16, tokenizer="bytes").train, want)
    assert len(list((cache / "corpus").iterdir())) == 1  # no scratch is left


def test_loads_that_start_together_agree(folder, cache):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load(folder, sequence=16, tokenizer="bytes"))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and len({c.content_hash for c in found}) == 1
    assert all(np.array_equal(c.train, found[0].train) for c in found)
    assert len(list((cache / "corpus").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadInput, match="GOSSAMER_CACHE"):
        load(folder, sequence=8, tokenizer="bytes")


def sampler(**changes):
    return dataclasses.replace(Sampler(np.arange(5000, dtype=np.uint16), sequence=12, seed=1, worker=0), **changes)


def test_a_sequence_is_a_function_of_its_number_whatever_the_batch():
    whole = sampler().batch(0, 2500)  # crosses blocks of 1024
    assert whole.shape == (2500, 13) and whole.dtype == torch.int64
    assert torch.equal(whole[:, 1:], whole[:, :-1] + 1)  # windows of neighbours
    for at, n in ((0, 1), (1020, 9), (1024, 1), (2047, 2), (700, 1400), (3, 5)):
        assert torch.equal(sampler().batch(at, n), whole[at : at + n])


def test_workers_and_seeds_draw_apart_and_cover_the_text():
    whole = sampler().batch(0, 2000)
    assert not torch.equal(whole, sampler(worker=1).batch(0, 2000)) and not torch.equal(whole, sampler(seed=2).batch(0, 2000))
    starts = whole[:, 0].numpy()
    assert np.histogram(starts, bins=10, range=(0, 4988))[0].min() > 120  # 200 expected in each tenth
    tight = Sampler(np.arange(14, dtype=np.uint16), 12, 0, 0)
    assert set(tight.batch(0, 100)[:, 0].tolist()) == {0, 1}  # first and last window are both possible
    with pytest.raises(BadInput, match="too few"):
        Sampler(np.arange(12, dtype=np.uint16), 12, 0, 0)
