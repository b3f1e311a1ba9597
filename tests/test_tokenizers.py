"""Tokenizers as transformers has them: the same ids as ours, saved and loaded too."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.errors import BadInput
from gossamer.train import tokenizer as T

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
