"""Tokenizers as transformers has them: the same ids as ours, saved and loaded too."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.app import config as configuration
from gossamer.app.job import resolve
from gossamer.core.errors import BadInput
from gossamer.train import tokenizer as T
from gossamer.train.data import load

TEXTS = st.lists(st.one_of(st.text(), st.sampled_from([T.END, " the", "</s>", "\r\n", "\x00", "é", "🦉"])), max_size=8).map("".join)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[T.Tokenizer, object, object]]:
    """Ours, as transformers has it, and that saved and loaded."""
    from transformers import AutoTokenizer

    trained = T.train_bpe(["the cat sat on the mat, the dog did not\n" * 30], 1200, 290)
    made: dict[str, tuple[T.Tokenizer, object, object]] = {}
    for name, ours in (("bytes", T.Bytes()), ("bpe", trained)):
        folder = tmp_path_factory.mktemp(name)
        theirs = T.as_transformers(ours, longest=64)
        theirs.save_pretrained(folder)
        made[name] = ours, theirs, AutoTokenizer.from_pretrained(folder)
    return made


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@given(text=TEXTS)
def test_ids_are_ours_and_text_comes_back(kinds: dict, name: str, text: str) -> None:
    ours, theirs, loaded = kinds[name]
    ids = next(ours.encode([text])).tolist()
    assert theirs(text).input_ids == ids == loaded(text).input_ids
    assert theirs.decode(ids) == text == loaded.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_the_end_mark_and_the_size_are_ours(kinds: dict, name: str) -> None:
    ours, *others = kinds[name]
    for theirs in others:
        assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length) == (ours.vocab_size, ours.eos, ours.eos, 64)


def test_what_a_corpus_names_is_taken(kinds: dict, tmp_path: Path) -> None:
    assert T.as_transformers(None)("é").input_ids == T.as_transformers("bytes")("é").input_ids == [195, 169]
    ours, theirs, _ = kinds["bpe"]
    theirs.save_pretrained(tmp_path / "with words about it")
    ours.inner.save(str(tmp_path / "alone.json"))
    for where in (tmp_path / "with words about it", tmp_path / "with words about it" / T.FILE, str(tmp_path / "alone.json")):
        assert T.as_transformers(where)("the catalogue").input_ids == theirs("the catalogue").input_ids
    with pytest.raises(BadInput, match=r"trained on a corpus"):
        T.as_transformers("bpe")
    with pytest.raises(BadInput, match="neither 'bpe' nor 'bytes'"):
        T.as_transformers(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as transformers saves it, with an end mark of its own, a gap in its numbers, and cutting texts short."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<unk>": 2, "[STOP]": 9}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[STOP]", unk_token="<unk>")
    made.chat_template = "{{ messages }}"
    at = tmp_path_factory.mktemp("of transformers")
    made.save_pretrained(at)
    return at


def test_a_folder_of_transformers_is_taken_whole(folder: Path, cache: None, tmp_path: Path) -> None:
    ours = T.named(folder)
    assert (ours.eos, ours.vocab_size) == (9, 10) and next(ours.encode(["the cat the dog"])).tolist() == [0, 1, 0, 2]
    for path in (folder, T.named(folder / T.FILE).save(tmp_path)):
        theirs = T.as_transformers(path)
        assert theirs("the cat the dog").input_ids == [0, 1, 0, 2] and theirs.chat_template and theirs.pad_token_id == 9
    (tmp_path / "a.txt").write_text("the cat the dog\n" * 200)
    corpus = load(tmp_path / "a.txt", sequence=16, tokenizer=str(folder))
    assert (corpus.eos, corpus.vocab_size, corpus.train[:4].tolist()) == (9, 10, [0, 1, 0, 2])
    assert corpus.tokenizer is not None and T.as_transformers(corpus.tokenizer).eos_token_id == 9
    job = resolve(configuration.load(sets=[f'data.tokenizer="{folder}"', "model.preset=nano"]))
    assert job.model().get_input_embeddings().weight.shape[0] == 10


def test_a_tokenizer_that_cannot_be_had_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"'some-people/their-model' is neither .* could not be had from the Hugging Face hub .*give its path"
    ):
        T.vocabulary("some-people/their-model", 300)
    with pytest.raises(BadInput, match="folder that transformers cannot load"):
        T.named(tmp_path)
    with pytest.raises(BadInput, match="neither 'bpe' nor 'bytes'"):
        T.named("a/b/c.json")
    (tmp_path / "a.json").write_text((folder / T.FILE).read_text())
    with pytest.raises(BadInput, match="no end-of-text token"):
        T.named(tmp_path / "a.json")
